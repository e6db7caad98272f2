"""Each call is answered once, each number taken once, and each large reply named once."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rpc.transports.base import Frame, FrameKind
from rpc.transports.tensorpipe import outstanding
from rpc.transports.tensorpipe.outstanding import RECEIPT_AFTER, SentCalls, TakenCalls, size
from rpc.transports.tensorpipe.wire import BATCH, VOID, Envelope


def future() -> outstanding.AnswerFuture:
    return torch.futures.Future()


def asking(number: int, correlation: int) -> Envelope:
    return Envelope(FrameKind.REQUEST, 1, 1, correlation, number)


@given(st.permutations(range(1, 30)), st.integers(0, 29))
def test_a_number_is_taken_once_in_whatever_order_they_come(order: list[int], count: int) -> None:
    taken = TakenCalls()
    assert all(taken.take(asking(number, number), None) for number in order[:count])
    assert not any(taken.take(asking(number, number), None) for number in order[:count])
    assert all(taken.take(asking(number, number), None) for number in order[count:])
    assert not any(taken.take(asking(number, number), None) for number in order)


def test_the_size_of_a_frame_is_that_of_all_it_carries() -> None:
    frame = Frame(FrameKind.REQUEST, 1, b"h" * 100, b"p" * 10, (torch.zeros(4), torch.zeros(1)))
    assert size(frame) == 130


@pytest.mark.parametrize(
    ("payload", "tensors", "large"),
    [(16_383, 0, False), (16_384, 0, True), (0, 1, True), (0, 0, False)],
)
def test_a_frame_is_large_by_its_tensors_or_its_bytes(
    payload: int, tensors: int, large: bool
) -> None:
    frame = Frame(FrameKind.REPLY, 1, b"h", bytes(payload), (torch.zeros(1),) * tensors)
    assert outstanding.is_large(frame) is large


class TestSentCalls:
    def test_an_answer_counts_once_and_the_call_is_under_way_until_it_was_acted_on(self) -> None:
        calls = SentCalls()
        numbers = [calls.begin(FrameKind.REQUEST, 7), calls.begin(BATCH)]
        assert (numbers, calls.sent, calls.under_way) == ([1, 2], 2, 2)
        assert calls.came_back(1) == (FrameKind.REQUEST, 7)
        assert calls.came_back(1) is None
        assert calls.under_way == 2

    def test_one_that_could_not_be_made_is_void_once(self) -> None:
        calls = SentCalls()
        number = calls.begin(FrameKind.REQUEST, 7)
        assert calls.void(number)
        assert calls.came_back(number) == (VOID, 0)
        assert not calls.void(number)

    def test_a_request_that_failed_is_void_once_and_named_in_the_next_receipt(self) -> None:
        calls = SentCalls()
        asked, told = calls.begin(FrameKind.REQUEST, 7), calls.begin(BATCH)
        assert [calls.failed(number) for number in (asked, told, 9)] == [True, False, False]
        assert not calls.failed(asked), "VOID is on its way already"
        assert calls.take_received() == [7], "it may have had a reply that could not be sent"
        assert calls.came_back(asked) == (VOID, 0)

    def test_a_receipt_is_due_after_many_replies(self) -> None:
        calls = SentCalls()
        assert not any(calls.received(number, 1) for number in range(1, RECEIPT_AFTER))
        assert calls.received(0, 1)
        assert calls.take_received() == [*range(1, RECEIPT_AFTER), 0]
        assert not calls.received(1, 1)

    @pytest.mark.parametrize(("nbytes", "due"), [(299, False), (300, True)])
    def test_a_receipt_is_due_after_so_many_bytes(self, nbytes: int, due: bool) -> None:
        calls = SentCalls(receipt_after=1000)
        assert not calls.received(1, 700)
        assert calls.received(2, nbytes) is due

    def test_what_is_forgotten_comes_back_no_more(self) -> None:
        calls = SentCalls()
        number = calls.begin(FrameKind.REQUEST, 7)
        calls.received(5, 1)
        calls.forget()
        assert (calls.under_way, calls.came_back(number)) == (0, None)
        assert calls.take_received() == []


def test_a_request_waits_for_one_reply() -> None:
    taken, answers = TakenCalls(), [future(), future()]
    assert taken.take(asking(1, 7), answers[0])
    assert taken.take(asking(2, 8), answers[1])
    assert taken.asked.pop(7) == (asking(1, 7), answers[0])
    assert 7 not in taken.asked
    assert taken.take_asked() == [(asking(2, 8), answers[1])]
    assert taken.take_asked() == []


@given(st.lists(st.integers(0, 2**64 - 1)))
def test_a_receipt_says_what_it_was_given(correlations: list[int]) -> None:
    receipt = outstanding.encode_receipt(correlations)
    assert outstanding.decode_receipt(memoryview(receipt)) == correlations


def test_all_calls_end_and_are_delivered_once_whatever_torch_answers() -> None:
    """torch reads calls in any order, and fails some of them before or after they were taken."""
    for seed in range(50):
        play(seed)


def play(seed: int) -> None:
    draw = random.Random(seed)
    calls, taken, delivered = SentCalls(), TakenCalls(), Counter[int]()
    under_way = [asking(calls.begin(FrameKind.REQUEST, n), n) for n in range(draw.randint(1, 20))]
    while under_way:
        envelope = under_way.pop(draw.randrange(len(under_way)))
        fails_before, fails_after = (draw.random() < 0.2 for _ in range(2))
        may_fail = envelope.kind == FrameKind.REQUEST
        if not (may_fail and fails_before) and taken.take(envelope, None):
            delivered[envelope.number] += 1
            taken.delivered += 1
        if may_fail and (fails_before or fails_after):
            assert calls.failed(envelope.number)
            under_way.append(envelope._replace(kind=VOID))
        else:
            assert calls.came_back(envelope.number) is not None
            calls.under_way -= 1
    assert delivered == Counter(range(1, calls.sent + 1))
    assert (calls.under_way, taken.delivered) == (0, calls.sent)
