"""The layout of frames on a stream, and the decoder of bulk channels. Sans-IO.

A frame is a fixed part of 40 bytes, then three sections whose lengths the fixed
part tells: the message header (the agent's), the table that says where payload
and tensors are (``frame_table``'s), and the bytes that travel inline. The fixed part
ends in its own CRC-32 and carries the position of the frame in its stream, so a
stream that lost its place is noticed at the next frame, before any length is
believed.

Main channels are read by ``main_reader``, which has their decoder. Bulk channels use
the same fixed part but are read by :class:`BulkDecoder`, which lets the owner say where
a section of bytes is to be received.

When another connection takes the place of a broken one, a decoder begins again at
the first frame that it has not received whole, and the positions go on.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple
from zlib import crc32

from rpc.errors import FrameError
from rpc.transports.base import FrameKind

MAGIC = 0x5754
VERSION = 1

FIXED = struct.Struct("<HBBIIQQQ")
CHECKED = struct.Struct("<HBBIIQQQI")
CHECKSUM = struct.Struct("<I")
_CHUNK = struct.Struct("<QQ")

FIXED_SIZE = CHECKED.size
CHECKED_BYTES = FIXED.size
COUNTER_MASK = (1 << 64) - 1
WASTE_BYTES = 1 << 16

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


KINDS = {int(kind): kind for kind in FrameKind}
ACKNOWLEDGE = int(WireKind.ACKNOWLEDGE)
MAIN_KINDS = frozenset(KINDS) | {ACKNOWLEDGE}
_BULK_KINDS = frozenset(map(int, WireKind)) - frozenset(KINDS)


def pack_fixed(
    kind: int, correlation: int, sequence: int, header: int, table: int, inline: int
) -> bytes:
    """The fixed part of a frame with sections of the given lengths."""
    head = FIXED.pack(MAGIC, VERSION, kind, header, table, inline, correlation, sequence)
    return head + CHECKSUM.pack(crc32(head))


class Fixed(NamedTuple):
    """The fixed part of a frame."""

    magic: int
    version: int
    kind: int
    header: int
    table: int
    inline: int
    correlation: int
    sequence: int
    checksum: int


def check_fixed(data: Buffer, start: int, kinds: frozenset[int], expected: int) -> Fixed:
    """Parses a fixed part.

    Args:
        data: the bytes that hold it.
        start: where it begins in ``data``.
        kinds: the kinds that may come on the channel.
        expected: its position in the stream.

    Raises:
        FrameError: something is wrong with it; the text says what.
    """
    fixed = Fixed._make(CHECKED.unpack_from(data, start))
    if fixed.magic != MAGIC:
        raise FrameError(f"the stream lost its place: a frame begins with {fixed.magic:#06x}")
    if crc32(data[start : start + CHECKED_BYTES]) != fixed.checksum:
        raise FrameError("the stream lost its place: a frame's checksum is wrong")
    if fixed.version != VERSION:
        raise FrameError(f"frame of version {fixed.version}; this worker speaks {VERSION}")
    if fixed.kind not in kinds:
        raise FrameError(f"frame of unknown kind {fixed.kind}")
    if fixed.sequence != expected:
        raise FrameError(f"frame {fixed.sequence} where frame {expected} was due")
    return fixed


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
        """Forgets what has not arrived whole, as another connection takes this one's place."""
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
        fixed = check_fixed(self._head, 0, _BULK_KINDS, self._sequence)
        if fixed.header != _CHUNK.size or fixed.table:
            raise FrameError("a bulk message with sections it cannot have")
        self._sequence = (self._sequence + 1) & COUNTER_MASK
        first, second = _CHUNK.unpack_from(self._head, FIXED_SIZE)
        if fixed.kind == WireKind.CHUNK:
            self._begin_chunk(fixed, first, second)
            return None
        if fixed.inline:
            raise FrameError("a bulk message that carries bytes it cannot have")
        self._received = self._sequence
        if fixed.kind == ACKNOWLEDGE:
            return Acknowledged(fixed.correlation)
        if fixed.kind == WireKind.SEGMENT:
            return SegmentOffered(fixed.correlation, first)
        if fixed.kind == WireKind.DEVICE:
            return DeviceOffered(fixed.correlation, first)
        if fixed.kind in (WireKind.DEVICE_READY, WireKind.DEVICE_REFUSED):
            return DeviceAnswered(fixed.correlation, fixed.kind == WireKind.DEVICE_READY, first)
        return SegmentAnswered(fixed.correlation, fixed.kind == WireKind.SEGMENT_READY, first)

    def _begin_chunk(self, fixed: Fixed, offset: int, total: int) -> None:
        if not fixed.inline or offset + fixed.inline > total:
            raise FrameError(
                f"a chunk of {fixed.inline} bytes at {offset} in a transfer of {total} bytes"
            )
        place = self._place(fixed.correlation, offset, fixed.inline, total)
        self._is_waste = place is None
        if place is None:
            place = memoryview(bytearray(min(fixed.inline, WASTE_BYTES)))
        self._section = place
        self._chunk = Chunk(fixed.correlation, fixed.inline)
