"""Polling before sleeping: it finds events, and gives up where it does not pay."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rpc.constants import DEFAULT_BUSY_POLL_SEC
from rpc.testing import local_group
from rpc.transports.tensorwire import Settings, TensorWireTransport, replies, requests
from rpc.transports.tensorwire.busy_polling import BusyPoller, UsualWait


class CountingEpoll:
    """Stands for an epoll instance: says when it is looked at, and when it sleeps."""

    def __init__(self, ready_after: int) -> None:
        self.ready_after = ready_after
        self.looks = 0
        self.sleeps = 0

    def poll(self, timeout: float, max_events: int) -> list[tuple[int, int]]:
        if timeout:
            self.sleeps += 1
            return []
        self.looks += 1
        return [(7, select.EPOLLIN)] if self.looks >= self.ready_after else []


class LateEpoll(CountingEpoll):
    """Also wakes a sleeper, once the clock has reached the time of the event."""

    def __init__(self, clock: TickingClock) -> None:
        super().__init__(ready_after=1)
        self.clock = clock
        self.at = 0.0

    def poll(self, timeout: float, max_events: int) -> list[tuple[int, int]]:
        if timeout:
            self.sleeps += 1
            self.clock.now = max(self.clock.now, self.at)
        else:
            self.looks += 1
        return [(7, select.EPOLLIN)] if self.clock.now >= self.at else []


class TickingClock:
    """Each look at it takes a microsecond."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1e-6
        return self.now


def poller(
    epoll: CountingEpoll,
    seconds: float = DEFAULT_BUSY_POLL_SEC,
    clock: Callable[[], float] = time.perf_counter,
    longest: float = 0.0,
) -> BusyPoller:
    """Learns nothing, unless waits of up to ``longest`` seconds are worth polling for."""
    usual = UsualWait(longest)
    return BusyPoller(epoll, 8, seconds, usual, clock, lambda: None)  # type: ignore[arg-type]


@pytest.fixture
def descriptor() -> Iterator[int]:
    made = os.eventfd(0, os.EFD_NONBLOCK)
    yield made
    os.close(made)


def test_what_is_there_is_found_without_sleeping() -> None:
    epoll = CountingEpoll(ready_after=1)
    assert poller(epoll).wait(-1) == [(7, select.EPOLLIN)]
    assert (epoll.looks, epoll.sleeps) == (1, 0)


def test_what_comes_soon_is_found_without_sleeping() -> None:
    def finds() -> bool:
        epoll = CountingEpoll(ready_after=3)
        return poller(epoll).wait(-1) != [] and epoll.sleeps == 0

    assert any(finds() for _ in range(1000))


def test_polling_ends_after_a_bounded_time_in_sleep() -> None:
    epoll = CountingEpoll(ready_after=1 << 60)
    began = time.thread_time()
    assert poller(epoll).wait(5) == []
    assert time.thread_time() - began < 20 * DEFAULT_BUSY_POLL_SEC
    assert epoll.sleeps == 1


@pytest.mark.parametrize(("microseconds", "looks"), [(0, 0), (95, 95), (400, 400)])
def test_how_long_to_poll_can_be_chosen(microseconds: int, looks: int) -> None:
    epoll = CountingEpoll(ready_after=1 << 60)
    assert poller(epoll, microseconds * 1e-6, TickingClock()).wait(5) == []
    assert epoll.looks == pytest.approx(looks, abs=1)
    assert epoll.sleeps == 1


def test_what_quick_waits_leave_of_their_time_is_there_for_a_slow_one() -> None:
    epoll = CountingEpoll(ready_after=1)
    one = poller(epoll, 95e-6, TickingClock())
    for _ in range(20):
        one.wait(5)
    epoll.looks, epoll.ready_after = 0, 400
    assert one.wait(5)
    assert (epoll.looks, epoll.sleeps) == (400, 0)
    epoll.looks = 0
    assert one.wait(5) == []
    assert epoll.looks == pytest.approx(95 + 475 - 400, abs=3)
    epoll.looks = 0
    assert one.wait(5) == []
    assert (epoll.looks, epoll.sleeps) == (pytest.approx(95, abs=1), 2)


def test_a_trial_after_waits_that_slept_at_once_polls_for_what_they_left() -> None:
    epoll, clock = CountingEpoll(ready_after=1 << 60), TickingClock()
    one = poller(epoll, 95e-6, clock)
    for _ in range(5):
        one.wait(5)
    epoll.looks, clock.now = 0, 0.010
    for _ in range(10):
        one.wait(5)
    assert epoll.looks == 0
    clock.now = 0.020
    one.wait(5)
    assert epoll.looks == pytest.approx(475, abs=2)


def sleeps_of(waits: list[float], longest: float) -> tuple[list[int], list[int]]:
    """For each wait of so many seconds, how often it slept, and how often it looked."""
    clock = TickingClock()
    epoll = LateEpoll(clock)
    one = poller(epoll, 95e-6, clock, longest)
    sleeps, looks = [], []
    for seconds in waits:
        epoll.sleeps, epoll.looks, epoll.at = 0, 0, clock.now + seconds
        assert one.wait(5)
        sleeps.append(epoll.sleeps)
        looks.append(epoll.looks)
    return sleeps, looks


def test_what_usually_comes_after_the_first_polling_time_is_polled_for() -> None:
    sleeps, _ = sleeps_of([300e-6] * 40, longest=1e-3)
    assert sleeps == [1] * 4 + [0] * 36


def test_what_comes_later_than_is_worth_it_costs_no_more_than_with_nothing_learned() -> None:
    waits = [20e-3] * 200
    assert sleeps_of(waits, longest=1e-3) == sleeps_of(waits, longest=0.0)


def test_a_long_wait_after_many_short_ones_is_polled_for_no_longer_than_twice_their_time() -> None:
    sleeps, looks = sleeps_of([300e-6] * 40 + [0.5], longest=1e-3)
    assert sleeps[-1] == 1
    assert looks[-1] == pytest.approx(600, abs=5)


@given(
    delays=st.lists(st.integers(1, 1000), min_size=1, max_size=60),
    microseconds=st.integers(10, 1000),
)
def test_on_average_no_wait_polls_for_longer_than_chosen(
    delays: list[int], microseconds: int
) -> None:
    epoll = CountingEpoll(ready_after=1)
    one = poller(epoll, microseconds * 1e-6, TickingClock())
    total = 0
    for delay in delays:
        epoll.looks, epoll.ready_after = 0, delay
        one.wait(5)
        total += epoll.looks
        assert epoll.looks <= max(500, microseconds) + 2
    assert total <= (microseconds + 2) * len(delays)


@pytest.mark.interpreted
def test_both_readers_of_a_transport_poll_as_long_as_was_chosen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chosen: list[float] = []

    def make(epoll: select.epoll, max_events: int, seconds: float, usual: UsualWait) -> BusyPoller:
        chosen.append(seconds)
        return BusyPoller(epoll, max_events, seconds, usual)

    for module in (replies, requests):
        monkeypatch.setattr(module, "BusyPoller", make)
    settings = Settings(busy_poll_seconds=5e-4)
    with local_group("alone", transport=lambda: TensorWireTransport(settings)):
        assert chosen == [5e-4, 5e-4]


def test_after_many_times_in_vain_most_waits_sleep_at_once() -> None:
    epoll = CountingEpoll(ready_after=1 << 60)
    one = poller(epoll)
    for _ in range(50):
        one.wait(5)
    before = epoll.looks
    asleep_at_once = 0
    for _ in range(2000):
        looks = epoll.looks
        one.wait(5)
        asleep_at_once += epoll.looks == looks
    assert asleep_at_once > 1000
    assert epoll.sleeps == 2050
    assert epoll.looks >= before


def test_a_real_epoll_instance_sleeps_until_the_event(descriptor: int) -> None:
    with select.epoll() as epoll:
        epoll.register(descriptor, select.EPOLLIN)
        one = BusyPoller(epoll, 8, DEFAULT_BUSY_POLL_SEC, UsualWait(0.0))
        assert one.wait(0.001) == []
        os.eventfd_write(descriptor, 1)
        assert one.wait(-1) == [(descriptor, select.EPOLLIN)]
