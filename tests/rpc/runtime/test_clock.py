"""Time, real and virtual, and the alarm that waits for it."""

from __future__ import annotations

import gc
import threading
import time

import pytest

from rpc.runtime.clock import Alarm, Clock, MonotonicClock, VirtualClock

SECONDS = 10.0


class Sleeper:
    """A thread that waits once."""

    def __init__(self, clock: Clock, deadline: float | None) -> None:
        self.alarm = Alarm()
        self.awake = threading.Event()
        self.thread = threading.Thread(target=self._run, args=(clock, deadline))
        self.thread.start()

    def _run(self, clock: Clock, deadline: float | None) -> None:
        clock.wait(self.alarm, deadline)
        self.awake.set()

    def wakes(self) -> bool:
        woke = self.awake.wait(SECONDS)
        self.thread.join(SECONDS)
        return woke


def asleep(clock: VirtualClock, count: int) -> None:
    """Waits until so many threads sleep with a deadline."""
    deadline = time.monotonic() + SECONDS
    while len(clock._sleepers) < count:
        assert time.monotonic() < deadline


# --- Alarms


def test_an_alarm_that_was_set_ends_the_next_wait_and_only_that():
    alarm = Alarm()
    alarm.set()
    alarm.set()
    alarm.wait(None)
    start = time.monotonic()
    alarm.wait(0.01)
    assert time.monotonic() - start >= 0.01


@pytest.mark.parametrize("seconds", [0.0, -1.0])
def test_a_wait_until_a_time_that_is_over_returns(seconds: float):
    Alarm().wait(seconds)


def test_an_alarm_may_be_set_by_a_finalizer_that_interrupts_its_setting():
    """The garbage collector may run anywhere, and with it a finalizer that sets the alarm."""
    alarm = Alarm()

    class Ring:
        def __init__(self) -> None:
            self.self = self

        def __del__(self) -> None:
            alarm.set()

    threshold = gc.get_threshold()
    gc.set_threshold(1)
    try:
        for _ in range(200):
            Ring()
            alarm.set()
            alarm.wait(0)
            alarm.wait(0)
    finally:
        gc.set_threshold(*threshold)


# --- The machine's clock


def test_the_machines_clock_is_monotonic_time():
    clock = MonotonicClock()
    before = time.monotonic()
    assert before <= clock.now() <= time.monotonic()


def test_the_machines_clock_waits_until_the_deadline():
    clock = MonotonicClock()
    deadline = clock.now() + 0.02
    clock.wait(Alarm(), deadline)
    assert clock.now() >= deadline
    clock.wait(Alarm(), deadline)


@pytest.mark.parametrize("deadline", [None, 1e300, float("inf")])
def test_the_machines_clock_can_wait_for_ever_and_be_woken(deadline: float | None):
    sleeper = Sleeper(MonotonicClock(), deadline)
    sleeper.alarm.set()
    assert sleeper.wakes()


# --- The virtual clock


def test_virtual_time_stands_still_until_it_is_advanced():
    clock = VirtualClock()
    assert clock.now() == 0
    clock.advance(1.5)
    clock.advance(0)
    assert clock.now() == 1.5


@pytest.mark.parametrize("seconds", [-0.1, float("nan")])
def test_virtual_time_does_not_go_back(seconds: float):
    with pytest.raises(ValueError, match="does not go back"):
        VirtualClock().advance(seconds)


def test_only_those_whose_time_has_come_are_woken():
    clock = VirtualClock()
    early, late = Sleeper(clock, 1.0), Sleeper(clock, 2.0)
    asleep(clock, 2)
    clock.advance(1.0)
    assert early.wakes()
    assert not late.awake.is_set()
    clock.advance(1.0)
    assert late.wakes()


def test_a_sleeper_without_a_deadline_sleeps_until_its_alarm():
    clock = VirtualClock()
    sleeper = Sleeper(clock, None)
    clock.advance(1e9)
    assert not sleeper.awake.is_set()
    sleeper.alarm.set()
    assert sleeper.wakes()


def test_a_deadline_that_has_passed_is_not_waited_for():
    clock = VirtualClock()
    clock.advance(3)
    clock.wait(Alarm(), 3)


def test_nobody_is_left_on_the_clock():
    clock = VirtualClock()
    sleeper = Sleeper(clock, 1.0)
    asleep(clock, 1)
    sleeper.alarm.set()
    assert sleeper.wakes()
    assert not clock._sleepers
