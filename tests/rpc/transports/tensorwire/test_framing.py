"""The bytes of frames: what is written is read, and what is malformed is refused."""

from __future__ import annotations

import struct
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rpc.errors import FrameError
from rpc.transports.tensorwire.framing import (
    FIXED_SIZE,
    BulkDecoder,
    Chunk,
    FrameDecoder,
    SegmentAnswered,
    SegmentOffered,
    WireFrame,
    WireKind,
    pack_fixed,
    pack_pair,
)

LIMIT = 1 << 16
CAPACITY = 512

frames = st.builds(
    WireFrame,
    kind=st.sampled_from([1, 2, 3]),
    correlation=st.integers(0, 2**64 - 1),
    header=st.binary(max_size=200),
    table=st.binary(max_size=100),
    inline=st.binary(max_size=2000),
)


def encode(frame: WireFrame, sequence: int) -> bytes:
    fixed = pack_fixed(
        frame.kind,
        frame.correlation,
        sequence,
        len(frame.header),
        len(frame.table),
        len(frame.inline),
    )
    return fixed + frame.header + frame.table + frame.inline


def feed(decoder: FrameDecoder, data: bytes, step: int) -> list[WireFrame]:
    """Gives the decoder ``data`` in pieces of at most ``step`` bytes."""
    found: list[WireFrame] = []
    view = memoryview(data)
    while len(view):
        room = decoder.buffer()
        count = min(step, len(room), len(view))
        room[:count] = view[:count]
        found += decoder.received(count)
        view = view[count:]
    return found


def plain(found: list[WireFrame]) -> list[WireFrame]:
    return [frame._replace(inline=bytes(frame.inline)) for frame in found]


def test_the_fixed_part_is_forty_bytes_in_a_documented_layout() -> None:
    fixed = pack_fixed(2, 7, 3, 10, 20, 30)
    head = struct.pack("<HBBIIQQQ", 0x5754, 1, 2, 10, 20, 30, 7, 3)
    assert fixed == head + struct.pack("<I", zlib.crc32(head))
    assert len(fixed) == FIXED_SIZE == 40


@given(st.lists(frames, max_size=8), st.integers(1, 700))
def test_frames_arrive_as_they_were_sent_however_the_stream_is_cut(
    sent: list[WireFrame], step: int
) -> None:
    data = b"".join(encode(frame, number) for number, frame in enumerate(sent))
    assert plain(feed(FrameDecoder(LIMIT, CAPACITY), data, step)) == sent


@given(st.binary(min_size=1, max_size=300), st.integers(1, 100))
def test_random_bytes_are_refused_or_waited_on_but_never_a_frame(data: bytes, step: int) -> None:
    decoder = FrameDecoder(LIMIT, CAPACITY)
    try:
        assert feed(decoder, data, step) == []
    except FrameError:
        return
    assert len(data) < FIXED_SIZE


@given(frames, st.data())
def test_a_flipped_bit_in_the_fixed_part_is_noticed(frame: WireFrame, data: st.DataObject) -> None:
    wire = bytearray(encode(frame, 0))
    bit = data.draw(st.integers(0, 8 * FIXED_SIZE - 1))
    wire[bit // 8] ^= 1 << bit % 8
    with pytest.raises(FrameError):
        feed(FrameDecoder(LIMIT, CAPACITY), bytes(wire), 64)


@given(frames, st.data())
def test_a_truncated_frame_is_not_delivered(frame: WireFrame, data: st.DataObject) -> None:
    wire = encode(frame, 0)
    cut = data.draw(st.integers(0, len(wire) - 1))
    assert feed(FrameDecoder(LIMIT, CAPACITY), wire[:cut], 64) == []


@given(st.lists(frames, min_size=2, max_size=4), st.data())
def test_a_lost_or_repeated_frame_is_noticed(sent: list[WireFrame], data: st.DataObject) -> None:
    order = data.draw(st.sampled_from([[1], [0, 0], [1, 0]]))
    wire = b"".join(encode(sent[number], number) for number in order)
    with pytest.raises(FrameError, match="was due"):
        feed(FrameDecoder(LIMIT, CAPACITY), wire, 64)


@given(st.integers(LIMIT - FIXED_SIZE + 1, 2**64 - 1))
def test_an_oversize_frame_is_refused_before_anything_is_allocated(inline: int) -> None:
    decoder = FrameDecoder(LIMIT, CAPACITY)
    with pytest.raises(FrameError, match="max_frame_bytes"):
        feed(decoder, pack_fixed(1, 0, 0, 0, 0, inline), 64)
    assert len(decoder.buffer()) <= CAPACITY


@pytest.mark.parametrize("kind", [0, 4, WireKind.CHUNK, WireKind.SEGMENT, 255])
def test_a_frame_of_a_kind_that_has_no_place_on_a_main_channel_is_refused(kind: int) -> None:
    with pytest.raises(FrameError, match="unknown kind"):
        feed(FrameDecoder(LIMIT), pack_fixed(kind, 0, 0, 0, 0, 0), 64)


def test_a_frame_of_another_version_is_refused_by_its_number() -> None:
    head = struct.pack("<HBBIIQQQ", 0x5754, 9, 1, 0, 0, 0, 0, 0)
    with pytest.raises(FrameError, match="version 9"):
        feed(FrameDecoder(LIMIT), head + struct.pack("<I", zlib.crc32(head)), 64)


def test_inline_bytes_of_frames_with_a_table_are_writable() -> None:
    for size in (10, 4 * CAPACITY):
        frame = WireFrame(1, 0, b"", b"t", b"x" * size)
        (found,) = feed(FrameDecoder(LIMIT, CAPACITY), encode(frame, 0), CAPACITY)
        assert not memoryview(found.inline).readonly


class _Bulk:
    """A bulk decoder whose sections land in one bytearray per transfer."""

    def __init__(self) -> None:
        self.transfers: dict[int, bytearray] = {}
        self.decoder = BulkDecoder(self.place)

    def place(self, transfer: int, offset: int, length: int, total: int) -> memoryview:
        if total > LIMIT:
            raise FrameError("too large")
        memory = self.transfers.setdefault(transfer, bytearray(total))
        return memoryview(memory)[offset : offset + length]

    def feed(self, data: bytes, step: int) -> list[object]:
        events: list[object] = []
        view = memoryview(data)
        while len(view):
            room = self.decoder.buffer()
            assert len(room)
            count = min(step, len(room), len(view))
            room[:count] = view[:count]
            event = self.decoder.received(count)
            if event is not None:
                events.append(event)
            view = view[count:]
        return events


def chunk(transfer: int, sequence: int, offset: int, data: bytes, total: int) -> bytes:
    header = pack_pair(offset, total)
    fixed = pack_fixed(WireKind.CHUNK, transfer, sequence, len(header), 0, len(data))
    return fixed + header + data


def about_segment(kind: WireKind, segment: int, sequence: int, size: int) -> bytes:
    header = pack_pair(size, 0)
    return pack_fixed(kind, segment, sequence, len(header), 0, 0) + header


@given(st.binary(min_size=1, max_size=3000), st.integers(1, 500), st.integers(1, 700))
def test_chunks_are_received_into_their_places(payload: bytes, size: int, step: int) -> None:
    starts = range(0, len(payload), size)
    wire = b"".join(
        chunk(5, number, start, payload[start : start + size], len(payload))
        for number, start in enumerate(starts)
    )
    bulk = _Bulk()
    events = bulk.feed(wire, step)
    assert events == [Chunk(5, len(payload[start : start + size])) for start in starts]
    assert bulk.transfers[5] == payload


def test_messages_about_segments_are_told_apart() -> None:
    wire = (
        about_segment(WireKind.SEGMENT, 3, 0, 4096)
        + about_segment(WireKind.SEGMENT_READY, 4, 1, 0)
        + about_segment(WireKind.SEGMENT_REFUSED, 5, 2, 0)
    )
    assert _Bulk().feed(wire, 50) == [
        SegmentOffered(3, 4096),
        SegmentAnswered(4, True),
        SegmentAnswered(5, False),
    ]


@given(st.binary(min_size=56, max_size=300), st.integers(1, 100))
def test_random_bytes_on_a_bulk_channel_are_refused(data: bytes, step: int) -> None:
    with pytest.raises(FrameError):
        _Bulk().feed(data, step)


@pytest.mark.parametrize(
    "wire",
    [
        chunk(1, 0, 90, b"x" * 20, 100),
        chunk(1, 0, 0, b"", 100),
        chunk(1, 0, 0, b"x", LIMIT + 1),
        pack_fixed(WireKind.CHUNK, 1, 0, 15, 0, 1) + bytes(16),
        pack_fixed(WireKind.SEGMENT, 1, 0, 16, 0, 1) + bytes(16),
        pack_fixed(WireKind.REQUEST, 1, 0, 16, 0, 1) + bytes(16),
        chunk(1, 1, 0, b"x", 1),
    ],
    ids=["past the end", "empty", "too large", "header", "section", "kind", "sequence"],
)
def test_an_impossible_bulk_message_is_refused(wire: bytes) -> None:
    with pytest.raises(FrameError):
        _Bulk().feed(wire, 1000)
