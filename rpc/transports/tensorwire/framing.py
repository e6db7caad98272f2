"""Turns frames into bytes and back: finds where each begins and ends on a stream. Sans-IO.

A frame is a fixed part of 40 bytes, then three sections whose lengths the fixed
part tells: the message header (the agent's), the table that says where payload
and tensors are (``frame_table``'s), and the bytes that travel inline. The fixed part
ends in its own CRC-32 and carries the position of the frame in its stream, so a
stream that lost its place is noticed at the next frame, before any length is
believed.

Bulk channels use the same fixed part but are read by :class:`BulkDecoder`,
which lets the owner say where a section of bytes is to be received.

Of a frame for which there is no memory the table is kept, so that what it says can be
given back, and the beginning of the header, so that it is known whose call failed; the
rest is thrown away.

When another connection takes the place of a broken one, a decoder begins again at
the first frame that it has not received whole, and the positions go on.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple
from zlib import crc32

from rpc.errors import FrameError
from rpc.ids import new_tuple
from rpc.transports.base import Frame, FrameKind, Unreceived
from rpc.transports.host.frame_table import INLINE_ALIGNMENT

MAGIC = 0x5754
VERSION = 1

_FIXED = struct.Struct("<HBBIIQQQ")
_CHECKED = struct.Struct("<HBBIIQQQI")
_CHECKSUM = struct.Struct("<I")
_CHUNK = struct.Struct("<QQ")

FIXED_SIZE = _CHECKED.size
_CHECKED_BYTES = _FIXED.size
_COUNTER_MASK = (1 << 64) - 1
_LARGE = 1 << 14
_WASTE_BYTES = 1 << 16
_KEPT_BYTES = 1 << 18
"""Of a header without memory. The small tensors, which make one long, stand at its end."""
_unpack_checked = _CHECKED.unpack_from

Buffer = bytes | bytearray | memoryview


class WireKind(enum.IntEnum):
    """Kinds of frames; the first three are those of :class:`rpc.transports.base.FrameKind`."""

    REQUEST = 1
    REPLY = 2
    NOTICE = 3
    ACKNOWLEDGE = 4
    """Any channel: ``correlation`` frames have arrived whole. On a main channel the table is not
    empty, so that only who looks at frames with a table needs to know this kind."""
    CHUNK = 16
    """Bulk channels only: part of a payload or tensor, ``correlation`` its transfer."""
    SEGMENT = 17
    """Bulk channels only: a shared segment's descriptor rides along; header: its size."""
    SEGMENT_READY = 18
    """Bulk channels only: the segment ``correlation`` may be used from now on."""
    SEGMENT_REFUSED = 19
    """Bulk channels only: the segment ``correlation`` cannot be mapped here; header: the system's
    number of the error, or 0."""
    DEVICE = 20
    """Bulk channels only: the descriptor of an offer of memory of CUDA device ``correlation`` rides
    along; header: its size."""
    DEVICE_READY = 21
    """Bulk channels only: memory of the other end's device ``correlation`` can be opened here."""
    DEVICE_REFUSED = 22
    """Bulk channels only: memory of the other end's device ``correlation`` cannot be opened."""


_KINDS = {int(kind): kind for kind in FrameKind}
_ACKNOWLEDGE = int(WireKind.ACKNOWLEDGE)
_MAIN_KINDS = frozenset(_KINDS) | {_ACKNOWLEDGE}
_BULK_KINDS = frozenset(map(int, WireKind)) - frozenset(_KINDS)


Arrived = tuple[Frame, bytes]
"""A frame as it came off a main channel, and its table. If there is a table, the frame's payload
is the whole inline section, writable, and it has no tensors yet. Or the payload is
:class:`Unreceived` and says what there was no memory for; then the header may end early."""


def pack_fixed(
    kind: int, correlation: int, sequence: int, header: int, table: int, inline: int
) -> bytes:
    """The fixed part of a frame with sections of the given lengths."""
    head = _FIXED.pack(MAGIC, VERSION, kind, header, table, inline, correlation, sequence)
    return head + _CHECKSUM.pack(crc32(head))


def pack_small(
    kind: int, correlation: int, sequence: int, header: bytes, table: bytes, inline: Buffer
) -> bytes:
    """A whole frame, of few bytes."""
    lengths = len(header), len(table), len(inline)
    head = _FIXED.pack(MAGIC, VERSION, kind, *lengths, correlation, sequence)
    return head + _CHECKSUM.pack(crc32(head)) + header + table + inline


class _Fixed(NamedTuple):
    magic: int
    version: int
    kind: int
    header: int
    table: int
    inline: int
    correlation: int
    sequence: int
    checksum: int


def _check_fixed(data: Buffer, start: int, kinds: frozenset[int], expected: int) -> _Fixed:
    """Parses a fixed part, or says what is wrong with it."""
    fixed = _Fixed._make(_CHECKED.unpack_from(data, start))
    if fixed.magic != MAGIC:
        raise FrameError(f"the stream lost its place: a frame begins with {fixed.magic:#06x}")
    if crc32(data[start : start + _CHECKED_BYTES]) != fixed.checksum:
        raise FrameError("the stream lost its place: a frame's checksum is wrong")
    if fixed.version != VERSION:
        raise FrameError(f"frame of version {fixed.version}; this worker speaks {VERSION}")
    if fixed.kind not in kinds:
        raise FrameError(f"frame of unknown kind {fixed.kind}")
    if fixed.sequence != expected:
        raise FrameError(f"frame {fixed.sequence} where frame {expected} was due")
    return fixed


def _fresh(length: int) -> memoryview:
    return memoryview(bytearray(length))


def _ignore(_: int) -> None:
    """For who remembers nothing."""


@dataclass(frozen=True, slots=True)
class _Skimmed:
    """The parts that are kept of a frame for which there is no memory, and why there is none."""

    problem: str
    header: bytearray
    table: bytearray
    sections: Iterator[memoryview]
    """The memory its bytes belong in, one place after the other; none is empty."""

    def parts(self) -> tuple[bytes, bytes, Buffer]:
        """Header, table and payload, once all sections are filled."""
        return bytes(self.header), bytes(self.table), Unreceived(self.problem.encode())


def _skim(fixed: _Fixed, problem: str) -> _Skimmed:
    header = bytearray(min(fixed.header, _KEPT_BYTES))
    table = bytearray(fixed.table)

    def sections() -> Iterator[memoryview]:
        yield from _in_parts(memoryview(header), len(header))
        waste = memoryview(bytearray(_WASTE_BYTES))
        yield from _in_parts(waste, fixed.header - len(header))
        yield from _in_parts(memoryview(table), len(table))
        yield from _in_parts(waste, fixed.inline)

    return _Skimmed(problem, header, table, sections())


def _split(large: memoryview, fixed: _Fixed) -> tuple[bytes, bytes, Buffer]:
    """Header, table and payload of a frame that came whole."""
    at_inline = fixed.header + fixed.table
    table = bytes(large[fixed.header : at_inline])
    try:
        return bytes(large[: fixed.header]), table, large[at_inline:]
    except MemoryError:
        problem = f"{fixed.header} bytes cannot be allocated"
        return bytes(large[: min(fixed.header, _KEPT_BYTES)]), table, Unreceived(problem.encode())


def _in_parts(buffer: memoryview, length: int) -> Iterator[memoryview]:
    """A buffer, as often as ``length`` bytes fill it."""
    while length:
        part = buffer[:length]
        length -= len(part)
        yield part


class FrameDecoder:
    """Turns the bytes of a main channel into frames.

    While :meth:`room` returns a buffer, the next bytes of the stream are received
    there and reported with :meth:`filled`; otherwise they are passed to :meth:`feed`.
    After a :class:`FrameError` the stream cannot be used any more.

    Args:
        max_frame_bytes: a frame that says it is longer is refused.
        allocate: where memory for long frames comes from, aligned as ``INLINE_ALIGNMENT`` says.
        acknowledged: told how many of the frames sent have arrived, now and then.

    Attributes:
        large: the memory of a long frame that has begun; see :meth:`room`.
    """

    def __init__(
        self,
        max_frame_bytes: int,
        allocate: Callable[[int], memoryview] = _fresh,
        acknowledged: Callable[[int], None] = _ignore,
    ) -> None:
        self._max_frame_bytes = max_frame_bytes
        self._allocate = allocate
        self._acknowledged = acknowledged
        self._rest = b""
        self._sequence = 0
        self.large: memoryview | None = None
        self._skimmed: _Skimmed | None = None
        self._large_fixed = _Fixed(*[0] * 9)
        self._large_end = 0

    def feed(self, data: bytes) -> list[Arrived]:
        """Takes the next bytes of the stream; returns the frames they completed.

        Raises:
            FrameError: the bytes are not frames.
        """
        if self._rest:
            data = self._rest + data
        start, available = 0, len(data)
        frames: list[Arrived] = []
        while available - start >= FIXED_SIZE:
            magic, version, kind, header, table, inline, correlation, sequence, checksum = (
                _unpack_checked(data, start)
            )
            if (
                checksum != crc32(data[start : start + _CHECKED_BYTES])
                or sequence != self._sequence
                or kind not in _MAIN_KINDS
                or magic != MAGIC
                or version != VERSION
            ):
                _check_fixed(data, start, _MAIN_KINDS, self._sequence)
            at_header = start + FIXED_SIZE
            at_inline = at_header + header + table
            end = at_inline + inline
            if end > available:
                if self._begin_large(data, start, end - start):
                    return frames
                break
            self._sequence = (sequence + 1) & _COUNTER_MASK
            start = end
            at_table = at_header + header
            inline_part: Buffer = data[at_inline:end]
            if table:
                if kind == _ACKNOWLEDGE:
                    self._acknowledged(correlation)
                    continue
                inline_part = bytearray(inline_part)
            try:
                parts = _KINDS[kind], correlation, data[at_header:at_table], inline_part, ()
            except KeyError:
                raise FrameError("an acknowledgement without its table") from None
            frames.append((new_tuple(Frame, parts), data[at_table:at_inline]))
        self._rest = data[start:]
        return frames

    @property
    def received(self) -> int:
        """The number of frames that have arrived whole."""
        return self._sequence

    def restart(self) -> None:
        """Another connection takes the place of this one: forgets what has not arrived whole."""
        self._rest = b""
        self.large = None
        self._skimmed = None

    def _begin_large(self, data: bytes, start: int, length: int) -> bool:
        """Gives a long incomplete frame memory of its own; False if it is a short one."""
        if length > self._max_frame_bytes:
            raise FrameError(
                f"frame of {length} bytes; the limit is {self._max_frame_bytes} (max_frame_bytes)"
            )
        if length < _LARGE:
            return False
        present = data[start + FIXED_SIZE :]
        fixed = self._large_fixed = _Fixed._make(_CHECKED.unpack_from(data, start))
        before_inline = -(fixed.header + fixed.table) % INLINE_ALIGNMENT
        self._rest = b""
        try:
            self.large = self._allocate(before_inline + length - FIXED_SIZE)[before_inline:]
        except MemoryError as error:
            self._begin_to_skim(memoryview(present), str(error))
            return True
        self.large[: len(present)] = present
        self._large_end = len(present)
        return True

    def _begin_to_skim(self, present: memoryview, problem: str) -> None:
        skimmed = self._skimmed = _skim(self._large_fixed, problem)
        place = next(skimmed.sections)
        while len(present) >= len(place):
            place[:] = present[: len(place)]
            present = present[len(place) :]
            place = next(skimmed.sections)
        place[: len(present)] = present
        self.large, self._large_end = place, len(present)

    def room(self) -> memoryview | None:
        """Returns the buffer for the rest of a long frame, if one has begun."""
        if self.large is None:
            return None
        return self.large[self._large_end :]

    def filled(self, count: int) -> list[Arrived]:
        """Takes note of ``count`` bytes in :meth:`room`; returns the frame if it is complete."""
        large, fixed = self.large, self._large_fixed
        self._large_end += count
        if large is None or self._large_end < len(large):
            return []
        skimmed = self._skimmed
        if skimmed is not None:
            self.large, self._large_end = next(skimmed.sections, None), 0
            if self.large is not None:
                return []
        self.large = self._skimmed = None
        self._sequence = (self._sequence + 1) & _COUNTER_MASK
        if fixed.kind == _ACKNOWLEDGE:
            raise FrameError("an acknowledgement that is a long frame")
        header, table, payload = _split(large, fixed) if skimmed is None else skimmed.parts()
        return [(Frame(_KINDS[fixed.kind], fixed.correlation, header, payload), table)]


@dataclass(frozen=True, slots=True)
class Chunk:
    """A complete part of transfer ``transfer`` has been received into its place."""

    transfer: int
    length: int


@dataclass(frozen=True, slots=True)
class SegmentOffered:
    """The peer wants to hand over things in shared segment ``segment``."""

    segment: int
    size: int


@dataclass(frozen=True, slots=True)
class SegmentAnswered:
    """The peer can, or cannot, use ``segment``.

    Then ``error`` is the number of what it met, by which one may tell whether that passes.
    """

    segment: int
    usable: bool
    error: int = 0


@dataclass(frozen=True, slots=True)
class DeviceOffered:
    """The peer wants to lend memory of its CUDA device; ``size`` is that of the offer's file."""

    device: int
    size: int


@dataclass(frozen=True, slots=True)
class DeviceAnswered:
    """The peer can, or cannot, open memory of a device of ours; ``error`` as with segments."""

    device: int
    usable: bool
    error: int = 0


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """The other end has received ``count`` of the frames sent."""

    count: int


BulkEvent = Chunk | SegmentOffered | SegmentAnswered | DeviceOffered | DeviceAnswered | Acknowledged
ChunkPlace = Callable[[int, int, int, int], memoryview | None]
"""``(transfer, offset, length, total) -> length writable bytes``; raises FrameError.

None if the bytes are to be thrown away."""


def pack_pair(first: int, second: int) -> bytes:
    """The header of a bulk message: ``(offset, total)`` of a chunk, ``(size, 0)`` of an offer."""
    return _CHUNK.pack(first, second)


class BulkDecoder:
    """Turns the bytes of a bulk channel into events; section bytes go where ``place`` says.

    Args:
        place: asked once per chunk, as soon as its head has arrived.
    """

    _HEAD = FIXED_SIZE + _CHUNK.size

    def __init__(self, place: ChunkPlace) -> None:
        self._place = place
        self._head = bytearray(self._HEAD)
        self._filled = 0
        self._section: memoryview | None = None
        self._is_waste = False
        self._chunk = Chunk(0, 0)
        self._sequence = 0
        self._received = 0

    @property
    def received(self) -> int:
        """The number of messages that have arrived whole; may be asked by any thread."""
        return self._received

    def restart(self) -> None:
        """Another connection takes the place of this one: forgets what has not arrived whole."""
        self._sequence = self._received
        self._section = None
        self._filled = 0

    def buffer(self) -> memoryview:
        """Returns the buffer for the next bytes of the stream; never empty."""
        if self._section is not None:
            if self._is_waste:
                return self._section[: self._chunk.length - self._filled]
            return self._section[self._filled :]
        return memoryview(self._head)[self._filled :]

    def advance(self, count: int) -> BulkEvent | None:
        """Takes note of ``count`` bytes in :meth:`buffer`.

        Raises:
            FrameError: the bytes are not bulk messages.
        """
        self._filled += count
        if self._section is not None:
            if self._filled < self._chunk.length:
                return None
            self._section = None
            self._filled = 0
            self._received = self._sequence
            return self._chunk
        if self._filled < self._HEAD:
            return None
        self._filled = 0
        return self._parse_head()

    def _parse_head(self) -> BulkEvent | None:
        fixed = _check_fixed(self._head, 0, _BULK_KINDS, self._sequence)
        if fixed.header != _CHUNK.size or fixed.table:
            raise FrameError("a bulk message with sections it cannot have")
        self._sequence = (self._sequence + 1) & _COUNTER_MASK
        first, second = _CHUNK.unpack_from(self._head, FIXED_SIZE)
        if fixed.kind == WireKind.CHUNK:
            self._begin_chunk(fixed, first, second)
            return None
        if fixed.inline:
            raise FrameError("a bulk message that carries bytes it cannot have")
        self._received = self._sequence
        if fixed.kind == _ACKNOWLEDGE:
            return Acknowledged(fixed.correlation)
        if fixed.kind == WireKind.SEGMENT:
            return SegmentOffered(fixed.correlation, first)
        if fixed.kind == WireKind.DEVICE:
            return DeviceOffered(fixed.correlation, first)
        if fixed.kind in (WireKind.DEVICE_READY, WireKind.DEVICE_REFUSED):
            return DeviceAnswered(fixed.correlation, fixed.kind == WireKind.DEVICE_READY, first)
        return SegmentAnswered(fixed.correlation, fixed.kind == WireKind.SEGMENT_READY, first)

    def _begin_chunk(self, fixed: _Fixed, offset: int, total: int) -> None:
        if not fixed.inline or offset + fixed.inline > total:
            raise FrameError(
                f"a chunk of {fixed.inline} bytes at {offset} in a transfer of {total} bytes"
            )
        place = self._place(fixed.correlation, offset, fixed.inline, total)
        self._is_waste = place is None
        if place is None:
            place = memoryview(bytearray(min(fixed.inline, _WASTE_BYTES)))
        self._section = place
        self._chunk = Chunk(fixed.correlation, fixed.inline)
