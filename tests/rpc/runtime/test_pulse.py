"""The thread that watches the clock: when it beats, and when it does not."""

from __future__ import annotations

import logging
import math
import queue
import threading

import pytest

from rpc.runtime.clock import MonotonicClock, VirtualClock
from rpc.runtime.pulse import Pulse

SECONDS = 10.0


class Beats:
    """Records the time of each beat; says when the next one is wanted."""

    def __init__(self, *plans: float | Exception | None) -> None:
        self.plans = list(plans)
        self.times: queue.Queue[float] = queue.Queue()

    def __call__(self, now: float) -> float | None:
        plan = self.plans.pop(0) if self.plans else None
        self.times.put(now)
        if isinstance(plan, Exception):
            raise plan
        return plan

    def next(self) -> float:
        return self.times.get(timeout=SECONDS)


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


def started(clock: VirtualClock, *plans: float | Exception | None) -> tuple[Pulse, Beats]:
    beats = Beats(*plans)
    pulse = Pulse("test-pulse", clock, beats)
    pulse.start()
    return pulse, beats


def test_it_beats_at_the_start_and_when_the_last_beat_said(clock: VirtualClock):
    pulse, beats = started(clock, 5.0, 7.0)
    assert beats.next() == 0.0
    clock.advance(5)
    assert beats.next() == 5.0
    clock.advance(2)
    assert beats.next() == 7.0
    pulse.stop()
    assert beats.times.empty()


def test_it_beats_when_it_is_woken(clock: VirtualClock):
    pulse, beats = started(clock, None, 100.0)
    assert beats.next() == 0.0
    clock.advance(1)
    pulse.wake()
    assert beats.next() == 1.0
    pulse.wake()
    assert beats.next() == 1.0
    pulse.stop()


def test_waking_it_during_a_beat_makes_it_beat_again(clock: VirtualClock):
    begun, proceed = threading.Event(), threading.Event()
    times: queue.Queue[float] = queue.Queue()

    def beat(now: float) -> None:
        times.put(now)
        begun.set()
        assert proceed.wait(SECONDS)

    pulse = Pulse("test-pulse", clock, beat)
    pulse.start()
    assert begun.wait(SECONDS)
    pulse.wake()
    proceed.set()
    assert [times.get(timeout=SECONDS) for _ in range(2)] == [0.0, 0.0]
    pulse.stop()


def test_a_beat_that_fails_is_logged_and_tried_again_after_a_second(
    clock: VirtualClock, caplog: pytest.LogCaptureFixture
):
    with caplog.at_level(logging.ERROR, logger="rpc"):
        pulse, beats = started(clock, ValueError("no"))
        assert beats.next() == 0.0
        clock.advance(1.1)
        assert beats.next() == 1.1
        pulse.stop()
    assert "the pulse of an agent failed" in caplog.text


def test_a_time_that_cannot_be_waited_for_is_logged_and_ends_nothing(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("rpc.runtime.pulse._SECONDS_AFTER_FAILURE", 0.01)
    beats = Beats(math.nan)
    pulse = Pulse("test-pulse", MonotonicClock(), beats)
    with caplog.at_level(logging.ERROR, logger="rpc"):
        pulse.start()
        assert beats.next() + 0.01 <= beats.next()
    pulse.stop()
    assert "the pulse of an agent failed" in caplog.text


def test_stop_ends_the_thread_and_is_final(clock: VirtualClock):
    pulse, beats = started(clock)
    beats.next()
    pulse.stop()
    pulse.wake()
    pulse.stop()
    assert not pulse._thread.is_alive()
    assert beats.times.empty()


def test_a_pulse_that_never_started_can_be_stopped(clock: VirtualClock):
    Pulse("test-pulse", clock, Beats()).stop()


def test_a_beat_may_stop_its_own_pulse(clock: VirtualClock):
    pulse = Pulse("test-pulse", clock, lambda _: pulse.stop())
    pulse.start()
    pulse._thread.join(SECONDS)
    assert not pulse._thread.is_alive()
