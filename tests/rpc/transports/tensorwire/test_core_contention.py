"""A thread that polls stops while others wait for its core, and tries again ever more rarely."""

from __future__ import annotations

import select
from itertools import pairwise

import pytest

from rpc.transports.tensorwire.busy_polling import BusyPoller, UsualWait
from rpc.transports.tensorwire.core_contention import Contention, ThreadTimes, thread_times
from tests.waiting import until

MILLISECOND = 1_000_000


class Kernel:
    """A kernel in which every thread that polls waits for a core for a share of the time."""

    def __init__(self, share: float) -> None:
        self.share = share
        self.now = 0.0
        self._since = 0.0
        self._ran = self._waited = 0.0

    def times(self) -> ThreadTimes:
        passed, self._since = (self.now - self._since) * 1e9, self.now
        self._ran += passed * (1 - self.share)
        self._waited += passed * self.share
        return ThreadTimes(1, round(self._ran), round(self._waited))

    def clock(self) -> float:
        self.now += 1e-6
        return self.now


class Epoll:
    """Has an event at every third look; counts looks, and the waits that slept at once."""

    def __init__(self) -> None:
        self.looks = self.sleeps = 0

    def poll(self, timeout: float, _: int) -> list[tuple[int, int]]:
        if timeout:
            self.sleeps += 1
        self.looks += not timeout
        return [(7, select.EPOLLIN)] if timeout or self.looks % 3 == 0 else []


def share_that_polled(kernel: Kernel, seconds: float) -> float:
    """The share of waits that polled, of those that a thread makes one after the other."""
    epoll, waits, usual = Epoll(), 0, UsualWait(1e-3)
    poller = BusyPoller(epoll, 8, 1e-4, usual, kernel.clock, kernel.times)  # type: ignore[arg-type]
    while kernel.now < seconds:
        poller.wait(-1)
        waits += 1
        kernel.now += 1e-4  # of work in between
    return 1 - epoll.sleeps / waits


@pytest.mark.parametrize(
    ("share", "least", "most"), [(0.0, 1.0, 1.0), (0.1, 1.0, 1.0), (1 / 3, 0.001, 0.02)]
)
def test_who_shares_its_core_polls_a_fiftieth_of_the_time(
    share: float, least: float, most: float
) -> None:
    assert least <= share_that_polled(Kernel(share), 10.0) <= most


def test_who_waits_for_its_core_most_of_the_time_makes_no_trials() -> None:
    assert share_that_polled(Kernel(0.6), 10.0) <= 0.001


def test_who_gets_its_core_back_polls_again_within_a_second() -> None:
    kernel, epoll, usual = Kernel(0.5), Epoll(), UsualWait(1e-3)
    poller = BusyPoller(epoll, 8, 1e-4, usual, kernel.clock, kernel.times)  # type: ignore[arg-type]

    def wait_until(end: float) -> None:
        while kernel.now < end:
            poller.wait(-1)
            kernel.now += 1e-4

    wait_until(5.0)
    kernel.share = 0.0
    wait_until(6.1)
    sleeps = epoll.sleeps
    wait_until(8.0)
    assert epoll.sleeps == sleeps


@pytest.mark.parametrize(
    "later",
    [
        None,
        ThreadTimes(2, 100 * MILLISECOND, 100 * MILLISECOND),
        ThreadTimes(1, MILLISECOND, 2 * MILLISECOND),
    ],
    ids=["nothing is counted", "of another thread", "too short a time"],
)
def test_what_says_nothing_pauses_nobody(later: ThreadTimes | None) -> None:
    contention = Contention()
    contention.looked(1.0, ThreadTimes(1, 0, 0))
    contention.looked(2.0, later)
    assert contention.paused_until == 0.0


def test_the_kernel_counts_what_this_thread_runs() -> None:
    before = thread_times()
    if before is None:
        pytest.skip("this kernel does not count how long threads wait for a core")
    read = [before]

    def more() -> bool:
        """True once the counter has moved: some kernels count only at a tick or a switch."""
        times = thread_times()
        assert times is not None
        read.append(times)
        return times.ran > before.ran

    until(more)
    assert all(earlier.ran <= later.ran for earlier, later in pairwise(read))
    assert all(earlier.waited <= later.waited for earlier, later in pairwise(read))
