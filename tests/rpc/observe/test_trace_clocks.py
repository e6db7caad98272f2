"""Estimates of clock offsets from exchanges of messages."""

from __future__ import annotations

import random

import pytest

from rpc.observe.trace_clocks import ClockSample, estimate, samples_of
from rpc.observe.trace_records import CallKind, CallRecord, HandlerRecord, WorkerTrace


def sample(
    here: int, there: int, ahead: float, out: float, back: float, at: float = 10.0
) -> ClockSample:
    """An exchange with a peer whose clock is ``ahead``; ``out`` and ``back`` seconds on the way."""
    arrived = at + out
    replied = arrived + 0.5
    return ClockSample(here, there, at, arrived + ahead, replied + ahead, replied + back)


def test_equal_ways_give_the_exact_offset() -> None:
    one = sample(0, 1, ahead=100.0, out=0.25, back=0.25)
    assert one.offset == 100.0
    assert one.round_trip == 0.5
    found = estimate(0, [one])
    assert found[0].seconds == 0.0
    assert (found[1].seconds, found[1].error) == (100.0, 0.25)


def test_the_shortest_round_trip_counts() -> None:
    long = sample(0, 1, ahead=7.0, out=0.0, back=2.0)
    short = sample(0, 1, ahead=7.0, out=0.125, back=0.125)
    for order in ([long, short], [short, long]):
        assert estimate(0, order)[1].seconds == 7.0


def test_a_sample_serves_both_ways() -> None:
    assert estimate(1, [sample(0, 1, ahead=5.0, out=0.25, back=0.25)])[0].seconds == -5.0


def test_workers_are_reached_over_others_by_the_way_with_the_least_error() -> None:
    samples = [
        sample(0, 1, ahead=3.0, out=0.125, back=0.125),
        sample(1, 2, ahead=4.0, out=0.125, back=0.125),
        sample(0, 2, ahead=7.0, out=0.0, back=8.0),
    ]
    found = estimate(0, samples)[2]
    assert (found.seconds, found.error) == (7.0, 0.25)


def test_workers_without_any_sample_stay_unknown() -> None:
    assert set(estimate(0, [sample(1, 2, ahead=1.0, out=0.1, back=0.1)])) == {0}


@pytest.mark.parametrize("seed", range(50))
def test_the_error_bounds_how_wrong_an_estimate_is(seed: int) -> None:
    chance = random.Random(seed)
    clocks = [0.0, *(chance.uniform(-1000, 1000) for _ in range(4))]
    samples = []
    for _ in range(30):
        here, there = chance.sample(range(5), 2)
        exchange = sample(
            here, there, clocks[there] - clocks[here], chance.random(), chance.random()
        )
        samples.append(exchange)
    for worker, offset in estimate(0, samples).items():
        assert abs(offset.seconds - clocks[worker]) <= offset.error + 1e-9


def test_samples_come_from_answered_calls_to_others() -> None:
    def call(span: int, to: int) -> CallRecord:
        return CallRecord(span, CallKind.SYNC, "f", to, 1, 1.0, 1.25, 3.0, 3.5)

    def handler(span: int, failed: bool = False) -> HandlerRecord:
        return HandlerRecord(span, "f", 0, 1, 11.75, 11.5, 12.0, 12.25, 12.25, 12.5, 12.75, failed)

    unanswered = CallRecord(3, CallKind.SYNC, "f", 1, 1, 1.0, 1.25)
    alice = WorkerTrace(0, "alice", "p", [call(1, 1), call(2, 0), unanswered, call(4, 1)])
    alice.handlers = [handler(2)]
    bob = WorkerTrace(1, "bob", "q", [], [handler(1), handler(3), handler(4, failed=True)])
    assert samples_of([alice, bob]) == [ClockSample(0, 1, 1.25, 11.5, 12.5, 3.0)]


def test_workers_in_one_process_share_its_clock() -> None:
    alice, bob, carol = (WorkerTrace(i, str(i), p) for i, p in enumerate("ppq"))
    found = estimate(0, samples_of([alice, bob, carol]))
    assert {worker: (o.seconds, o.error) for worker, o in found.items()} == {0: (0, 0), 1: (0, 0)}
