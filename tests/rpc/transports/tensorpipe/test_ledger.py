"""Calls outlive their pipe: each is taken once and answered once, whatever breaks when."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rpc.protocol.resumption import ReconnectEpoch
from rpc.transports.base import Frame, FrameKind
from rpc.transports.tensorpipe import ledger as ledger
from rpc.transports.tensorpipe.ledger import (
    LARGE,
    RECEIPT_AFTER,
    Again,
    Calls,
    Mending,
    Served,
    Step,
    Taken,
)
from rpc.transports.tensorpipe.wire import AGAIN, VOID, Envelope
from tests.rpc.transports.tensorpipe.games import Game, check_calls, check_mending, future


def request(correlation: int, payload: bytes = b"") -> Frame:
    return Frame(FrameKind.REQUEST, correlation, b"", payload)


def reply(correlation: int, *tensors: torch.Tensor) -> Frame:
    return Frame(FrameKind.REPLY, correlation, b"", b"", tensors)


def asking(number: int, correlation: int, attempt: int = 0) -> Envelope:
    return Envelope(FrameKind.REQUEST, 1, 1, correlation, number, attempt)


_STEPS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["call", "take", "finish", "hear"]), st.integers(0, 47)),
        st.tuples(st.just("cut"), st.integers(0, 1 << 10)),
        st.tuples(st.sampled_from(["receipt", "note", "arrive"]), st.integers(0, 3)),
    ),
    max_size=60,
)


@given(_STEPS)
def test_whatever_breaks_each_call_is_taken_once_and_answered_once(
    steps: list[tuple[str, int]],
) -> None:
    Game().play(steps)


def test_what_happens_at_random_breaks_no_rule() -> None:
    for seed in range(200):
        try:
            check_calls(seed)
            check_mending(seed)
        except Exception as error:
            raise AssertionError(f"reproduce with seed {seed} of tensorpipe_games") from error


def test_a_request_that_failed_says_nothing_under_its_number() -> None:
    calls = Calls(remembers=True)
    asked, told = calls.begin(FrameKind.REQUEST, request(1)), calls.begin(VOID, request(0))
    again = calls.begin(AGAIN, request(2))
    nothing = Frame(FrameKind.NOTICE, 0, b"", b"what it had in shared memory")
    assert [calls.failed(number, nothing) for number in (asked, told, again, 9)] == [
        True,
        False,
        True,
        False,
    ]
    assert [call for _, call in calls.after(0)] == [
        (VOID, nothing),
        (VOID, request(0)),
        (VOID, nothing),
    ]
    assert not calls.failed(asked, nothing), "its number is on the way already"
    assert calls.take_received() == [asked, again], "a reply that could not be sent is not kept"
    calls = Calls(remembers=False)
    assert calls.failed(calls.begin(FrameKind.REQUEST, request(1)), nothing)
    assert calls.take_received() == [], "there are no receipts then"


@given(st.permutations(range(1, 30)), st.integers(0, 29))
def test_a_number_is_taken_once_in_whatever_order_they_come(order: list[int], count: int) -> None:
    taken = Taken()
    assert all(taken.take(number) for number in order[:count])
    assert not any(taken.take(number) for number in order[:count])
    told = Taken.decode(taken.encode())
    assert [number in told for number in order] == [n < count for n in range(len(order))]
    assert all(taken.take(number) for number in order[count:])
    assert not taken._ahead


def test_the_size_of_a_frame_is_that_of_all_it_carries() -> None:
    frame = Frame(FrameKind.REQUEST, 1, b"h" * 100, b"p" * 10, (torch.zeros(4), torch.zeros(1)))
    assert ledger.size(frame) == 130


class TestCalls:
    @pytest.mark.parametrize(("nbytes", "due"), [(299, False), (300, True)])
    def test_a_receipt_is_due_after_so_many_bytes(self, nbytes: int, due: bool) -> None:
        calls = Calls(remembers=True, receipt_after=1000)
        assert not calls.received(1, Frame(FrameKind.REPLY, 1, b"", bytes(700)))
        assert calls.received(2, Frame(FrameKind.REPLY, 2, b"", bytes(nbytes))) is due

    def test_a_call_that_could_not_be_made_says_nothing_under_its_number(self) -> None:
        calls = Calls(remembers=True)
        number = calls.begin(FrameKind.REQUEST, request(7, b"x"))
        assert calls.void(number)
        assert calls.after(0) == [(number, (VOID, ledger._NOTHING))]
        assert calls.came_back(number) is not None
        assert calls.came_back(number) is None
        assert not calls.void(number)

    def test_a_request_that_arrived_is_asked_about_and_its_contents_forgotten(self) -> None:
        calls = Calls(remembers=True)
        number = calls.begin(FrameKind.REQUEST, request(7, b"x" * LARGE))
        notice = calls.begin(FrameKind.NOTICE, Frame(FrameKind.NOTICE, 0, b"", b"y"))
        calls.arrived([number, notice, 99])
        (_, (kind, frame)), (_, (_, kept)) = calls.after(0)
        assert (kind, frame.correlation, bytes(frame.payload)) == (AGAIN, 7, b"")
        assert kept.payload == b"y"

    def test_on_another_pipe_only_what_was_not_taken_is_sent_again(self) -> None:
        calls = Calls(remembers=True)
        notice = Frame(FrameKind.NOTICE, 0, b"n")
        for correlation in (1, 2):
            calls.begin(FrameKind.REQUEST, request(correlation, b"x"))
            calls.begin(FrameKind.NOTICE, notice)
        assert calls.settle(Taken(3)) == [(FrameKind.NOTICE, notice)]
        assert calls.after(0) == [
            (1, (AGAIN, request(1))),
            (3, (FrameKind.REQUEST, request(2, b"x"))),
            (4, (FrameKind.NOTICE, notice)),
        ]

    def test_without_another_pipe_to_come_nothing_is_remembered(self) -> None:
        calls = Calls(remembers=False)
        calls.begin(FrameKind.REQUEST, request(7, b"x"))
        assert calls.unanswered == {1: (FrameKind.REQUEST, ledger._NOTHING)}

    def test_a_receipt_is_due_after_many_replies_or_many_bytes(self) -> None:
        calls = Calls(remembers=True)
        few = [calls.received(number, reply(number)) for number in range(1, RECEIPT_AFTER)]
        assert not any(few)
        assert calls.received(RECEIPT_AFTER, reply(0))
        assert len(calls.take_received()) == RECEIPT_AFTER
        assert not calls.received(1, reply(1))
        assert calls.received(2, reply(2, torch.zeros(ledger.RECEIPT_AFTER_BYTES // 4)))
        assert calls.take_received() == [1, 2]

    def test_what_is_not_sent_again_is_not_kept(self) -> None:
        calls = Calls(remembers=True)
        calls.begin(FrameKind.REQUEST, request(7, b"x"))
        calls.forget_contents()
        calls.begin(FrameKind.REQUEST, request(8, b"x"))
        assert {frame for _, frame in calls.unanswered.values()} == {ledger._NOTHING}
        assert calls.under_way == 2
        calls.forget()
        assert (calls.under_way, calls.unanswered) == (0, {})


class TestServed:
    def test_the_answer_goes_to_the_latest_pipe(self) -> None:
        served = Served(keeps=True)
        served.take(asking(1, 7, attempt=1), request(7), future(1))
        assert served.ask_again(asking(1, 7, attempt=0), future(0)) == (Again.STALE, None)
        assert served.ask_again(asking(1, 7, attempt=3), future(3)) == (Again.HELD, None)
        assert served.reply(reply(7)) == (asking(1, 7, attempt=3), future(3))
        assert served.reply(reply(7)) is None

    def test_a_reply_is_found_after_its_correlation_was_used_again(self) -> None:
        served = Served(keeps=True)
        served.take(asking(1, 7), request(7), future())
        served.reply(reply(7))
        served.take(asking(2, 7), request(7), future())
        assert served.ask_again(asking(1, 7, attempt=1), future(1)) == (Again.ANSWERED, reply(7))
        assert served.reply(reply(7)) == (asking(2, 7), future())

    def test_a_reply_is_kept_until_the_caller_has_it(self) -> None:
        served = Served(keeps=True)
        served.take(asking(1, 7), request(7), future())
        kept = reply(7, torch.zeros(10))
        served.reply(kept)
        assert served.kept_bytes == 40
        assert served.ask_again(asking(1, 7), future()) == (Again.ANSWERED, kept)
        served.acknowledged([1, 1, 5])
        assert served.kept_bytes == 0
        assert served.ask_again(asking(1, 7), future()) == (Again.FORGOTTEN, None)

    def test_beyond_the_bound_the_oldest_reply_is_forgotten(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(ledger, "MOST_REPLIES_KEPT", 3)
        monkeypatch.setattr(ledger, "MOST_BYTES_KEPT", 100)
        served = Served(keeps=True)

        def kept() -> list[int]:
            answered = (served.ask_again(asking(n, n), future())[0] for n in range(1, 8))
            return [n for n, again in enumerate(answered, 1) if again is Again.ANSWERED]

        for number in range(1, 6):
            served.take(asking(number, number), request(number), future())
            served.reply(reply(number))
        assert kept() == [3, 4, 5]
        for number in (6, 7):
            served.take(asking(number, number), request(number), future())
            served.reply(reply(number, torch.zeros(20)))
        assert (kept(), served.kept_bytes) == ([7], 80)

    def test_large_requests_that_still_wait_are_named_once(self) -> None:
        served = Served(keeps=True)
        for number, size in ((1, LARGE), (2, LARGE), (3, LARGE - 1)):
            served.take(asking(number, number), request(number, b"x" * size), future())
        served.reply(reply(1))
        assert served.take_arrived() == [2]
        assert served.take_arrived() == []

    def test_nothing_is_kept_for_a_pipe_that_is_not_to_come(self) -> None:
        served = Served(keeps=True)
        for number in (1, 2):
            served.take(asking(number, number), request(number, b"x" * LARGE), future())
        served.reply(reply(1, torch.zeros(3)))
        served.forget()
        assert served.take_arrived() == []
        served.reply(reply(2, torch.zeros(3)))
        assert served.kept_bytes == 0
        for number in (1, 2):
            assert served.ask_again(asking(number, number), future()) == (Again.FORGOTTEN, None)


def test_a_receipt_says_what_it_was_given() -> None:
    receipt = ledger.encode_receipt([1, 1 << 40], [7])
    assert ledger.decode_receipt(memoryview(receipt)) == ([1, 1 << 40], [7])
    assert ledger.decode_receipt(ledger.encode_receipt([], [])) == ([], [])


class TestMending:
    def mending(self, seconds: float = 5.0) -> Mending:
        epoch = ReconnectEpoch()
        epoch.broke(100.0, "eof")
        return Mending(epoch, seconds, 100.0)

    def test_the_first_attempt_is_made_at_once_and_goes_on_when_the_peer_agrees(self) -> None:
        mending = self.mending()
        assert mending.step(100.0) is Step.TRY
        attempt = mending.begin(100.0)
        assert mending.step(100.1) is Step.WAIT
        assert mending.is_pending(attempt)
        taken = Taken()
        assert mending.agree(attempt, taken)
        assert (mending.step(100.1), mending.agreed) == (Step.GO_ON, (attempt, taken))
        assert not mending.is_pending(attempt)

    def test_the_next_attempt_comes_after_a_pause_that_grows(self) -> None:
        mending, now, pauses = self.mending(1000.0), 100.0, []
        for _ in range(9):
            mending.failed(mending.begin(now), now, "reset")
            pauses.append(mending.patience(now))
            assert mending.step(now) is Step.WAIT
            now += pauses[-1]
            assert mending.step(now + 1e-6) is Step.TRY
        assert pauses[:3] == pytest.approx([0.01, 0.02, 0.04])
        assert pauses[-1] == pytest.approx(0.5)

    def test_beside_an_attempt_that_says_nothing_another_is_made_and_the_first_to_agree_counts(
        self,
    ) -> None:
        mending = self.mending()
        first = mending.begin(100.0)
        assert mending.patience(100.0) == 1.0
        assert mending.step(101.0) is Step.TRY
        second = mending.begin(101.0)
        assert second > first
        mending.failed(first, 101.1, "reset")
        assert mending.step(101.2) is Step.WAIT
        third = mending.begin(102.0)
        assert mending.agree(second, Taken())
        assert not mending.agree(third, Taken())
        assert not mending.agree(first, Taken())

    def test_it_is_given_up_when_the_time_is_over(self) -> None:
        mending = self.mending()
        mending.failed(mending.begin(100.0), 100.0, "no route")
        assert mending.step(104.9) is Step.TRY
        assert mending.patience(104.95) <= 0.05 + 1e-6
        assert mending.step(105.0) is Step.GIVE_UP
        assert mending.hopeless == "it was not opened again within 5 s: no route"

    def test_it_is_given_up_at_once_when_there_is_no_hope(self) -> None:
        mending = self.mending()
        attempt = mending.begin(100.0)
        mending.end("nobody listens")
        mending.end("something later")
        mending.failed(attempt, 100.0, "refused")
        mending.failed(attempt, 100.0, "refused")
        assert (mending.step(100.0), mending.hopeless) == (Step.GIVE_UP, "nobody listens")
