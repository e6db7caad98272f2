"""Control messages, by which workers tell each other about references, and their codec.

Owns the message types, the layout of a batch of them, the layout of the
reference table in the header of a call, and the filter that recognises a batch
that came twice. What a message means is decided elsewhere (``references``).

Nothing here is ever pickled. A batch is: version, sequence number, number of
messages, then for each message its code and its fields in order; all integers
little-endian. To add a message, write its dataclass and add a line to
``_LAYOUTS``; a code, once used, keeps its meaning.
"""

from __future__ import annotations

import bisect
import enum
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Final, Generic, NamedTuple, TypeVar

from rpc.errors import FrameError
from rpc.ids import GlobalId, Life, Reference, new_tuple

T = TypeVar("T")


class Passage(enum.IntEnum):
    """The way a reference travels inside a request or reply."""

    CREATION = 1
    """In the request of ``remote()``: the receiver will own the value."""
    CHILD = 2
    """User to user: the receiver registers its fork with the owner, then releases the sender."""
    GRANT = 3
    """Owner to user: the fork is registered already."""
    RETURN = 4
    """User to owner in a reply: the owner releases the sender at once."""
    BORROW = 5
    """User to owner in a request: the sender keeps its own fork until the call is over."""
    LOOPBACK = 6
    """Owner to itself."""


class Passed(NamedTuple):
    """One reference inside a request or reply; its header has a table of these.

    Args:
        reference: the value meant.
        fork: the receiver's fork, or a token for the passage where the receiver needs none.
            Allocated by the sender, so ``fork.life`` is the parent.
        passage: what the receiver has to do.
    """

    reference: Reference
    fork: GlobalId
    passage: Passage


class ControlMessage:
    """Base of everything that can travel in a control batch."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Register(ControlMessage):
    """User to owner: ``fork``, which I was given by ``fork.life``, exists."""

    reference: Reference
    fork: GlobalId


@dataclass(frozen=True, slots=True)
class Registered(ControlMessage):
    """Owner to user: your fork keeps the value alive."""

    fork: GlobalId


@dataclass(frozen=True, slots=True)
class Rejected(ControlMessage):
    """Owner to user: your fork names a value that is gone."""

    fork: GlobalId
    reason: str


@dataclass(frozen=True, slots=True)
class Accepted(ControlMessage):
    """Receiver to parent: you need not keep your fork alive for this child any more."""

    fork: GlobalId


@dataclass(frozen=True, slots=True)
class Delete(ControlMessage):
    """User to owner: the fork is gone."""

    reference: Reference
    fork: GlobalId


@dataclass(frozen=True, slots=True)
class Abandoned(ControlMessage):
    """Creator to owner, in place of a ``remote()`` request that could not be sent."""

    reference: Reference
    fork: GlobalId
    reason: str


@dataclass(frozen=True, slots=True)
class Ready(ControlMessage):
    """A worker called shutdown, and knows the group to be in ``phase``; see ``termination``."""

    phase: int


@dataclass(frozen=True, slots=True)
class Probe(ControlMessage):
    """The leader of a shutdown asks for an answer as soon as the receiver is quiet.

    ``members`` are the workers that the leader believes to be living.
    """

    phase: int
    wave: int
    members: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Quiet(ControlMessage):
    """The answer to a probe, with the sender's counters."""

    phase: int
    wave: int
    activity: int
    notices_sent: int
    notices_received: int


@dataclass(frozen=True, slots=True)
class Leaving(ControlMessage):
    """The sender leaves the group for good, as agreed or (``phase`` 0) of its own accord."""

    phase: int


@dataclass(frozen=True, slots=True)
class Lost(ControlMessage):
    """A life of a worker was declared lost, perhaps the receiver's own."""

    worker: int
    incarnation: int
    reason: str


@dataclass(frozen=True, slots=True)
class Cancel(ControlMessage):
    """Caller to callee: nobody waits for the replies to these requests of mine any more."""

    correlations: tuple[int, ...]


# --- Codec ------------------------------------------------------------------

_VERSION: Final = 1
_BATCH: Final = struct.Struct("<BQI")
_GLOBAL_ID: Final = struct.Struct("<IQQ")
_REFERENCE: Final = struct.Struct("<IQQIQQ")
_PASSED: Final = struct.Struct("<IQQIQQIQQB")
PASSED_BYTES: Final = _PASSED.size
"""The length of one entry of a reference table."""
_COUNT: Final = struct.Struct("<I")
_NUMBER: Final = struct.Struct("<Q")
_TEXT: Final = struct.Struct("<H")
_MAX_TEXT_BYTES: Final = 0xFFFF


class _Reader:
    """Takes fields off the front of received bytes."""

    __slots__ = ("_data", "_offset")

    def __init__(self, data: bytes | bytearray | memoryview) -> None:
        self._data = memoryview(data).cast("B")
        self._offset = 0

    def take(self, layout: struct.Struct) -> tuple[Any, ...]:
        return layout.unpack(self.take_bytes(layout.size))

    def take_bytes(self, size: int) -> memoryview:
        end = self._offset + size
        if end > len(self._data):
            raise FrameError(f"control data ends at byte {len(self._data)}, {end} expected")
        piece = self._data[self._offset : end]
        self._offset = end
        return piece

    def expect_end(self) -> None:
        if self._offset != len(self._data):
            raise FrameError(f"{len(self._data) - self._offset} stray bytes after control data")


@dataclass(frozen=True, slots=True)
class _Field(Generic[T]):
    """The writer and the reader of one type of field."""

    write: Callable[[bytearray, T], None]
    read: Callable[[_Reader], T]


def _write_global_id(out: bytearray, value: GlobalId) -> None:
    out += _GLOBAL_ID.pack(value.creator, value.incarnation, value.counter)


def _read_global_id(reader: _Reader) -> GlobalId:
    return GlobalId(*reader.take(_GLOBAL_ID))


def _reference_numbers(value: Reference) -> tuple[int, ...]:
    rref, owner = value.rref, value.owner
    return (
        *(rref.creator, rref.incarnation, rref.counter),
        *(owner.worker, owner.incarnation, value.creation),
    )


def _reference_from(numbers: tuple[int, ...]) -> Reference:
    rref, owner = new_tuple(GlobalId, numbers[:3]), new_tuple(Life, numbers[3:5])
    return new_tuple(Reference, (rref, owner, numbers[5]))


def _write_reference(out: bytearray, value: Reference) -> None:
    out += _REFERENCE.pack(*_reference_numbers(value))


def _read_reference(reader: _Reader) -> Reference:
    return _reference_from(reader.take(_REFERENCE))


def _write_text(out: bytearray, value: str) -> None:
    """Texts are reasons, for people: one too long for the field is cut."""
    data = value.encode("utf-8", "replace")
    if len(data) > _MAX_TEXT_BYTES:
        data = data[:_MAX_TEXT_BYTES].decode("utf-8", "ignore").encode()
    out += _TEXT.pack(len(data)) + data


def _read_text(reader: _Reader) -> str:
    (size,) = reader.take(_TEXT)
    try:
        return str(reader.take_bytes(size), "utf-8")
    except UnicodeDecodeError as error:
        raise FrameError(f"text in control data is not UTF-8: {error}") from None


def _write_number(out: bytearray, value: int) -> None:
    out += _NUMBER.pack(value)


def _read_number(reader: _Reader) -> int:
    number: int = reader.take(_NUMBER)[0]
    return number


def _write_numbers(out: bytearray, values: tuple[int, ...]) -> None:
    out += _COUNT.pack(len(values)) + struct.pack(f"<{len(values)}Q", *values)


def _read_numbers(reader: _Reader) -> tuple[int, ...]:
    (count,) = reader.take(_COUNT)
    return struct.unpack(f"<{count}Q", reader.take_bytes(count * _NUMBER.size))


GLOBAL_ID: Final = _Field(_write_global_id, _read_global_id)
REFERENCE: Final = _Field(_write_reference, _read_reference)
TEXT: Final = _Field(_write_text, _read_text)
NUMBER: Final = _Field(_write_number, _read_number)
NUMBERS: Final = _Field(_write_numbers, _read_numbers)


@dataclass(frozen=True, slots=True)
class _Layout:
    """A message's code and its fields, in the order of the dataclass."""

    code: int
    message: type[ControlMessage]
    fields: tuple[_Field[Any], ...]

    def write(self, out: bytearray, message: ControlMessage) -> None:
        out.append(self.code)
        names: tuple[str, ...] = self.message.__match_args__  # type: ignore[attr-defined]
        for name, field in zip(names, self.fields, strict=True):
            field.write(out, attrgetter(name)(message))

    def read(self, reader: _Reader) -> ControlMessage:
        return self.message(*(field.read(reader) for field in self.fields))


_LAYOUTS: Final = (
    _Layout(1, Register, (REFERENCE, GLOBAL_ID)),
    _Layout(2, Registered, (GLOBAL_ID,)),
    _Layout(3, Rejected, (GLOBAL_ID, TEXT)),
    _Layout(4, Accepted, (GLOBAL_ID,)),
    _Layout(5, Delete, (REFERENCE, GLOBAL_ID)),
    _Layout(6, Abandoned, (REFERENCE, GLOBAL_ID, TEXT)),
    _Layout(7, Ready, (NUMBER,)),
    _Layout(8, Probe, (NUMBER, NUMBER, NUMBERS)),
    _Layout(9, Quiet, (NUMBER, NUMBER, NUMBER, NUMBER, NUMBER)),
    _Layout(10, Leaving, (NUMBER,)),
    _Layout(11, Lost, (NUMBER, NUMBER, TEXT)),
    _Layout(12, Cancel, (NUMBERS,)),
)
_BY_TYPE: Final = {layout.message: layout for layout in _LAYOUTS}
_BY_CODE: Final = {layout.code: layout for layout in _LAYOUTS}


def encode_batch(sequence: int, messages: Sequence[ControlMessage]) -> bytes:
    """Writes the messages queued for one peer as one payload.

    Args:
        sequence: the sender's number for this batch, from 0; see :class:`DuplicateFilter`.
        messages: any number; their order is kept.
    """
    out = bytearray(_BATCH.pack(_VERSION, sequence, len(messages)))
    for message in messages:
        _BY_TYPE[type(message)].write(out, message)
    return bytes(out)


def decode_batch(data: bytes | bytearray | memoryview) -> tuple[int, list[ControlMessage]]:
    """Reads what :func:`encode_batch` wrote: the sequence number and the messages.

    Raises:
        FrameError: ``data`` is anything else.
    """
    reader = _Reader(data)
    version, sequence, count = reader.take(_BATCH)
    if version != _VERSION:
        raise FrameError(f"control batch of version {version}, this worker speaks {_VERSION}")
    messages = [_read_message(reader) for _ in range(count)]
    reader.expect_end()
    return sequence, messages


def _read_message(reader: _Reader) -> ControlMessage:
    code = reader.take_bytes(1)[0]
    layout = _BY_CODE.get(code)
    if layout is None:
        raise FrameError(f"unknown control message code {code}")
    return layout.read(reader)


def encode_passed(table: Iterable[Passed]) -> bytes:
    """Writes the reference table of a call's header; empty for an empty table."""
    data = b""
    for (rref, owner, creation), fork, way in table:
        data += _PASSED.pack(*rref, *owner, creation, *fork, way)
    return data


def decode_passed(data: bytes | bytearray | memoryview) -> list[Passed]:
    """Reads what :func:`encode_passed` wrote; ``data`` is the table and nothing else.

    Raises:
        FrameError: ``data`` is anything else.
    """
    if memoryview(data).nbytes % _PASSED.size:
        raise FrameError(f"a table of references cannot be {memoryview(data).nbytes} bytes long")
    return [_unpack_passed(numbers) for numbers in _PASSED.iter_unpack(data)]


def borrowed_value(entry: bytes | bytearray | memoryview) -> GlobalId | None:
    """The value that an entry of such a table names, if it is a borrowed reference.

    Raises:
        FrameError: ``entry`` is not one entry.
    """
    try:
        numbers = _PASSED.unpack(entry)
    except struct.error:
        raise FrameError(f"{len(entry)} bytes are not one reference") from None
    return new_tuple(GlobalId, numbers[:3]) if numbers[9] == Passage.BORROW else None


_PASSAGES: Final = {int(passage): passage for passage in Passage}


def _unpack_passed(numbers: tuple[int, ...]) -> Passed:
    passage = _PASSAGES.get(numbers[9])
    if passage is None:
        raise FrameError(f"unknown passage {numbers[9]} of a reference")
    fork = new_tuple(GlobalId, numbers[6:9])
    return new_tuple(Passed, (_reference_from(numbers[:6]), fork, passage))


# --- Duplicates -------------------------------------------------------------


class DuplicateFilter:
    """Remembers which numbers of a sequence were seen, in any order.

    Keeps disjoint ranges, so memory grows with the gaps, not with the numbers.
    """

    __slots__ = ("_ends", "_starts")

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []  # exclusive; the i-th range is [starts[i], ends[i])

    def accept(self, number: int) -> bool:
        """Notes ``number``; False if it was noted before."""
        after = bisect.bisect_right(self._starts, number)
        if after > 0 and number < self._ends[after - 1]:
            return False
        extends_left = after > 0 and self._ends[after - 1] == number
        extends_right = after < len(self._starts) and self._starts[after] == number + 1
        if extends_left and extends_right:
            self._ends.pop(after - 1)
            self._starts.pop(after)
        elif extends_left:
            self._ends[after - 1] = number + 1
        elif extends_right:
            self._starts[after] = number
        else:
            self._starts.insert(after, number)
            self._ends.insert(after, number + 1)
        return True

    def __contains__(self, number: int) -> bool:
        after = bisect.bisect_right(self._starts, number)
        return after > 0 and number < self._ends[after - 1]

    @property
    def ranges(self) -> int:
        """The number of disjoint ranges that are remembered; 1 when nothing is missing."""
        return len(self._starts)
