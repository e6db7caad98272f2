"""Calls are tried again, and a request that comes twice runs once."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from rpc.errors import FrameError
from rpc.protocol.retry import Attempts, IdempotencyTable, RequestId, Retry, Verdict


class TestRetry:
    @pytest.mark.parametrize("argument", ["backoff", "factor"])
    @pytest.mark.parametrize("value", [math.inf, 10**400], ids=["inf", "huge"])
    def test_pauses_are_finite(self, argument: str, value: float) -> None:
        with pytest.raises(ValueError, match=f"Retry: {argument}={value} must be finite"):
            Retry(**{argument: value})

    @pytest.mark.parametrize(
        "wrong",
        [
            {"attempts": 0},
            {"backoff": -1.0},
            {"factor": 0.5},
            {"attempt_timeout": 0.0},
            {"backoff": float("nan")},
        ],
    )
    def test_numbers_that_make_no_sense_are_refused(self, wrong: dict[str, Any]) -> None:
        with pytest.raises(ValueError, match="must be"):
            Retry(**wrong)

    @pytest.mark.parametrize(
        ("argument", "value"),
        [
            ("attempts", "3"),
            ("attempts", 2.5),
            ("attempts", True),
            ("attempts", None),
            ("backoff", "1"),
            ("factor", None),
            ("attempt_timeout", "1"),
        ],
    )
    def test_what_is_no_number_is_named_with_its_value(self, argument: str, value: Any) -> None:
        with pytest.raises(TypeError, match=f"Retry: {argument}={value!r} is a .*, not a"):
            Retry(**{argument: value})

    def test_numbers_may_be_of_any_type(self) -> None:
        Retry(np.int64(3), Fraction(1, 2), np.float32(1.5), 1)


class TestAttempts:
    def test_each_gets_an_equal_share_of_what_is_left(self) -> None:
        attempts = Attempts(Retry(attempts=3, backoff=0), now=100, timeout=30)
        assert attempts.begin(100) == 10
        assert attempts.next_after(104) == 104
        assert attempts.begin(104) == 13
        assert attempts.next_after(117) == 117
        assert attempts.begin(117) == 13
        assert attempts.next_after(120) is None

    def test_pauses_grow(self) -> None:
        attempts = Attempts(Retry(attempts=4, backoff=1, factor=3), now=0, timeout=0)
        pauses = []
        for _ in range(3):
            attempts.begin(0)
            pauses.append(attempts.next_after(0))
        assert pauses == [1, 3, 9]

    def test_an_attempt_takes_no_longer_than_it_may(self) -> None:
        attempts = Attempts(Retry(attempt_timeout=5), now=0, timeout=8)
        assert attempts.begin(0) == 5
        assert attempts.begin(5) == 3
        assert Attempts(Retry(attempt_timeout=5), now=0, timeout=0).begin(0) == 5
        assert Attempts(Retry(), now=0, timeout=0).begin(0) == 0

    def test_none_begins_after_the_time_of_the_call(self) -> None:
        attempts = Attempts(Retry(attempts=9, backoff=2), now=0, timeout=10)
        attempts.begin(0)
        assert attempts.next_after(8.5) is None

    def test_what_was_not_sent_does_not_count_while_there_is_time(self) -> None:
        attempts = Attempts(Retry(attempts=1, backoff=1, factor=1), now=0, timeout=10)
        now: float | None = 0.0
        begun = []
        while now is not None:
            begun.append(now)
            attempts.begin(now)
            attempts.not_sent()
            now = attempts.next_after(now)
        assert begun == [float(second) for second in range(10)]

    def test_without_backoff_it_does_not_look_for_an_absent_worker_all_the_time(self) -> None:
        attempts = Attempts(Retry(attempts=2, backoff=0), now=0, timeout=100)
        now, looks = 0.0, 0
        while now < 90:
            attempts.begin(now)
            attempts.not_sent()
            following = attempts.next_after(now)
            assert following == now + 0.05
            now, looks = following, looks + 1
        assert looks < 2000
        attempts.begin(now)
        assert attempts.next_after(now) == now

    def test_without_a_limit_of_time_it_counts_in_the_end(self) -> None:
        attempts = Attempts(Retry(attempts=2, backoff=1, factor=1), now=0, timeout=0)
        for _ in range(2):
            attempts.begin(0)
            attempts.not_sent()
            assert attempts.next_after(0) == 1
        attempts.begin(0)
        attempts.not_sent()
        assert attempts.next_after(0) is None


def check_attempts(seed: int) -> None:
    """One call and all its attempts, some of which cannot be sent, held to what was asked for."""
    draw = random.Random(seed)
    retry = Retry(
        attempts=draw.randint(1, 5),
        backoff=draw.choice((0.0, 0.1, 1.0)),
        factor=draw.choice((1.0, 2.0, 3.0)),
        attempt_timeout=draw.choice((None, 0.5, 4.0)),
    )
    start = now = draw.choice((0.0, 1000.0))
    limit = draw.choice((0.0, 3.0, 30.0))
    unsent = draw.choice((0.0, 0.5, 1.0))
    attempts = Attempts(retry, start, limit)
    made, pause = 0, retry.backoff
    for pauses in itertools.count():
        left = start + limit - now if limit else 0.0
        assert attempts.seconds_left(now) == max(left, 0.001 if limit else 0.0)
        _check_length(attempts.begin(now), retry, left, made)
        if draw.random() < unsent:
            attempts.not_sent()
            due = now + max(pause, 0.05)
        else:
            made += 1
            now += draw.uniform(0.0, 2.0)
            due = now + pause
        in_time = due < start + limit if limit else made > 0 or pauses < retry.attempts
        expected = due if made < retry.attempts and in_time else None
        assert attempts.next_after(now) == expected
        if expected is None:
            return
        now = expected + draw.choice((0.0, 0.01))
        pause *= retry.factor


def _check_length(length: float, retry: Retry, left: float, made: int) -> None:
    """Checks the time an attempt may take of what is left of the call, 0 if that has no limit."""
    if retry.attempt_timeout is not None:
        assert length == min(retry.attempt_timeout, max(left, 0.001) if left else math.inf)
    else:
        assert length == pytest.approx(max(left, 0.001 if left else 0.0) / (retry.attempts - made))


def test_attempts_keep_to_their_number_and_their_time() -> None:
    for seed in range(500):
        try:
            check_attempts(seed)
        except Exception as error:
            raise AssertionError(f"reproduce with check_attempts({seed})") from error


class TestRequestId:
    def test_survives_encoding(self) -> None:
        original = RequestId(2**60, 17, 12.5)
        assert RequestId.decode(original.encode()) == original

    @pytest.mark.parametrize("data", [b"", b"x", bytes(100)])
    def test_anything_else_is_refused(self, data: bytes) -> None:
        with pytest.raises(FrameError, match="request id"):
            RequestId.decode(data)


def request(number: int, oldest: int = 1, seconds: float = 10) -> RequestId:
    return RequestId(number, oldest, seconds)


class TestOnceTable:
    def test_the_first_runs_and_the_outcome_goes_to_all_that_came(self) -> None:
        table: IdempotencyTable[str, str] = IdempotencyTable()
        assert table.arrived(1, request(1), "first", 0) == (Verdict.RUN, None, [])
        assert table.arrived(1, request(1), "second", 1) == (Verdict.WAIT, None, [])
        assert table.ended(1, 1, "first", "outcome") == ["first", "second"]
        assert table.arrived(1, request(1), "third", 2) == (Verdict.REPEAT, "outcome", [])

    def test_requests_of_different_workers_or_numbers_are_different(self) -> None:
        table: IdempotencyTable[str, str] = IdempotencyTable()
        runs: Callable[[int, int], bool] = lambda sender, number: (  # noqa: E731
            table.arrived(sender, request(number), "w", 0)[0] is Verdict.RUN
        )
        assert runs(1, 1)
        assert runs(1, 2)
        assert runs(2, 1)
        assert not runs(1, 2)

    def test_outcomes_are_let_go_when_their_caller_is_done_with_them(self) -> None:
        table: IdempotencyTable[str, str] = IdempotencyTable()
        for number in range(1, 100):
            table.arrived(1, request(number, oldest=number), "w", 0)
            table.ended(1, number, "w", "outcome")
            assert len(table) == 1

    def test_an_open_one_keeps_those_after_it(self) -> None:
        table: IdempotencyTable[str, str] = IdempotencyTable()
        for number in range(1, 10):
            table.arrived(1, request(number, oldest=1), "w", 0)
            table.ended(1, number, "w", "outcome")
        assert table.arrived(1, request(5), "again", 1) == (Verdict.REPEAT, "outcome", [])

    def test_outcomes_are_let_go_when_nobody_can_ask_again(self) -> None:
        table: IdempotencyTable[str, str] = IdempotencyTable()
        table.arrived(1, request(1, seconds=5), "w", 0)
        table.ended(1, 1, "w", "outcome")
        table.arrived(1, request(2), "w", 4.9)
        assert len(table) == 2
        table.arrived(1, request(3), "w", 5.1)
        assert len(table) == 2

    def test_outcomes_are_let_go_by_time_alone_if_nothing_else_comes(self) -> None:
        table: IdempotencyTable[str, str] = IdempotencyTable()
        for sender, number, seconds in ((1, 1, 5), (1, 2, 7), (2, 1, 9), (2, 2, 1)):
            table.arrived(sender, request(number, seconds=seconds), "w", 0)
        table.expire(20)  # they all run still
        assert len(table) == 4
        for sender, number in ((1, 1), (1, 2), (2, 1)):
            table.ended(sender, number, "w", "outcome")
        for now, left in ((4, 4), (5, 3), (8, 2), (13, 1)):
            table.expire(now)
            assert len(table) == left
        assert table.arrived(1, request(1, seconds=5), "late", 14) == (Verdict.OVER, None, [])
        assert table.arrived(2, request(2), "again", 14) == (Verdict.WAIT, None, [])

    def test_what_is_let_go_of_is_returned(self) -> None:
        table: IdempotencyTable[str, str] = IdempotencyTable()
        for number, outcome in ((1, "first"), (2, "second"), (3, "third")):
            table.arrived(1, request(number, seconds=number), "w", 0)
            table.ended(1, number, "w", outcome)
        assert table.arrived(1, request(4, oldest=2), "w", 0) == (Verdict.RUN, None, ["first"])
        assert table.expire(2) == ["second"]
        assert table.worker_lost(1) == ["third"]
        assert table.worker_lost(1) == []

    def test_one_that_runs_is_kept_however_long_it_takes(self) -> None:
        table: IdempotencyTable[str, str] = IdempotencyTable()
        table.arrived(1, request(1, seconds=1), "w", 0)
        table.arrived(1, request(2, oldest=2), "w", 1000)
        assert table.arrived(1, request(1), "again", 1001) == (Verdict.WAIT, None, [])

    def test_the_next_life_of_a_caller_counts_anew(self) -> None:
        table: IdempotencyTable[str, str] = IdempotencyTable()
        table.arrived(1, request(1), "w", 0)
        table.worker_lost(1)
        assert table.ended(1, 1, "w", "outcome") == []
        assert table.arrived(1, request(1), "w", 0) == (Verdict.RUN, None, [])

    def test_a_life_that_is_over_ends_nothing_of_the_next(self) -> None:
        table: IdempotencyTable[str, str] = IdempotencyTable()
        table.arrived(1, request(1), "old", 0)
        table.worker_lost(1)
        table.arrived(1, request(1), "new", 0)
        assert table.ended(1, 1, "old", "outcome of the old") == []
        assert table.ended(1, 1, "new", "outcome of the new") == ["new"]

    def test_an_attempt_that_comes_when_its_caller_went_on_does_not_run_again(self) -> None:
        table: IdempotencyTable[str, str] = IdempotencyTable()
        table.arrived(1, request(1), "w", 0)
        table.ended(1, 1, "w", "outcome")
        table.arrived(1, request(2, oldest=2), "w", 1)
        assert table.arrived(1, request(1), "late", 2) == (Verdict.OVER, None, [])

    def test_an_attempt_that_comes_when_its_time_was_over_does_not_run_again(self) -> None:
        table: IdempotencyTable[str, str] = IdempotencyTable()
        table.arrived(1, request(1, seconds=5), "w", 0)
        table.ended(1, 1, "w", "outcome")
        table.arrived(1, request(2), "w", 6)
        assert table.arrived(1, request(1, seconds=5), "late", 7) == (Verdict.OVER, None, [])
        assert len(table) == 1
