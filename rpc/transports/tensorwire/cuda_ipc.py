"""CUDA memory that a worker on the same host copies from, without a way through host memory.

A tensor that is sent is copied on its device; the copy is lent with a handle, which travels in
the frame, and the receiver opens it and copies to where the tensor belongs. Handles, the count
of who still needs a lent copy, and the event by which the receiver's stream waits for it are
those of ``torch.multiprocessing``.

Whether the other end can open a device's memory nobody can tell beforehand: containers, driver
settings and the allocator have their say. So one tensor is offered for each device first, and
until the peer has read from it what stands there, and said so, tensors go through host memory.

What was lent to a worker that died before it took it stays until this process ends: there is no
way to learn which of it was taken. It is no more than may be under way to one worker.
"""

from __future__ import annotations

import errno
import logging
import os
import struct
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple, Protocol

import torch

from rpc.errors import FrameError
from rpc.transports.host.backoff import Backoff, number_of
from rpc.wire.strides import reach

_log = logging.getLogger(__name__)

LENT_FROM = 1 << 20
"""Bytes from which a tensor is lent: to open a handle takes about as long as to move as many
through host memory. An estimate; it was not measured."""
TOKEN_BYTES = 16
_NO_DESCRIPTOR = frozenset({errno.EMFILE, errno.ENFILE})
_OFFER_BYTES = 4096
_SIZES = struct.Struct("<QQQ?HHHH")
_PID = struct.Struct("<q")


class DeviceOffer(NamedTuple):
    """Memory of a device that the peer is to try to open.

    Args:
        device: its index here.
        size: of the file, in bytes.
        descriptor: of the file with the handle; close it when it has been passed on.
    """

    device: int
    size: int
    descriptor: int


class Handle(NamedTuple):
    """The data by which another process opens memory; the first is the device's identity.

    The others are, in other order, what torch's ``UntypedStorage._share_cuda_`` returns.
    """

    uuid: bytes
    memory: bytes
    counter: bytes
    event: bytes
    size: int
    offset: int
    counter_offset: int
    must_wait: bool

    def encode(self) -> bytes:
        """The bytes that travel in a frame."""
        names = self.uuid, self.memory, self.counter, self.event
        numbers = self.size, self.offset, self.counter_offset, self.must_wait
        return _SIZES.pack(*numbers, *map(len, names)) + b"".join(names)

    @classmethod
    def decode(cls, data: bytes | bytearray | memoryview) -> Handle:
        """The handle in some bytes; raises ``FrameError`` if there is none."""
        try:
            size, offset, counter_offset, must_wait, *lengths = _SIZES.unpack_from(data)
        except struct.error:
            raise FrameError("a handle of device memory ends early") from None
        parts, position = [], _SIZES.size
        for length in lengths:
            parts.append(bytes(data[position : position + length]))
            position += length
        if position > len(data):
            raise FrameError("a handle of device memory ends early")
        uuid, memory, counter, event = parts
        return cls(uuid, memory, counter, event, size, offset, counter_offset, must_wait)


class _NotOpenedError(RuntimeError):
    """Memory that was lent cannot be reached from here."""


class DeviceMemory(Protocol):
    """The memory of this process's devices, as it is shared with other processes."""

    def uuid(self, index: int) -> bytes:
        """The identity of a device, the same in every process of the host."""

    def token_on(self, token: torch.Tensor, device: torch.device) -> torch.Tensor:
        """A tensor in host memory, on a device."""

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy on the same device that begins its memory, with the same strides."""

    def share(self, tensor: torch.Tensor) -> tuple[Any, ...]:
        """The data of a handle, in the order of torch's ``UntypedStorage._share_cuda_``."""

    def release(self, counter: bytes, offset: int) -> None:
        """Counts one process less that needs what was shared."""

    def open(
        self,
        handle: Handle,
        dtype: torch.dtype,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        device: str,
    ) -> torch.Tensor:
        """A copy of what another process shared; see :func:`borrow`."""


class CudaMemory:
    """CUDA's memory, shared as ``torch.multiprocessing`` shares it."""

    def uuid(self, index: int) -> bytes:
        """See :class:`DeviceMemory`."""
        return str(torch.cuda.get_device_properties(index).uuid).encode()

    def token_on(self, token: torch.Tensor, device: torch.device) -> torch.Tensor:
        """See :class:`DeviceMemory`."""
        return token.to(device)

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """See :class:`DeviceMemory`."""
        copied = torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
        )
        return copied.copy_(tensor.detach())

    def share(self, tensor: torch.Tensor) -> tuple[Any, ...]:
        """See :class:`DeviceMemory`."""
        share: Callable[[], tuple[Any, ...]] = tensor.untyped_storage()._share_cuda_
        return share()

    def release(self, counter: bytes, offset: int) -> None:
        """See :class:`DeviceMemory`."""
        torch.UntypedStorage._release_ipc_counter_cuda(counter, offset)

    def open(
        self,
        handle: Handle,
        dtype: torch.dtype,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        device: str,
    ) -> torch.Tensor:
        """See :class:`DeviceMemory`."""
        if 0 in shape or reach(shape, strides) * dtype.itemsize > handle.size:
            raise FrameError(f"a lent tensor of shape {shape} in {handle.size} bytes of memory")
        try:
            index = self._index(handle.uuid)
            with ExitStack() as streams:
                # torch gives memory back when the current stream is done: that of the copy.
                for place in {torch.device(device), torch.device("cuda", index)}:
                    if place.type == "cuda":
                        streams.enter_context(torch.cuda.stream(torch.cuda.default_stream(place)))
                lent = self.map(handle, index)
                tensor = torch.empty(0, dtype=dtype, device=lent.device)
                copied = tensor.set_(lent, 0, shape, strides).to(device, copy=True)
                del lent, tensor
        except _NotOpenedError:
            self.release(handle.counter, handle.counter_offset)
            raise
        return copied

    def _index(self, uuid: bytes) -> int:
        """Returns the index of a device in this process.

        Raises:
            _NotOpenedError: none that this process can see.
        """
        for index in range(torch.cuda.device_count()):
            if self.uuid(index) == uuid:
                return index
        name = uuid.decode(errors="replace")
        raise _NotOpenedError(f"device {name} is not visible to this process")

    def map(self, handle: Handle, index: int) -> torch.UntypedStorage:
        """Another process's memory; when this is gone it is given back."""
        torch.cuda.init()  # type: ignore[no-untyped-call]
        try:
            return torch.UntypedStorage._new_shared_cuda(
                index,
                handle.memory,
                handle.size,
                handle.offset,
                handle.counter,
                handle.counter_offset,
                handle.event,
                handle.must_wait,
            )
        except RuntimeError as error:
            raise _NotOpenedError(str(error)) from error


class _Lending:
    """The state of the offers of one device.

    Attributes:
        is_offered: an offer is being made, or was made and not answered yet.
        token: what the peer may read of it.
        handle: by which it may.
        is_usable: the peer has.
        backoff: of offers and loans.
    """

    __slots__ = ("backoff", "handle", "is_offered", "is_usable", "token")

    def __init__(self, clock: Callable[[], float]) -> None:
        self.is_offered = self.is_usable = False
        self.token: torch.Tensor | None = None
        self.handle = b""
        self.backoff = Backoff(clock)


class LentMemory:
    """A link's sending half: which devices its peer can read.

    Args:
        peer_name: for log lines.
        memory: of this process's devices.
        clock: tells the time in seconds.
    """

    def __init__(
        self,
        peer_name: str,
        memory: DeviceMemory,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._peer_name = peer_name
        self._memory = memory
        self._clock = clock
        self._lock = threading.Lock()
        self._lendings: dict[int, _Lending] = {}

    def offer(self, device: torch.device) -> DeviceOffer | None:
        """Offers a device; None if that was done, or cannot be done, or not yet again."""
        with self._lock:
            lending = self._lendings.get(device.index)
            if lending is None:
                lending = self._lendings[device.index] = _Lending(self._clock)
            if lending.is_usable or lending.is_offered or not lending.backoff.may_try():
                return None
            lending.is_offered = True
        try:
            token = os.urandom(TOKEN_BYTES)
            in_host_memory = torch.frombuffer(bytearray(token), dtype=torch.uint8)
            tensor = self._memory.token_on(in_host_memory, device)
            handle = _lend(self._memory, tensor).encode()
            data = _PID.pack(os.getpid()) + token + handle
            descriptor = os.memfd_create("tensorwire", os.MFD_CLOEXEC)
            try:
                os.ftruncate(descriptor, _OFFER_BYTES)
                os.pwrite(descriptor, data, 0)
            except OSError:
                os.close(descriptor)
                raise
        except (OSError, RuntimeError) as error:
            self._failed(device, lending, error)
            return None
        lending.handle = handle
        lending.token = tensor  # lives as long as the peer may read it
        return DeviceOffer(device.index, _OFFER_BYTES, descriptor)

    def answered(self, device: int, usable: bool, error: int = 0) -> None:
        """Notes that the peer has read what was offered, or could not.

        If what it lacks may be there later, the device is offered again, after a pause. The log
        says once that its tensors go another way.

        Args:
            device: its index here.
            usable: the peer has read it.
            error: why not, as the system's number; 0 if there is none.

        Raises:
            FrameError: nothing was offered.
        """
        with self._lock:
            lending = self._lendings.get(device)
            if lending is None or lending.token is None:
                raise FrameError(f"an answer to an offer of device {device} that was not made")
            lending.token = None
            lending.is_offered, lending.is_usable = False, usable
            if usable:
                lending.backoff.worked()
                return
            until = lending.backoff.failed(error)
        if error in _NO_DESCRIPTOR:  # it never saw the handle, or it would have given it back
            give_back(lending.handle, self._memory)
        if until:
            _log.warning(
                "worker %s cannot open memory of cuda:%d; tensors from there go through host "
                "memory, %s",
                self._peer_name,
                device,
                until,
            )

    def lend(self, tensor: torch.Tensor) -> bytes | None:
        """The handle of a copy that the peer can open; None if it cannot, or not now.

        The copy is made on the running thread's current stream.
        """
        device = tensor.device
        lending = self._lendings.get(device.index)
        if lending is None or not lending.is_usable or not lending.backoff.may_try():
            return None
        try:
            return _lend(self._memory, self._memory.copy(tensor)).encode()
        except RuntimeError as error:  # no memory for a copy, or no more events
            self._failed(device, lending, error)
            return None

    def _failed(self, device: torch.device, lending: _Lending, error: Exception) -> None:
        with self._lock:
            lending.is_offered = False
            until = lending.backoff.failed(_number_of(error))
        if until:
            _log.warning(
                "memory of %s cannot be lent to worker %s (%s); tensors from there go through "
                "host memory, %s",
                device,
                self._peer_name,
                error,
                until,
            )


def accept(descriptor: int, size: int, memory: DeviceMemory) -> None:
    """Reads what a peer offers, to see whether that is possible.

    Args:
        descriptor: of the file with the handle.
        size: of the file.
        memory: of this process's devices.

    Raises:
        OSError: it is not.
        FrameError: the file holds no offer.
    """
    data = os.pread(descriptor, size, 0)
    start = _PID.size + TOKEN_BYTES
    if len(data) < start:
        raise FrameError("an offer of device memory ends early")
    if _PID.unpack_from(data)[0] == os.getpid():
        raise OSError(errno.EINVAL, "a process cannot open memory of its own")
    try:
        handle = Handle.decode(data[start:])
        tensor = memory.open(handle, torch.uint8, (TOKEN_BYTES,), (1,), "cpu")
    except RuntimeError as error:
        raise OSError(_number_of(error) or errno.ENODEV, str(error)) from error
    if bytes(tensor.tolist()) != data[_PID.size : start]:
        raise OSError(errno.EIO, "something else stands there")


def borrow(
    handle: bytes | bytearray | memoryview,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    device: str,
    memory: DeviceMemory,
) -> torch.Tensor:
    """A copy of a tensor that was lent, ready on the default stream; gives it back.

    Args:
        handle: what ``LentMemory.lend`` returned.
        dtype: of the tensor, as are the next two.
        shape: of the tensor.
        strides: of the tensor, which is dense.
        device: where the copy is made, for example ``cuda:1``.
        memory: of this process's devices.

    Raises:
        FrameError: it is no handle, or not of as much memory.
        RuntimeError: the memory cannot be opened, or there is none for the copy.
    """
    return memory.open(Handle.decode(handle), dtype, shape, strides, device)


def give_back(handle: bytes | bytearray | memoryview, memory: DeviceMemory) -> None:
    """Takes note that nobody opens what was lent; either end may."""
    lent = Handle.decode(handle)
    memory.release(lent.counter, lent.counter_offset)


def _lend(memory: DeviceMemory, tensor: torch.Tensor) -> Handle:
    """The handle of a tensor that begins its memory, which lives until it was given back."""
    uuid = memory.uuid(tensor.device.index)
    _, name, size, offset, counter, counter_offset, event, must_wait = memory.share(tensor)
    return Handle(uuid, name, counter, event, size, offset, counter_offset, must_wait)


def _number_of(error: Exception) -> int:
    """The system's number of an error; a device without memory is short of it as the host is."""
    return errno.ENOMEM if isinstance(error, torch.OutOfMemoryError) else number_of(error)
