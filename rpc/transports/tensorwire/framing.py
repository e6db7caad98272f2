"""Frames as bytes: where one begins and ends on a stream. Sans-IO.

A frame is a fixed part of 40 bytes, then three sections whose lengths the fixed
part tells: the message header (the agent's), the table that says where payload
and tensors are (``body``'s), and the bytes that travel inline. The fixed part
ends in its own CRC-32 and carries the position of the frame in its stream, so a
stream that lost its place is noticed at the next frame, before any length is
believed.

Bulk channels use the same fixed part but are read by :class:`BulkDecoder`,
which lets the owner say where a section of bytes is to be received.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple
from zlib import crc32

from rpc.errors import FrameError

MAGIC = 0x5754
VERSION = 1

_FIXED = struct.Struct("<HBBIIQQQ")
_CHECKED = struct.Struct("<HBBIIQQQI")
_CHECKSUM = struct.Struct("<I")
_CHUNK = struct.Struct("<QQ")

FIXED_SIZE = _CHECKED.size
_CHECKED_BYTES = _FIXED.size
_COUNTER_MASK = (1 << 64) - 1

Buffer = bytes | bytearray | memoryview


class WireKind(enum.IntEnum):
    """What a frame is; the first three are :class:`rpc.transports.base.FrameKind`."""

    REQUEST = 1
    REPLY = 2
    NOTICE = 3
    CHUNK = 16
    """Bulk channels only: part of a payload or tensor, ``correlation`` its transfer."""
    SEGMENT = 17
    """Bulk channels only: a shared segment's descriptor rides along; header: its size."""
    SEGMENT_READY = 18
    """Bulk channels only: the segment ``correlation`` may be used from now on."""
    SEGMENT_REFUSED = 19
    """Bulk channels only: the segment ``correlation`` cannot be mapped here."""


_MAIN_KINDS = frozenset({WireKind.REQUEST, WireKind.REPLY, WireKind.NOTICE})
_BULK_KINDS = frozenset(WireKind) - _MAIN_KINDS


class WireFrame(NamedTuple):
    """A frame as it came off a main channel."""

    kind: int
    correlation: int
    header: bytes
    table: bytes
    inline: Buffer


def pack_fixed(
    kind: int, correlation: int, sequence: int, header: int, table: int, inline: int
) -> bytes:
    """The fixed part of a frame with sections of the given lengths."""
    head = _FIXED.pack(MAGIC, VERSION, kind, header, table, inline, correlation, sequence)
    return head + _CHECKSUM.pack(crc32(head))


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


def _check_fixed(data: Buffer, start: int, kinds: frozenset[WireKind], expected: int) -> _Fixed:
    fixed = _Fixed._make(_CHECKED.unpack_from(data, start))
    if fixed.magic != MAGIC:
        raise FrameError(f"the stream lost its place: a frame begins with {fixed.magic:#06x}")
    if crc32(memoryview(data)[start : start + _CHECKED_BYTES]) != fixed.checksum:
        raise FrameError("the stream lost its place: a frame's checksum is wrong")
    if fixed.version != VERSION:
        raise FrameError(f"frame of version {fixed.version}; this worker speaks {VERSION}")
    if fixed.kind not in kinds:
        raise FrameError(f"frame of unknown kind {fixed.kind}")
    if fixed.sequence != expected:
        raise FrameError(f"frame {fixed.sequence} where frame {expected} was due")
    return fixed


class FrameDecoder:
    """Turns the bytes of a main channel into frames.

    The owner receives into :meth:`buffer` and reports with :meth:`received`.
    After a :class:`FrameError` the stream cannot be used any more.

    Args:
        max_frame_bytes: a frame that says it is longer is refused.
        capacity: size of the receive buffer; longer frames are received into
            memory of their own.
    """

    def __init__(self, max_frame_bytes: int, capacity: int = 65536) -> None:
        self._max_frame_bytes = max_frame_bytes
        self._data = bytearray(capacity)
        self._view = memoryview(self._data)
        self._start = 0
        self._end = 0
        self._large: bytearray | None = None
        self._large_fixed: _Fixed | None = None
        self._large_end = 0
        self._sequence = 0

    def buffer(self) -> memoryview:
        """Where the next bytes of the stream belong; never empty."""
        if self._large is not None:
            return memoryview(self._large)[self._large_end :]
        return self._view[self._end :]

    def received(self, count: int) -> list[WireFrame]:
        """Takes note of ``count`` bytes in :meth:`buffer`; returns the frames they completed.

        Raises:
            FrameError: the bytes are not frames.
        """
        if self._large is not None:
            self._large_end += count
            return self._finish_large()
        self._end += count
        frames: list[WireFrame] = []
        while self._end - self._start >= FIXED_SIZE and (frame := self._next()) is not None:
            frames.append(frame)
        self._make_room()
        return frames

    def _next(self) -> WireFrame | None:
        start = self._start
        fixed = _check_fixed(self._data, start, _MAIN_KINDS, self._sequence)
        at_table = start + FIXED_SIZE + fixed.header
        at_inline = at_table + fixed.table
        end = at_inline + fixed.inline
        if end > self._end:
            self._check_length(fixed, end - start)
            return None
        self._start = end
        self._sequence = (self._sequence + 1) & _COUNTER_MASK
        view = self._view
        inline: Buffer = b""
        if fixed.inline:
            inline = (bytearray if fixed.table else bytes)(view[at_inline:end])
        return WireFrame(
            fixed.kind,
            fixed.correlation,
            bytes(view[start + FIXED_SIZE : at_table]),
            bytes(view[at_table:at_inline]) if fixed.table else b"",
            inline,
        )

    def _check_length(self, fixed: _Fixed, length: int) -> None:
        if length > self._max_frame_bytes:
            raise FrameError(
                f"frame of {length} bytes; the limit is {self._max_frame_bytes} (max_frame_bytes)"
            )
        if length > len(self._data):
            self._large = bytearray(length - FIXED_SIZE)
            self._large_fixed = fixed
            present = self._view[self._start + FIXED_SIZE : self._end]
            self._large_end = len(present)
            self._large[: len(present)] = present
            self._start = self._end

    def _finish_large(self) -> list[WireFrame]:
        large, fixed = self._large, self._large_fixed
        if large is None or fixed is None or self._large_end < len(large):
            return []
        self._large = self._large_fixed = None
        self._sequence = (self._sequence + 1) & _COUNTER_MASK
        view = memoryview(large)
        at_inline = fixed.header + fixed.table
        return [
            WireFrame(
                fixed.kind,
                fixed.correlation,
                bytes(view[: fixed.header]),
                bytes(view[fixed.header : at_inline]),
                view[at_inline:],
            )
        ]

    def _make_room(self) -> None:
        if self._start == self._end:
            self._start = self._end = 0
        elif self._start and self._end + FIXED_SIZE > len(self._data) // 2:
            rest = self._end - self._start
            self._data[:rest] = self._data[self._start : self._end]
            self._start, self._end = 0, rest


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
    """The peer can, or cannot, use ``segment``."""

    segment: int
    usable: bool


BulkEvent = Chunk | SegmentOffered | SegmentAnswered
Place = Callable[[int, int, int, int], memoryview]
"""``(transfer, offset, length, total) -> length writable bytes``; raises FrameError."""


def pack_pair(first: int, second: int) -> bytes:
    """The header of a bulk message: ``(offset, total)`` of a chunk, ``(size, 0)`` of a segment."""
    return _CHUNK.pack(first, second)


class BulkDecoder:
    """Turns the bytes of a bulk channel into events; section bytes go where ``place`` says.

    Args:
        place: asked once per chunk, as soon as its head has arrived.
    """

    _HEAD = FIXED_SIZE + _CHUNK.size

    def __init__(self, place: Place) -> None:
        self._place = place
        self._head = bytearray(self._HEAD)
        self._filled = 0
        self._section: memoryview | None = None
        self._chunk = Chunk(0, 0)
        self._sequence = 0

    def buffer(self) -> memoryview:
        """Where the next bytes of the stream belong; never empty."""
        if self._section is not None:
            return self._section[self._filled :]
        return memoryview(self._head)[self._filled :]

    def received(self, count: int) -> BulkEvent | None:
        """Takes note of ``count`` bytes in :meth:`buffer`.

        Raises:
            FrameError: the bytes are not bulk messages.
        """
        self._filled += count
        if self._section is not None:
            if self._filled < len(self._section):
                return None
            self._section = None
            self._filled = 0
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
            raise FrameError("a message about a segment that carries bytes")
        if fixed.kind == WireKind.SEGMENT:
            return SegmentOffered(fixed.correlation, first)
        return SegmentAnswered(fixed.correlation, fixed.kind == WireKind.SEGMENT_READY)

    def _begin_chunk(self, fixed: _Fixed, offset: int, total: int) -> None:
        if not fixed.inline or offset + fixed.inline > total:
            raise FrameError(
                f"a chunk of {fixed.inline} bytes at {offset} in a transfer of {total} bytes"
            )
        self._section = self._place(fixed.correlation, offset, fixed.inline, total)
        self._chunk = Chunk(fixed.correlation, fixed.inline)
