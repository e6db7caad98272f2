"""Frames in parts: complete exactly once, when the last part is there, in every order."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rpc.errors import FrameError
from rpc.transports.base import Frame, FrameKind
from rpc.transports.host.frame_table import Item, Placement
from rpc.transports.host.regions import view_of
from rpc.transports.tensorwire.receive_buffers import ReceiveBuffers
from rpc.transports.tensorwire.transfers import CompleteFrame, Transfers

FRAME = Frame(FrameKind.REQUEST, 1, b"header")
EMPTY = Item(Placement.INLINE, 0, 0, 0, None, (), (), "")


def streamed(transfer: int, nbytes: int) -> Item:
    return Item(Placement.STREAM, 0, transfer, nbytes, torch.uint8, (nbytes,), (1,), "")


def transfers(max_bytes: int = 1 << 20) -> Transfers:
    return Transfers(ReceiveBuffers(1 << 20), max_bytes)


def deliver_chunk(
    into: Transfers, transfer: int, offset: int, data: bytes, total: int
) -> CompleteFrame | None:
    place = into.place(transfer, offset, len(data), total)
    if place is not None:
        place[:] = data
    return into.chunk_received(transfer, len(data))


@given(st.permutations(["frame", (5, 0), (5, 3), (8, 0), (8, 3), (8, 6)]))
def test_a_frame_is_complete_with_its_last_part(order: list[object]) -> None:
    contents = {5: b"abcdef", 8: b"ABCDEFGHI"}
    into = transfers()
    parcels: list[CompleteFrame | None] = []
    for step in order:
        if step == "frame":
            parcels.append(into.frame_received(FRAME, [EMPTY, streamed(5, 6), streamed(8, 9)]))
        else:
            transfer, offset = step  # type: ignore[misc]
            data = contents[transfer]
            parcels.append(
                deliver_chunk(into, transfer, offset, data[offset : offset + 3], len(data))
            )
    assert parcels[:-1] == [None] * 5
    last = parcels[-1]
    assert last is not None
    assert {n: bytes(view_of(a, len(contents[n]))) for n, a in last.arrays.items()} == contents


def test_a_frame_without_transfers_is_complete_at_once() -> None:
    assert transfers().frame_received(FRAME, [EMPTY]) is not None


def test_a_transfer_beyond_the_limit_is_refused_before_memory_is_taken() -> None:
    with pytest.raises(FrameError, match="max_message_bytes"):
        transfers(1000).place(1, 0, 10, 1001)


def test_chunks_that_contradict_each_other_are_refused() -> None:
    into = transfers()
    deliver_chunk(into, 1, 0, b"x" * 60, 100)
    with pytest.raises(FrameError, match="contradict"):
        into.place(1, 0, 50, 100)
    with pytest.raises(FrameError, match="contradict"):
        into.place(1, 60, 10, 200)


def test_a_frame_that_contradicts_its_transfer_is_refused() -> None:
    into = transfers()
    deliver_chunk(into, 1, 0, b"x" * 60, 60)
    with pytest.raises(FrameError, match="not 61 bytes"):
        into.frame_received(FRAME, [EMPTY, streamed(1, 61)])


def test_a_frame_for_which_there_is_no_memory_comes_with_what_was_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    take = ReceiveBuffers.take

    def refuse_large(buffers: ReceiveBuffers, length: int) -> object:
        if length > 50:
            raise MemoryError(f"{length} bytes cannot be allocated")
        return take(buffers, length)

    monkeypatch.setattr(ReceiveBuffers, "take", refuse_large)
    into = transfers()
    assert into.place(1, 0, 60, 100) is None
    into.chunk_received(1, 60)
    assert into.frame_received(FRAME, [EMPTY, streamed(1, 100), streamed(2, 5)]) is None
    assert deliver_chunk(into, 2, 0, b"small", 5) is None
    complete = deliver_chunk(into, 1, 60, bytes(40), 100)
    assert complete is not None
    assert complete.problem == "100 bytes cannot be allocated"
    assert not len(into)


class Looked(dict[int, object]):
    """Counts how often somebody looks for something."""

    times = 0

    def get(self, key: int, default: object = None) -> object:
        self.times += 1
        return super().get(key, default)


def test_a_frame_of_many_transfers_is_looked_at_once_for_each() -> None:
    count = 200
    into, looked = transfers(), Looked()
    into._transfers = looked  # type: ignore[assignment]
    assert into.frame_received(FRAME, [EMPTY, *(streamed(n, 1) for n in range(count))]) is None
    parcels = [deliver_chunk(into, n, 0, b"x", 1) for n in range(count)]
    assert parcels[:-1] == [None] * (count - 1)
    assert parcels[-1] is not None
    assert looked.times == 2 * count
