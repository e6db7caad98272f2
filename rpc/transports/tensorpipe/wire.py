"""Carries frames in torch's Python-call messages: bytes, pickles and entry points.

Owns the envelope in front of each frame and the few hand-made pickles by which
torch's own deserializer calls straight into the attached transport, on both
ends, with no callback in between. Knows nothing of peers, futures or threads.

torch allows one RPC agent per process and calls functions of modules, so the
transport that belongs to that agent has to be found through this module: what
``attach`` sets and ``detach`` unsets is the only mutable state here. While a
transport is attached, pickles name the two entry points by a number instead of
looking them up by module and name, which takes microseconds at either end.

Envelope, little endian: ``version u8, kind u8, flags u8, pad, sender i32,
incarnation u64, correlation u64, number u64, header length u32``,
then header and payload.
"""

from __future__ import annotations

import copyreg
import struct
import sys
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import numpy
import torch

from rpc.devices import DeviceMap, moves_host
from rpc.errors import FrameError
from rpc.ids import new_tuple
from rpc.transports.base import Frame, FrameKind

Payload = bytes | bytearray | memoryview

LIFELINE = 16
"""Asks to be answered only when the worker that gets it leaves."""
CLOSE = 17
"""Says that the sender leaves; answered once nothing of the receiver's is under way to it."""
PRIMER = 18
"""Sent to oneself once, so that torch imports what it needs before real traffic."""
BATCH = 19
"""Several frames without tensors in one."""
VOID = 20
"""Takes the number of a call that was not taken; the payload says what it had in shared memory."""
RECEIPT = 23
"""Says which large replies have arrived."""
LET_GO = 24
"""Sent to oneself at the end, once for each of torch's threads."""
SEGMENT = 25
"""Offers shared memory for tensors to come."""
SEGMENT_ANSWER = 26
"""Says whether what was offered can be used."""
DEVICES = 27
"""Asks for the devices that tensors will arrive on; the payload names them."""
DONE = 32
"""Answer without a frame: the call was taken, or is no longer wanted."""
REFUSED = 33
"""Answer without a frame: the payload says why nothing from the sender is accepted."""
LEFT = 36
"""Last answer to LIFELINE: its sender closes, and neither answers nor waits any more."""
READY = 37
"""Answer to DEVICES: the payload says what is in the way, if something is."""

TENSOR_PAYLOAD_MIN = 128 * 1024
"""Payloads from this size travel as a tensor, which torch does not copy."""
_NEVER = sys.maxsize

_QUESTION_CODE = 0x7457_0001
_ANSWER_CODE = 0x7457_0002
_KINDS = {kind.value: kind for kind in FrameKind}
_VERSION = 5
_PAYLOAD_IN_TENSOR = 1
_PLACED = 2
_ENVELOPE = struct.Struct("<BBBxiQQQI")
_ENTRY = struct.Struct("<BQII")
_LENGTH = struct.Struct("<Q")


class Envelope(NamedTuple):
    """The envelope of a frame: who sent it and what it is.

    Args:
        kind: a ``FrameKind`` or one of this module's kinds.
        sender: worker id of the sender.
        incarnation: which life of the sender.
        correlation: ties an answer to its question.
        number: which of the sender's calls this is, counting from 1, or which of the receiver's
            it answers; 0 if it is none that counts.
    """

    kind: int
    sender: int
    incarnation: int
    correlation: int = 0
    number: int = 0


class SenderId(NamedTuple):
    """The worker that sends, as all its envelopes name it.

    Args:
        worker_id: which worker.
        incarnation: which life of it.
    """

    worker_id: int
    incarnation: int

    def envelope(self, kind: int, correlation: int = 0, number: int = 0) -> Envelope:
        """Returns an envelope of this sender's; the arguments are those of :class:`Envelope`."""
        return Envelope(kind, self.worker_id, self.incarnation, correlation, number)


class Bus(Protocol):
    """The transport, as torch's threads see it. Nothing here may raise or block."""

    def question(
        self, envelope: Envelope, frame: Frame
    ) -> torch.futures.Future[TorchAnswer] | TorchAnswer:
        """Takes a call; the answer, or its future where the kind expects one later."""

    def answer(self, envelope: Envelope, frame: Frame) -> None:
        """Takes the answer to one of our calls."""


class PlacedFrame(Frame):
    """A frame of whose payload and tensors some are in shared memory; its header says where."""

    __slots__ = ()

    @staticmethod
    def join(table: bytes, header: bytes) -> bytes:
        """The header of such a frame, from its table and that of the frame it stands for."""
        return b"".join((_LENGTH.pack(len(table)), table, header))

    def split(self) -> tuple[bytes, bytes]:
        """The inverse of ``join``.

        Raises:
            FrameError: the header is not what ``join`` makes.
        """
        header = self.header
        if len(header) < _LENGTH.size:
            raise FrameError(f"a header of {len(header)} bytes cannot say what is in shared memory")
        end = _LENGTH.size + _LENGTH.unpack_from(header)[0]
        return header[_LENGTH.size : end], header[end:]


class TorchCall(NamedTuple):
    """The call that torch's callee makes: ``func(*args, **kwargs)``."""

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


_NO_KEYWORDS: Mapping[str, Any] = MappingProxyType({})


class _Attachment:
    """Holds the one attached transport."""

    __slots__ = ("bus", "tables")

    def __init__(self) -> None:
        self.bus: Bus | None = None
        self.tables: Any = None


_attached = _Attachment()


def attach(bus: Bus, tensor_tables: Any) -> None:
    """Routes what arrives to ``bus``.

    Args:
        bus: the transport of torch's current agent.
        tensor_tables: torch's thread-local holder of a message's tensors.
    """
    _attached.bus, _attached.tables = bus, tensor_tables
    for function, code in _ENTRY_POINTS:
        copyreg.add_extension(function.__module__, function.__name__, code)


def detach(bus: Bus) -> None:
    """Routes nothing to ``bus`` any more."""
    if _attached.bus is not bus:
        return
    _attached.bus = None
    for function, code in _ENTRY_POINTS:
        copyreg.remove_extension(function.__module__, function.__name__, code)


class TorchAnswer:
    """The value of a finished call; its pickle delivers itself when it is loaded."""

    __slots__ = ("data", "tensors")

    def __init__(self, data: bytes, tensors: list[torch.Tensor]) -> None:
        self.data = data
        self.tensors = tensors

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        outgoing = getattr(_attached.tables, "send_tables", None)
        if outgoing is None:  # torch only looks for the devices of the tensors in it
            return tuple, (self.tensors,)
        outgoing.extend(self.tensors)
        self.tensors = []  # so that only torch holds them, for as long as it sends them
        return receive_answer, (self.data,)


def receive_question(data: bytes) -> TorchCall:
    """Entry point of torch's deserializer at the callee."""
    bus = _attached.bus
    if bus is None:
        raise FrameError("no TensorWire transport is attached to this process's RPC agent")
    envelope, frame = unpack(data, _attached.tables.recv_tables)
    return new_tuple(TorchCall, (bus.question, (envelope, frame), _NO_KEYWORDS))


def receive_answer(data: bytes) -> None:
    """Entry point of torch's deserializer at the caller."""
    bus = _attached.bus
    if bus is not None:
        bus.answer(*unpack(data, _attached.tables.recv_tables))


def lent_from(device_map: DeviceMap) -> int:
    """The size from which payloads travel as a tensor: none may that a device map would move."""
    return _NEVER if moves_host(device_map) else TENSOR_PAYLOAD_MIN


def compact(frame: Frame) -> Frame:
    """The same frame with tensors that :func:`pack` need not copy, which takes memory."""
    return frame._replace(tensors=tuple(map(_compact, frame.tensors)))


def pack(
    envelope: Envelope, frame: Frame, lent_from: int = _NEVER
) -> tuple[bytes, list[torch.Tensor]]:
    """Returns the bytes and tensors that carry ``frame``.

    Args:
        envelope: stands in front of it.
        frame: what is carried.
        lent_from: the size from which its payload travels as a tensor, and is not copied.
    """
    tensors = [*map(_compact, frame.tensors)]
    payload: Payload = frame.payload
    flags = _PLACED if type(frame) is PlacedFrame else 0
    if len(payload) >= lent_from:
        tensors.append(_as_tensor(payload))
        payload, flags = b"", flags | _PAYLOAD_IN_TENSOR
    head = _ENVELOPE.pack(
        _VERSION,
        envelope.kind,
        flags,
        envelope.sender,
        envelope.incarnation,
        envelope.correlation,
        envelope.number,
        len(frame.header),
    )
    return b"".join((head, frame.header, payload)), tensors


def unpack(data: bytes, tensors: list[torch.Tensor]) -> tuple[Envelope, Frame]:
    """The inverse of ``pack``.

    Raises:
        FrameError: if ``data`` is not what ``pack`` makes.
    """
    try:
        version, kind, flags, sender, life, correlation, number, size = _ENVELOPE.unpack_from(data)
    except struct.error as error:
        raise FrameError(f"a message of {len(data)} bytes has no envelope") from error
    split = _ENVELOPE.size + size
    if version != _VERSION or split > len(data):
        raise FrameError(f"envelope of version {version} with a {size}-byte header is malformed")
    payload: Payload = data[split:]
    if flags & _PAYLOAD_IN_TENSOR:
        *tensors, carrier = tensors
        payload = carrier.numpy().data
    header = data[_ENVELOPE.size : split]
    frame_kind = _KINDS.get(kind, FrameKind.NOTICE)
    # what Frame(...) and Envelope(...) do, without a call of Python's in between
    frame_type = PlacedFrame if flags & _PLACED else Frame
    frame = new_tuple(frame_type, (frame_kind, correlation, header, payload, tuple(tensors)))
    return new_tuple(Envelope, (kind, sender, life, correlation, number)), frame


def call_pickle(data: bytes) -> bytes:
    """The pickle of a call that hands ``data`` to ``receive_question``."""
    return b"".join((_CALL_HEAD, _LENGTH.pack(len(data)), data, _CALL_TAIL))


def join(frames: Iterable[Frame]) -> bytes:
    """Packs frames without tensors into the payload of one BATCH frame."""
    parts: list[Payload] = []
    for kind, correlation, header, payload, _ in frames:
        parts += _ENTRY.pack(kind, correlation, len(header), len(payload)), header, payload
    return b"".join(parts)


def split(payload: Payload) -> list[Frame]:
    """The inverse of ``join``."""
    data, position, frames = bytes(payload), 0, []
    while position < len(data):
        kind, correlation, header_size, payload_size = _ENTRY.unpack_from(data, position)
        start = position + _ENTRY.size
        middle = start + header_size
        position = middle + payload_size
        frames.append(Frame(_KINDS[kind], correlation, data[start:middle], data[middle:position]))
    return frames


_ENTRY_POINTS: tuple[tuple[Callable[[bytes], Any], int], ...] = (
    (receive_question, _QUESTION_CODE),
    (receive_answer, _ANSWER_CODE),
)
_CALL_HEAD = (
    b"\x80\x04"  # protocol 4
    + struct.pack("<ci", b"\x84", _QUESTION_CODE)  # the function with this number
    + b"\x8e"  # bytes with an eight-byte length follow
)
_CALL_TAIL = b"\x85R."  # make a tuple, call, stop


class _WritableView:
    """Presents read-only bytes to numpy as writable, to lend them to torch unwritten."""

    def __init__(self, payload: Payload) -> None:
        view = numpy.frombuffer(payload, dtype=numpy.uint8)
        self.owner = view
        self.__array_interface__ = view.__array_interface__ | {
            "data": (view.__array_interface__["data"][0], False)
        }


def _as_tensor(payload: Payload) -> torch.Tensor:
    return torch.from_numpy(numpy.asarray(_WritableView(payload)))


def _compact(tensor: torch.Tensor) -> torch.Tensor:
    """Torch sends whole storages; a view is copied so that only what it shows leaves."""
    if tensor.untyped_storage().nbytes() == tensor.nbytes:
        return tensor
    return tensor.clone(memory_format=torch.preserve_format)
