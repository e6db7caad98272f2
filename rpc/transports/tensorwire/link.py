"""One direction between two workers: its channels, and what travels on them.

The worker that opened a link sends requests and notices on it, the other one
the replies: a thread that waits for a reply never meets a request. Owns the
choice of how payload and tensors travel: inline, shared memory or bulk channels.
Before it copies into shared memory it lets the other end know that something comes,
so that a thread there that sleeps wakes up meanwhile, and one that polls goes on polling.
Reading the sockets is the business of ``main_reader``, ``replies``, ``requests``
and ``bulk``.
"""

from __future__ import annotations

import errno
import itertools
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import torch

from rpc.errors import FrameError
from rpc.transports.base import Frame, Unreceived, unreceived
from rpc.transports.host.backoff import Refusals
from rpc.transports.host.copying import CopyThreads
from rpc.transports.host.frame_table import (
    HOST_PLACEMENTS,
    INLINE_ALIGNMENT,
    Item,
    Look,
    Placement,
    Source,
    join_rows,
    payload_row,
    source_of_payload,
    tensor_over,
    tensor_row,
    unpack_table,
)
from rpc.transports.host.regions import Array, view_of
from rpc.transports.host.segments import SHARED_FROM, Budget, ReceivedSegments, SendPool, SharedSlot
from rpc.transports.tensorwire.channel import QueuedFrame, Sender, Unsent
from rpc.transports.tensorwire.cuda_ipc import (
    LENT_FROM,
    CudaMemory,
    DeviceMemory,
    LentMemory,
    accept,
    borrow,
    give_back,
)
from rpc.transports.tensorwire.device_maps import PeerDeviceMap, to_device, to_host
from rpc.transports.tensorwire.framing import (
    Buffer,
    BulkEvent,
    Chunk,
    DeviceAnswered,
    DeviceOffered,
    SegmentAnswered,
    SegmentOffered,
    WireKind,
    pack_pair,
)
from rpc.transports.tensorwire.receive_buffers import ReceiveBuffers
from rpc.transports.tensorwire.transfers import Transfers

_log = logging.getLogger(__name__)

STREAM_FROM = 1 << 20
_KERNEL_POLL_SECONDS = 0.002
_INSTEAD = "sockets"
_INLINE_AT_MOST = 1 << 20
_PLAIN_BELOW = 1 << 14
_CHUNK_BYTES = 1 << 20
_ANEW_SECONDS = 50e-6
"""Seconds until the other end is told anew; once told, it polls for longer than that."""
_LAST_BYTES = 1 << 18
"""Bytes that are copied in about the time in which a thread wakes.

Woken when copying begins, the other end takes the core that a helper was to copy with, and is
asleep again when the frame comes: an echo of 64 MB took 11.8 ms on two cores, and now 10.4.
"""


@dataclass(frozen=True, slots=True)
class Resources:
    """The resources that all links of one worker share.

    Args:
        budget: of shared memory.
        buffers: for what arrives.
        max_message_bytes: see ``Settings``.
        copier: copies.
        awake_seconds: how long the other end polls before it sleeps, on average.
        device_memory: of this process's devices.
    """

    budget: Budget
    buffers: ReceiveBuffers
    max_message_bytes: int
    copier: CopyThreads
    awake_seconds: float
    device_memory: DeviceMemory = field(default_factory=CudaMemory)


@dataclass(slots=True)
class _Draft:
    """A table under construction, with what travels in the frame itself."""

    rows: list[bytes] = field(default_factory=list)
    slots: list[SharedSlot] = field(default_factory=list)
    """The slot in shared memory that was filled."""
    lent: list[bytes] = field(default_factory=list)
    """Handles of tensors that stay on their devices."""
    parts: list[Buffer] = field(default_factory=list)
    streams: list[tuple[int, memoryview]] = field(default_factory=list)
    """Transfers with their numbers; they begin once everything has its place."""
    inline: int = 0
    announced: bool = False
    to_share: int = 0
    """Bytes that are still to be copied into shared memory, if there is room."""

    def add_inline(self, data: Buffer) -> int:
        if not data:
            return self.inline
        padding = -self.inline % INLINE_ALIGNMENT
        if padding:
            self.parts.append(bytes(padding))
        position = self.inline + padding
        self.parts.append(data)
        self.inline = position + len(data)
        return position


class BulkReader(Protocol):
    """The reading half of a bulk channel, as the link sees it."""

    def acknowledge_owed(self) -> None:
        """Tells the other end what has arrived, if it has not been told."""


class Link:
    """The channels of one direction.

    Args:
        resources: shared with the worker's other links.
        peer_name: for log lines.
        devices: where this worker's devices are at the other end.
        same_host: both ends are on one host, connected by Unix sockets.
    """

    def __init__(
        self, resources: Resources, peer_name: str, devices: PeerDeviceMap, *, same_host: bool
    ) -> None:
        self._peer_name = peer_name
        self._devices = devices
        self._limit = resources.max_message_bytes
        self._copy = resources.copier.copy
        self._device_memory = resources.device_memory
        self._pool = self._lent = None
        if same_host:
            self._lent = LentMemory(peer_name, resources.device_memory)
            self._pool = SendPool(resources.budget, resources.copier.copy, peer_name, _INSTEAD)
        self._places = tuple(Placement) if same_host else HOST_PLACEMENTS
        self._segments = ReceivedSegments(peer_name, _INSTEAD)
        self._devices_refused = Refusals()
        self.transfers = Transfers(resources.buffers, resources.max_message_bytes)
        self._transfer_numbers = itertools.count(1)
        self._turn = itertools.count()
        self.main: Sender | None = None
        self.announce: Callable[[], None] | None = None
        """Sends a small message at once, of any meaning; set with ``main``."""
        self.heard_at = -math.inf
        """The time at which something last came from the other end, which has polled since."""
        self._awake_seconds = resources.awake_seconds
        self._announced_at = -math.inf
        self.bulk: list[Sender] = []
        self.bulk_readers: list[BulkReader] = []
        self.unsent = Unsent()
        self.place = self.transfers.place
        self.is_whole = self.transfers.is_whole

    def send(
        self,
        frame: Frame,
        looks: Sequence[Look] = (),
        flush_soon: Callable[[Sender], None] | None = None,
    ) -> None:
        """Sends or queues a frame in which ``peer`` found no fault.

        Args:
            frame: what to send.
            looks: how its tensors look.
            flush_soon: if given, small frames are queued only, and this is told.
        """
        main = self.main
        if main is None:
            return
        kind, correlation, header, inline, _ = frame
        table = b""
        draft: _Draft | None = None
        try:
            if looks or len(inline) >= _PLAIN_BELOW or type(inline) is memoryview:
                draft = self._draft(frame, looks)
                table = join_rows(draft.rows)
                large = draft.inline >= _PLAIN_BELOW or len(header) >= _PLAIN_BELOW
                if not large:  # before anything leaves: there may be no memory
                    inline = b"".join(draft.parts)
                for number, view in draft.streams:
                    self._stream(number, view)
                if large:
                    parts = tuple(draft.parts)
                    main.send(QueuedFrame(kind, correlation, header, table, parts, draft.inline))
                    return
            if flush_soon is None:
                main.send_small(kind, correlation, header, table, inline)
            else:
                main.hold_small(kind, correlation, header, table, inline)
        except Exception:  # it stays here; an interrupt may come when it has left
            if draft is not None:
                self._take_back(draft)
            raise
        if flush_soon is not None:
            flush_soon(main)

    def lend_memory(self, nbytes: int) -> Array | None:
        """Shared memory from which a tensor is sent as it is; None if there is none."""
        if self._pool is None or nbytes < SHARED_FROM:
            return None
        lent = self._pool.lend(nbytes)
        if lent is None:
            self._offer_segment(self._pool, nbytes)
        return lent

    def tell_soon(self) -> None:
        """Lets the other end know that something comes, unless it polls anyway."""
        now = time.perf_counter()
        if (
            self.announce is not None
            and now - self.heard_at > self._awake_seconds
            and now - self._announced_at > _ANEW_SECONDS
        ):
            self._announced_at = now
            self.announce()

    def senders(self) -> list[Sender]:
        """The writing halves of all channels."""
        return [*self.bulk, *([self.main] if self.main is not None else [])]

    def flush_queue(self, seconds: float) -> bool:
        """Waits until sockets have taken everything accepted; False if time is up."""
        return self.unsent.wait(0, seconds)

    def flush_kernel(self, left: Callable[[], float], is_over: threading.Event) -> bool:
        """Waits until the other host has everything that sockets took; False if time is up.

        Args:
            left: seconds until then.
            is_over: set when there is nobody left to take it.
        """
        for sender in self.senders():
            while sender.in_kernel() and not is_over.is_set():
                if not left():
                    return False
                is_over.wait(_KERNEL_POLL_SECONDS)
        return True

    def _draft(self, frame: Frame, looks: Sequence[Look]) -> _Draft:
        draft = _Draft()
        payload = frame.payload
        draft.to_share = len(payload) if len(payload) >= SHARED_FROM else 0
        for look in looks:
            if look.nbytes >= SHARED_FROM:
                draft.to_share += look.nbytes
        try:
            self._add_payload(draft, payload)
            for tensor, look in zip(frame.tensors, looks, strict=True):
                self._add_tensor(draft, tensor, look)
        except BaseException:
            self._take_back(draft)
            raise
        return draft

    def _take_back(self, draft: _Draft) -> None:
        """Frees what was filled and lent for a frame that is not sent, after all."""
        if self._pool is not None:
            self._pool.take_back(draft.slots)
        for handle in draft.lent:
            give_back(handle, self._device_memory)

    def _add_payload(self, draft: _Draft, payload: Buffer) -> None:
        size = len(payload)
        if size < SHARED_FROM and type(payload) is bytes:
            if size:
                draft.parts.append(payload)
                draft.inline = size
            draft.rows.append(payload_row(Placement.INLINE, 0, 0, size))
        else:
            source = source_of_payload(payload)
            draft.rows.append(payload_row(*self._put_bytes(draft, *source), source.size))

    def _add_tensor(self, draft: _Draft, tensor: torch.Tensor, look: Look) -> None:
        device = ""
        if self._devices.moves_host or not tensor.is_cpu:
            device = self._devices.destination(tensor.device)
            if self._lend(draft, tensor, look, device):
                return
            tensor = to_host(tensor)
        place = self._put_bytes(draft, tensor.data_ptr(), look.nbytes, tensor)
        draft.rows.append(tensor_row(*place, look, device))

    def _lend(self, draft: _Draft, tensor: torch.Tensor, look: Look, device: str) -> bool:
        """Lends a large tensor that goes from device to device; False if that cannot be."""
        lent = self._lent
        if lent is None or look.nbytes < LENT_FROM or not (tensor.is_cuda and device):
            return False
        offer = lent.offer(tensor.device)
        if offer is not None:
            header = pack_pair(offer.size, 0)
            self.bulk[0].send(
                QueuedFrame(WireKind.DEVICE, offer.device, header, descriptor=offer.descriptor)
            )
        handle = lent.lend(tensor)
        if handle is None:
            return False
        draft.lent.append(handle)
        position = draft.add_inline(handle)
        draft.rows.append(tensor_row(Placement.LENT, len(handle), position, look, device))
        return True

    def _share(self, draft: _Draft, target: int, source: int, length: int) -> None:
        """Copies the next bytes that a frame shares; announces the frame before the last."""
        early = draft.to_share - _LAST_BYTES
        if early >= length:
            self._copy(target, source, length)
            return
        if early > 0:
            self._copy(target, source, early)
            target, source, length = target + early, source + early, length - early
        if not draft.announced:
            draft.announced = True
            self.tell_soon()
        self._copy(target, source, length)

    def _put_bytes(
        self, draft: _Draft, address: int, size: int, owner: memoryview | torch.Tensor
    ) -> tuple[Placement, int, int]:
        """Copies the bytes or notes what is to be sent; tells where the peer finds them."""
        if size >= SHARED_FROM and self._pool is not None:
            slot = self._pool.put(address, size, partial(self._share, draft))
            draft.to_share -= size
            if slot is not None:
                draft.slots.append(slot)
                return Placement.SHARED, *slot
            self._offer_segment(self._pool, size)
        view = Source(address, size, owner).view()
        crowded = draft.inline + size > _INLINE_AT_MOST
        if size and self.bulk and (size >= STREAM_FROM or crowded):
            number = next(self._transfer_numbers)
            draft.streams.append((number, view))
            return Placement.STREAM, 0, number
        return Placement.INLINE, 0, draft.add_inline(view)

    def _offer_segment(self, pool: SendPool, length: int) -> None:
        offer = pool.offer(length)
        if offer is not None:
            header = pack_pair(offer.size, 0)
            self.bulk[0].send(
                QueuedFrame(WireKind.SEGMENT, offer.segment, header, descriptor=offer.descriptor)
            )

    def _stream(self, number: int, view: memoryview) -> None:
        for start in range(0, len(view), _CHUNK_BYTES):
            part = view[start : start + _CHUNK_BYTES]
            sender = self.bulk[next(self._turn) % len(self.bulk)]
            header = pack_pair(start, len(view))
            sender.send(QueuedFrame(WireKind.CHUNK, number, header, b"", (part,), len(part)))

    def open(self, frame: Frame, table: bytes) -> Frame | None:
        """Puts a frame's payload and tensors in their places; None while some are still missing.

        Args:
            frame: as it came off the main channel, its payload being the inline section.
            table: not empty, unless the payload is :class:`Unreceived`.

        Raises:
            FrameError: it is malformed.
        """
        if type(frame.payload) is Unreceived:
            items = unpack_table(table, self._limit, self._limit, self._places) if table else []
        else:
            items = unpack_table(table, len(frame.payload), self._limit, self._places)
        for item in items:
            if item.place is Placement.STREAM:
                complete = self.transfers.frame_received(frame, items)
                return None if complete is None else self._assemble(*complete)
        return self._assemble(frame, items, {})

    def bulk_event(self, event: BulkEvent, sender: Sender, descriptors: list[int]) -> Frame | None:
        """Takes what arrived complete on a bulk channel; returns the frame it completed.

        Raises:
            FrameError: it is malformed.
        """
        if isinstance(event, Chunk):
            complete = self.transfers.chunk_received(event.transfer, event.length)
            return None if complete is None else self._assemble(*complete)
        if isinstance(event, SegmentOffered):
            self._map_segment(event, sender, descriptors)
        elif isinstance(event, SegmentAnswered) and self._pool is not None:
            self._pool.answered(event.segment, event.usable, event.error)
        elif isinstance(event, DeviceOffered):
            self._try_device(event, sender, descriptors)
        elif isinstance(event, DeviceAnswered) and self._lent is not None:
            self._lent.answered(event.device, event.usable, event.error)
        return None

    def _map_segment(self, offered: SegmentOffered, sender: Sender, descriptors: list[int]) -> None:
        answer, number = WireKind.SEGMENT_READY, 0
        try:
            self._take_segment(offered, descriptors)
        except OSError as error:
            answer, number = WireKind.SEGMENT_REFUSED, self._segments.refused(error)
        sender.send(QueuedFrame(answer, offered.segment, pack_pair(number, 0)))

    def _try_device(self, offered: DeviceOffered, sender: Sender, descriptors: list[int]) -> None:
        answer, number = WireKind.DEVICE_READY, 0
        try:
            descriptor = _descriptor_of_offer(descriptors)
            try:
                accept(descriptor, offered.size, self._device_memory)
            finally:
                os.close(descriptor)
        except OSError as error:
            answer, number = WireKind.DEVICE_REFUSED, self._device_refused(offered.device, error)
        sender.send(QueuedFrame(answer, offered.device, pack_pair(number, 0)))

    def _device_refused(self, device: int, error: OSError) -> int:
        """Takes note of why a device cannot be read, which is logged once; returns its number."""
        number, is_new = self._devices_refused.note(error, device)
        if is_new:
            _log.warning(
                "memory of worker %s's cuda:%d cannot be opened (%s); tensors from there come "
                "through host memory",
                self._peer_name,
                device,
                error,
            )
        return number

    def _take_segment(self, offered: SegmentOffered, descriptors: list[int]) -> None:
        """Maps what is offered.

        Raises:
            OSError: it cannot be mapped, or its descriptor did not arrive: the system drops
                those for which a process has no room.
        """
        descriptor = _descriptor_of_offer(descriptors)
        try:
            self._segments.add(offered.segment, offered.size, descriptor)
        finally:
            os.close(descriptor)

    def _assemble(
        self, frame: Frame, items: list[Item], arrays: dict[int, Array], problem: str = ""
    ) -> Frame:
        left = iter(items)
        if type(frame.payload) is Unreceived:
            problem = frame.payload.decode()
        if not problem:
            try:
                return self._with_parts(frame, left, arrays)
            except FrameError:
                raise
            except Exception as error:  # a device has no memory left, most likely
                problem = f"{type(error).__name__}: {error}"
        for item in left:
            if item.place is Placement.SHARED:
                self._array(item, arrays)  # dies at once, which gives its slot back
            elif item.place is Placement.LENT and type(frame.payload) is not Unreceived:
                give_back(_handle_in(frame.payload, item), self._device_memory)
        return unreceived(frame, sum(item.nbytes for item in items), self._peer_name, problem)

    def _with_parts(self, frame: Frame, left: Iterator[Item], arrays: dict[int, Array]) -> Frame:
        """The frame with its payload and tensors; what it has claimed is not ``left``."""
        inline = frame.payload
        first = next(left)
        payload: Buffer
        if first.place is Placement.INLINE:
            payload = inline[first.position : first.position + first.nbytes]
        else:
            payload = view_of(self._array(first, arrays), first.nbytes)
        tensors: list[torch.Tensor] = []
        for item in left:
            if item.place is Placement.LENT:
                tensors.append(_borrowed(inline, item, self._device_memory))
                continue
            if item.place is Placement.INLINE:
                tensor = tensor_over(inline, item, item.position)
            else:
                tensor = tensor_over(self._array(item, arrays), item)
            tensors.append(to_device(tensor, item.device) if item.device else tensor)
        return Frame(frame.kind, frame.correlation, frame.header, payload, tuple(tensors))

    def _array(self, item: Item, arrays: dict[int, Array]) -> Array:
        if item.place is Placement.SHARED:
            return self._segments.array(item.segment, item.position, item.nbytes)
        return arrays[item.position]

    def close(self) -> None:
        """Gives up all memory; received tensors keep theirs. Channels are closed by readers."""
        if self._pool is not None:
            self._pool.close()
        self._segments.close()


def _descriptor_of_offer(descriptors: list[int]) -> int:
    """The file that came with an offer; the caller closes it.

    Raises:
        OSError: none did: the system drops descriptors for which a process has no room.
    """
    if not descriptors:
        raise OSError(errno.EMFILE, "its file did not arrive; too many are open, most likely")
    return descriptors.pop(0)


def _handle_in(inline: Buffer, item: Item) -> Buffer:
    return inline[item.position : item.position + item.segment]


def _borrowed(inline: Buffer, item: Item, memory: DeviceMemory) -> torch.Tensor:
    assert item.dtype is not None
    handle = _handle_in(inline, item)
    return borrow(handle, item.dtype, item.shape, item.strides, item.device, memory)
