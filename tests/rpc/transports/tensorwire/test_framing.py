"""The bytes of frames: what is written is read, and what is malformed is refused."""

from __future__ import annotations

import struct
import zlib
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rpc.errors import FrameError
from rpc.transports.base import Unreceived
from rpc.transports.host.frame_table import INLINE_ALIGNMENT
from rpc.transports.tensorwire import main_reader
from rpc.transports.tensorwire.framing import (
    FIXED_SIZE,
    Acknowledged,
    BulkDecoder,
    Chunk,
    DeviceAnswered,
    DeviceOffered,
    SegmentAnswered,
    SegmentOffered,
    WireKind,
    pack_fixed,
    pack_pair,
)
from rpc.transports.tensorwire.main_reader import Arrived, FrameDecoder

LIMIT = 1 << 16


class Sent(NamedTuple):
    """The things that go into a frame."""

    kind: int
    correlation: int
    header: bytes
    table: bytes
    inline: bytes

    def encode(self, sequence: int) -> bytes:
        lengths = (len(self.header), len(self.table), len(self.inline))
        fixed = pack_fixed(self.kind, self.correlation, sequence, *lengths)
        return fixed + self.header + self.table + self.inline


frames = st.builds(
    Sent,
    kind=st.sampled_from([1, 2, 3]),
    correlation=st.integers(0, 2**64 - 1),
    header=st.binary(max_size=200),
    table=st.binary(max_size=100),
    inline=st.binary(max_size=2000),
)


def feed(decoder: FrameDecoder, data: bytes, step: int) -> list[Arrived]:
    """Gives the decoder ``data`` in pieces of at most ``step`` bytes."""
    found: list[Arrived] = []
    while data:
        room = decoder.room()
        count = step if room is None else min(step, len(room))
        piece, data = data[:count], data[count:]
        if room is None:
            found += decoder.feed(piece)
        else:
            room[: len(piece)] = piece
            found += decoder.filled(len(piece))
    return found


def plain(found: list[Arrived]) -> list[Sent]:
    return [Sent(f.kind, f.correlation, f.header, table, bytes(f.payload)) for f, table in found]


def test_the_fixed_part_is_forty_bytes_in_a_documented_layout() -> None:
    fixed = pack_fixed(2, 7, 3, 10, 20, 30)
    head = struct.pack("<HBBIIQQQ", 0x5754, 1, 2, 10, 20, 30, 7, 3)
    assert fixed == head + struct.pack("<I", zlib.crc32(head))
    assert len(fixed) == FIXED_SIZE == 40


@given(st.lists(frames, max_size=8), st.integers(1, 700))
def test_frames_arrive_as_they_were_sent_however_the_stream_is_cut(
    sent: list[Sent], step: int
) -> None:
    data = b"".join(frame.encode(number) for number, frame in enumerate(sent))
    assert plain(feed(FrameDecoder(LIMIT), data, step)) == sent


@given(st.integers(100, 70_000), st.integers(0, 3), st.booleans())
def test_long_frames_arrive_between_short_ones(step: int, before: int, tabled: bool) -> None:
    short = Sent(1, 5, b"header", b"", b"payload")
    long = Sent(2, 6, b"h" * 300, b"t" * 20 if tabled else b"", bytes(range(256)) * 230)
    sent = [short] * before + [long, short, long]
    data = b"".join(frame.encode(number) for number, frame in enumerate(sent))
    assert plain(feed(FrameDecoder(LIMIT), data, step)) == sent


@given(st.integers(0, 100), st.integers(1, 100), st.integers(41, 70_000))
def test_what_travels_inline_in_a_long_frame_is_aligned(header: int, table: int, step: int) -> None:
    data = Sent(2, 6, b"h" * header, b"t" * table, bytes(30_000)).encode(0)
    ((frame, _),) = feed(FrameDecoder(LIMIT), data, step)
    assert np.frombuffer(frame.payload, np.uint8).ctypes.data % INLINE_ALIGNMENT == 0


@given(st.binary(min_size=1, max_size=300), st.integers(1, 100))
def test_random_bytes_are_refused_or_waited_on_but_never_a_frame(data: bytes, step: int) -> None:
    decoder = FrameDecoder(LIMIT)
    try:
        assert feed(decoder, data, step) == []
    except FrameError:
        return
    assert len(data) < FIXED_SIZE


@given(frames, st.data())
def test_a_flipped_bit_in_the_fixed_part_is_noticed(frame: Sent, data: st.DataObject) -> None:
    wire = bytearray(frame.encode(0))
    bit = data.draw(st.integers(0, 8 * FIXED_SIZE - 1))
    wire[bit // 8] ^= 1 << bit % 8
    with pytest.raises(FrameError):
        feed(FrameDecoder(LIMIT), bytes(wire), 64)


@given(frames, st.data())
def test_a_truncated_frame_is_not_delivered(frame: Sent, data: st.DataObject) -> None:
    wire = frame.encode(0)
    cut = data.draw(st.integers(0, len(wire) - 1))
    assert feed(FrameDecoder(LIMIT), wire[:cut], 64) == []


@given(st.lists(frames, min_size=2, max_size=4), st.data())
def test_a_lost_or_repeated_frame_is_noticed(sent: list[Sent], data: st.DataObject) -> None:
    order = data.draw(st.sampled_from([[1], [0, 0], [1, 0]]))
    wire = b"".join(sent[number].encode(number) for number in order)
    with pytest.raises(FrameError, match="was due"):
        feed(FrameDecoder(LIMIT), wire, 64)


@given(st.integers(LIMIT - FIXED_SIZE + 1, 2**64 - 1))
def test_an_oversize_frame_is_refused_before_anything_is_allocated(inline: int) -> None:
    decoder = FrameDecoder(LIMIT)
    with pytest.raises(FrameError, match="max_frame_bytes"):
        feed(decoder, pack_fixed(1, 0, 0, 0, 0, inline), 64)
    assert decoder.room() is None


@pytest.mark.parametrize("kind", [0, 5, WireKind.CHUNK, WireKind.SEGMENT, 255])
def test_a_frame_of_a_kind_that_has_no_place_on_a_main_channel_is_refused(kind: int) -> None:
    with pytest.raises(FrameError, match="unknown kind"):
        feed(FrameDecoder(LIMIT), pack_fixed(kind, 0, 0, 0, 0, 0), 64)


@pytest.mark.parametrize("header", [0, 1 << 15], ids=["short", "long"])
def test_an_acknowledgement_of_the_wrong_form_is_refused(header: int) -> None:
    data = pack_fixed(WireKind.ACKNOWLEDGE, 0, 0, header, 0, 0) + bytes(header)
    with pytest.raises(FrameError, match="acknowledgement"):
        feed(FrameDecoder(LIMIT), data, 64)


def test_acknowledgements_are_told_and_are_no_frames() -> None:
    told: list[int] = []
    decoder = FrameDecoder(LIMIT, acknowledged=told.append)
    wire = b"".join(
        pack_fixed(kind, number, position, 0, table, 0) + b"\1" * table
        for position, (kind, number, table) in enumerate([(1, 7, 0), (4, 30, 1), (4, 31, 1)])
    )
    assert [frame.correlation for frame, _ in feed(decoder, wire, 20)] == [7]
    assert told == [30, 31]
    assert decoder.received == 3


def test_a_frame_of_another_version_is_refused_by_its_number() -> None:
    head = struct.pack("<HBBIIQQQ", 0x5754, 9, 1, 0, 0, 0, 0, 0)
    with pytest.raises(FrameError, match="version 9"):
        feed(FrameDecoder(LIMIT), head + struct.pack("<I", zlib.crc32(head)), 64)


def test_inline_bytes_of_frames_with_a_table_are_writable() -> None:
    for size in (10, 30_000):
        sent = Sent(1, 0, b"", b"t", b"x" * size)
        ((found, _),) = feed(FrameDecoder(LIMIT), sent.encode(0), 500)
        assert not memoryview(found.payload).readonly


def no_memory(length: int) -> memoryview:
    raise MemoryError(f"{length} bytes cannot be allocated")


@given(
    st.integers(0, 4000),
    st.integers(0, 600),
    st.integers(0, 4000),
    st.integers(1, 25_000),
    st.integers(0, 2),
)
def test_of_a_frame_without_memory_the_table_and_the_beginning_of_the_header_arrive(
    header: int, table: int, inline: int, step: int, before: int
) -> None:
    short = Sent(1, 5, b"header", b"", b"payload")
    long = Sent(2, 6, bytes(range(250)) * 16, bytes(range(200)) * 3, b"i" * inline)
    long = long._replace(header=long.header[:header], table=long.table[:table])
    sent = [short] * before + [long, short, long]
    data = b"".join(frame.encode(number) for number, frame in enumerate(sent))
    with pytest.MonkeyPatch.context() as patched:
        for name, value in (("_LARGE", 100), ("_KEPT_BYTES", 1000), ("WASTE_BYTES", 300)):
            patched.setattr(main_reader, name, value)
        decoder = FrameDecoder(LIMIT, no_memory)
        found = feed(decoder, data, step)
    assert decoder.received == len(found) == len(sent)
    for (frame, rows), whole in zip(found, sent, strict=True):
        assert (frame.kind, frame.correlation, rows) == (*whole[:2], whole.table)
        if type(frame.payload) is Unreceived:
            assert whole is long
            assert frame.header == whole.header[:1000]
            assert b"bytes cannot be allocated" in frame.payload
        else:
            assert (frame.header, bytes(frame.payload)) == (whole.header, whole.inline)


@pytest.mark.interpreted
def test_a_frame_whose_header_cannot_be_copied_arrives_without_the_rest_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent = Sent(1, 7, b"h" * 400_000, b"table", b"payload" * 2000)

    def short_of_memory(data: bytes) -> bytes:
        return bytes(data if len(data) < 400_000 else no_memory(len(data)))

    monkeypatch.setattr(main_reader, "bytes", short_of_memory, raising=False)
    ((frame, table),) = feed(FrameDecoder(1 << 20), sent.encode(0), 10_000)
    assert (frame.header, table) == (b"h" * (1 << 18), b"table")
    assert frame.payload == b"400000 bytes cannot be allocated"
    assert type(frame.payload) is Unreceived


def test_a_frame_without_memory_that_breaks_off_is_whole_on_another_connection() -> None:
    sent = [Sent(1, number, b"h" * 30_000, b"", b"payload") for number in range(2)]
    tries = iter([False, True, True])
    decoder = FrameDecoder(
        LIMIT, lambda length: memoryview(bytearray(length)) if next(tries) else no_memory(length)
    )
    assert feed(decoder, sent[0].encode(0)[:20_000], 5000) == []
    decoder.restart()
    data = b"".join(frame.encode(number) for number, frame in enumerate(sent))
    assert plain(feed(decoder, data, 5000)) == sent


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
            event = self.decoder.advance(count)
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


@given(st.integers(1, 70_000))
def test_chunks_that_have_no_place_are_thrown_away(step: int) -> None:
    unplaced, placed = chunk(1, 0, 0, bytes(200_000), 200_000), chunk(2, 1, 0, b"abc", 3)
    memory = bytearray(3)
    bulk = _Bulk()
    bulk.decoder = BulkDecoder(lambda n, *_: None if n == 1 else memoryview(memory))
    assert bulk.feed(unplaced + placed, step) == [Chunk(1, 200_000), Chunk(2, 3)]
    assert memory == b"abc"


@given(st.lists(frames, max_size=6), st.lists(st.integers(0, 5000), max_size=4))
def test_a_decoder_goes_on_with_another_connection_where_frames_are_missing(
    sent: list[Sent], lengths: list[int]
) -> None:
    """Each connection breaks after some bytes, the last one does not."""
    decoder, found = FrameDecoder(LIMIT), []
    for length in [*lengths, None]:
        received = decoder.received
        wire = b"".join(f.encode(received + n) for n, f in enumerate(sent[received:]))
        found += feed(decoder, wire[:length], 700)
        decoder.restart()
    assert plain(found) == sent


@given(st.integers(1, 3000), st.lists(st.integers(0, 4000), max_size=4))
def test_a_bulk_decoder_goes_on_with_another_connection_where_chunks_are_missing(
    size: int, lengths: list[int]
) -> None:
    payload = bytes(number % 251 for number in range(size))
    starts = range(0, size, 400)
    bulk, events = _Bulk(), []
    for length in [*lengths, None]:
        received = bulk.decoder.received
        wire = b"".join(
            chunk(5, number, start, payload[start : start + 400], size)
            for number, start in list(enumerate(starts))[received:]
        )
        events += bulk.feed(wire[:length], 90)
        bulk.decoder.restart()
    assert events == [Chunk(5, len(payload[start : start + 400])) for start in starts]
    assert bulk.transfers[5] == payload


def test_acknowledgements_of_bulk_messages_are_told_apart() -> None:
    data = about_segment(WireKind.ACKNOWLEDGE, 12, 0, 0)
    assert _Bulk().feed(data, 7) == [Acknowledged(12)]


def test_messages_about_segments_are_told_apart() -> None:
    wire = (
        about_segment(WireKind.SEGMENT, 3, 0, 4096)
        + about_segment(WireKind.SEGMENT_READY, 4, 1, 0)
        + about_segment(WireKind.SEGMENT_REFUSED, 5, 2, 0)
        + about_segment(WireKind.SEGMENT_REFUSED, 6, 3, 24)
    )
    assert _Bulk().feed(wire, 50) == [
        SegmentOffered(3, 4096),
        SegmentAnswered(4, True),
        SegmentAnswered(5, False),
        SegmentAnswered(6, False, 24),
    ]


def test_messages_about_devices_are_told_apart() -> None:
    wire = (
        about_segment(WireKind.DEVICE, 3, 0, 4096)
        + about_segment(WireKind.DEVICE_READY, 4, 1, 0)
        + about_segment(WireKind.DEVICE_REFUSED, 5, 2, 24)
    )
    assert _Bulk().feed(wire, 50) == [
        DeviceOffered(3, 4096),
        DeviceAnswered(4, True),
        DeviceAnswered(5, False, 24),
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


def test_a_chunk_counts_as_received_when_it_is_whole() -> None:
    counts: list[int] = []

    def place(_transfer: int, _offset: int, length: int, _total: int) -> memoryview:
        counts.append(decoder.received)
        return memoryview(bytearray(length))

    decoder = BulkDecoder(place)
    data = chunk(1, 0, 0, b"0123456789", 10)
    for byte in data:
        counts.append(decoder.received)
        decoder.buffer()[0] = byte
        decoder.advance(1)
    assert counts == [0] * (len(data) + 1)
    assert decoder.received == 1
