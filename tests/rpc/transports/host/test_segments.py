"""Slots in shared segments: filled once, private to the receiver, back when it is done."""

from __future__ import annotations

import errno
import os
from collections import deque
from collections.abc import Iterator
from ctypes import memmove

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rpc.errors import FrameError
from rpc.transports.host.regions import Array, array_at, view_of
from rpc.transports.host.segments import BLOCK, Budget, ReceivedSegments, SendPool, SharedSlot

MIB = 1 << 20


class Pair:
    """A sender's pool and its receiver's segments, joined without sockets."""

    def __init__(self, limit: int = 1 << 30) -> None:
        self.budget = Budget(limit)
        self.now = 0.0
        self.pool = SendPool(self.budget, memmove, "bob", "sockets", lambda: self.now)
        self.segments = ReceivedSegments("alice", "sockets")

    def extend(self, length: int) -> bool:
        offer = self.pool.offer(length)
        if offer is None:
            return False
        self.segments.add(offer.segment, offer.size, offer.descriptor)
        os.close(offer.descriptor)
        self.pool.answered(offer.segment, True)
        return True

    def put(self, data: bytes) -> SharedSlot | None:
        return self.pool.put(np.frombuffer(data, np.uint8).ctypes.data, len(data))

    def close(self) -> None:
        self.pool.close()
        self.segments.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.close()


@pytest.mark.parametrize("function", ["memfd_create", "ftruncate"])
@pytest.mark.parametrize(
    ("number", "passes", "said"),
    [(errno.EMFILE, True, "for now"), (errno.ENOMEM, True, "for now"), (errno.EPERM, False, "on")],
)
def test_a_shortage_passes_and_anything_else_is_for_good_and_either_is_said_once(
    pair: Pair,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    function: str,
    number: int,
    passes: bool,
    said: str,
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, "it is refused")

    with monkeypatch.context() as patched:
        patched.setattr(os, function, refuse)
        assert not pair.extend(MIB)
        pair.now += 1
        assert not pair.extend(MIB)
    (record,) = caplog.records
    assert "it is refused" in record.getMessage()
    assert record.getMessage().endswith(said)
    assert not pair.extend(MIB)
    pair.now += 2
    assert pair.extend(MIB) is passes
    assert pair.budget.take(1 << 30) is not passes  # nothing is charged for what was not made


def test_nothing_fits_before_a_segment_is_there_and_answered(pair: Pair) -> None:
    assert pair.put(b"x") is None
    offer = pair.pool.offer(100)
    assert offer is not None
    assert pair.put(b"x") is None
    assert pair.pool.offer(100) is None, "one offer at a time"
    pair.segments.add(offer.segment, offer.size, offer.descriptor)
    os.close(offer.descriptor)
    pair.pool.answered(offer.segment, True)
    slot = pair.put(b"hello")
    assert slot is not None
    assert bytes(view_of(pair.segments.array(*slot, 5), 5)) == b"hello"


def test_a_slot_is_used_again_only_when_the_receiver_is_done(pair: Pair) -> None:
    pair.extend(16 * MIB)
    data = bytes(10 * MIB)
    first = pair.put(data)
    assert first is not None
    assert pair.put(data) is None
    array = pair.segments.array(*first, len(data))
    assert pair.put(data) is None
    view = view_of(array, 10)
    del array
    assert pair.put(data) is None
    del view
    assert pair.put(data) == first


def test_calls_one_after_the_other_take_turns_with_two_slots(pair: Pair) -> None:
    pair.extend(16 * MIB)
    data = bytes(MIB)
    first, held = pair.put(data), []
    assert first is not None
    for _ in range(4):
        held = [pair.segments.array(*first, len(data))]
        second = pair.put(data)
        assert second not in (None, first)
        held.clear()
        held = [pair.segments.array(*second, len(data))]
        assert pair.put(data) == first
        held.clear()


@pytest.mark.parametrize("under_way", [1, 3, 20])
def test_no_new_memory_is_touched_while_what_was_given_back_has_room(
    pair: Pair, under_way: int
) -> None:
    pair.extend(64 * MIB)
    data = bytes(MIB // 4)
    kept = [view_of(receive(pair, data)[1], 1) for _ in range(8)]  # the oldest, for ever
    arrived: deque[memoryview] = deque()
    highest = 0
    for _ in range(10 * under_way):
        slot, array = receive(pair, data)
        arrived.append(view_of(array, 1))
        del array
        highest = max(highest, slot.position)
        if len(arrived) == under_way:
            arrived.popleft()
    most = len(kept) + 2 * under_way + 2
    assert highest <= most * len(data)


def receive(pair: Pair, data: bytes) -> tuple[SharedSlot, Array]:
    slot = pair.put(data)
    assert slot is not None
    return slot, pair.segments.array(*slot, len(data))


def test_memory_that_is_being_filled_is_not_unmapped(pair: Pair) -> None:
    pair.extend(MIB)

    def close_and_fill(target: int, _source: int, length: int) -> None:
        pair.pool.close()
        view_of(array_at(target), length)[:] = b"x" * length
        assert pair.budget.take(1 << 30) is False

    assert pair.pool.put(0, MIB, close_and_fill) is not None
    assert pair.budget.take(1 << 30) is True


LENGTHS = st.integers(1, 3 * MIB) | st.sampled_from([MIB, 2 * MIB])


@settings(max_examples=40)
@given(st.lists(st.tuples(LENGTHS, st.integers(0, 5)), max_size=60))
def test_slots_never_overlap_and_all_come_back(steps: list[tuple[int, int]]) -> None:
    pair = Pair()
    try:
        pair.extend(16 * MIB)
        held: list[tuple[int, memoryview]] = []
        for number, (length, release) in enumerate(steps):
            mark = bytes([number % 251 + 1])
            slot = pair.put(mark * length)
            if slot is not None:
                array = pair.segments.array(*slot, length)
                held.append((number % 251 + 1, view_of(array, length)))
                del array
            if held and release < len(held):
                del held[release]
            assert all(view[0] == view[-1] == found for found, view in held)
        held.clear()
        assert pair.put(bytes(16 * MIB)) is not None
    finally:
        pair.close()


def test_the_budget_bounds_all_pools_together_and_is_given_back() -> None:
    budget = Budget(40 * MIB)
    pools = [SendPool(budget, memmove, "bob", "sockets") for _ in range(6)]
    offers = [pool.offer(1000) for pool in pools]
    made = [offer for offer in offers if offer is not None]
    assert 2 <= len(made) < 6
    assert sum(offer.size for offer in made) <= 40 * MIB
    for offer in made:
        os.close(offer.descriptor)
    for pool in pools:
        pool.close()
    assert budget.take(40 * MIB)


def test_something_larger_than_the_usual_segment_gets_its_own(pair: Pair) -> None:
    assert pair.extend(50 * MIB)
    assert pair.put(bytes(50 * MIB)) is not None


def test_after_a_refusal_nothing_is_offered_any_more(pair: Pair) -> None:
    offer = pair.pool.offer(1000)
    assert offer is not None
    os.close(offer.descriptor)
    pair.pool.answered(offer.segment, False)
    assert pair.pool.offer(1000) is None
    assert pair.put(b"x") is None
    assert pair.budget.take(1 << 30)


def refuse(pair: Pair, error: int) -> None:
    """Refuses the offer that must be made now."""
    offer = pair.pool.offer(1000)
    assert offer is not None
    os.close(offer.descriptor)
    pair.pool.answered(offer.segment, False, error)


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The log's words on refusals, from their last comma on."""
    lines = [line for line in caplog.messages if line.startswith("worker bob cannot map")]
    return [line.rpartition(", ")[2] for line in lines]


@pytest.mark.parametrize("error", [errno.EMFILE, errno.ENFILE, errno.ENOMEM])
def test_a_refusal_for_a_shortage_holds_for_a_while_and_is_told_once(
    pair: Pair, error: int, caplog: pytest.LogCaptureFixture
) -> None:
    refuse(pair, error)
    for pause in (1, 2, 4, 8, 16, 32, 32):
        assert pair.pool.offer(1000) is None
        pair.now += pause - 0.5
        assert pair.pool.offer(1000) is None
        pair.now += 0.5
        refuse(pair, error)
    assert told(caplog) == ["for now"]
    assert pair.budget.take(1 << 30)
    pair.budget.give_back(1 << 30)
    pair.now += 32
    assert pair.extend(1000)
    assert pair.put(b"hello") is not None


def test_after_a_segment_was_taken_the_next_refusal_holds_as_shortly_as_the_first(
    pair: Pair,
) -> None:
    for _ in range(3):
        refuse(pair, errno.ENOMEM)
        pair.now += 32
    assert pair.extend(1000)
    refuse(pair, errno.ENOMEM)
    pair.now += 1
    assert pair.extend(1000)


def test_a_refusal_for_good_is_told_although_a_shortage_was(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    refuse(pair, errno.ENOMEM)
    pair.now += 1
    refuse(pair, errno.EPERM)
    assert told(caplog) == ["for now", "from now on"]
    pair.now += 1000
    assert pair.pool.offer(1000) is None


@pytest.mark.parametrize("number", [0, 7])
def test_an_answer_to_no_offer_is_refused(pair: Pair, number: int) -> None:
    pair.extend(1000)
    with pytest.raises(FrameError, match="not offered"):
        pair.pool.answered(number, True)


@pytest.mark.parametrize(
    ("position", "length"),
    [(0, 10), (BLOCK, 10), (1 << 40, 10), (16 * MIB, 64 * MIB), (16 * BLOCK + 1, 10)],
)
def test_tensors_outside_a_segment_are_refused(pair: Pair, position: int, length: int) -> None:
    pair.extend(1000)
    with pytest.raises(FrameError, match="outside"):
        pair.segments.array(0, position, length)


def test_a_segment_that_was_never_handed_over_is_refused(pair: Pair) -> None:
    with pytest.raises(FrameError, match="never handed over"):
        pair.segments.array(3, 4096, 10)


def test_a_segment_that_can_shrink_is_refused(pair: Pair) -> None:
    descriptor = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, MIB)
        with pytest.raises(FrameError, match="for good"):
            pair.segments.add(0, MIB, descriptor)
    finally:
        os.close(descriptor)


def test_a_slot_of_a_message_that_is_not_sent_is_free_again(pair: Pair) -> None:
    pair.extend(16 * MIB)
    data = bytes(10 * MIB)
    slot = pair.put(data)
    assert slot is not None
    assert pair.put(data) is None
    pair.pool.take_back([slot])
    assert pair.put(data) == slot


def test_a_slot_that_could_not_be_filled_is_free_again(pair: Pair) -> None:
    pair.extend(16 * MIB)

    def fail(*_: int) -> None:
        raise MemoryError("nothing is left")

    with pytest.raises(MemoryError):
        pair.pool.put(0, 10 * MIB, fail)
    assert pair.put(bytes(10 * MIB)) is not None


def test_a_segment_shorter_than_announced_is_refused(pair: Pair) -> None:
    offer = pair.pool.offer(1000)
    assert offer is not None
    with pytest.raises(FrameError, match="for good"):
        pair.segments.add(offer.segment, offer.size * 2, offer.descriptor)
    os.close(offer.descriptor)


def test_received_bytes_outlive_both_pools(pair: Pair) -> None:
    pair.extend(1000)
    slot = pair.put(b"hello")
    assert slot is not None
    array = pair.segments.array(*slot, 5)
    pair.close()
    assert pair.put(b"x") is None
    assert bytes(view_of(array, 5)) == b"hello"


def test_each_reason_of_a_refusal_is_answered_every_time_and_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    segments = ReceivedSegments("alice", "sockets")
    no_room, not_ours = OSError(errno.ENOMEM, "no room"), FrameError("not ours")
    numbers = [segments.refused(error) for error in (no_room, not_ours, no_room, not_ours)]
    assert numbers == [errno.ENOMEM, 0] * 2
    assert [record.getMessage() for record in caplog.records] == [
        "shared memory from worker alice cannot be mapped ([Errno 12] no room); using sockets",
        "shared memory from worker alice cannot be mapped (not ours); using sockets",
    ]
