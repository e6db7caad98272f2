"""Decides whether to poll again and again before sleeping: only while that pays.

Waking a sleeping thread costs tens of microseconds where the processor has gone idle, several
times as much as the whole exchange takes while both ends poll. But where the other end cannot
run meanwhile, or takes longer anyway, polling is wasted. So a thread polls for a bounded time,
and only while that succeeds often enough. As it takes both ends, those that have given up try
again at the same times, told by the clock that all processes of a host share.

Measured on two cores, empty ping-pong over a Unix socket: 7 µs when both ends poll, 33-60 µs
when one or none does; 11 µs without, 34 µs with it, when the scheduler has put both ends on
one core.

How long, by default: until the answer to a short handler is there. Where a wake-up costs 20 µs,
a call with two small tensors took 189 µs when both ends gave up after 50 µs, and 69 µs when
after 95 µs; two to eight callers at once gained a fifth. What takes longer to copy is announced
shortly before it comes (``link``), and polled for anew. An end that was heard of within the time
for which it polls is not told, which spares an echo of 64 KB 5 %.

While both ends poll, answers come soon and are found that way; once one end slept, it answers
late, so that the other gives up, sleeps, and answers late itself. So a wait that ends early, or
sleeps at once, leaves its time to later ones, and one longer poll brings both ends back. By
this, on average no wait polls for longer than it may; the small tensors above took half the time
on a machine that others disturb, `remote` a quarter less.

A step of autograd waits for longer than that each time, at both ends. How long such waits usually
take is learned (``UsualWait``), and polled for while it holds.

With more processes than cores nobody polls but for a trial now and then (``core_contention``):
callers that do would keep the worker that should answer them from running.

A program whose workers have cores of their own may choose longer. A thread that slept finds the
processor's caches and predictors cold, however short its sleep: 45 µs of torch's operators took
73 µs after a sleep of 20 µs, and 45 µs after polling for as long. A step of autograd, four
pieces of work in turn of some 200 µs each, took 1340 µs at up to 250 µs, which is shorter than a
piece that begins cold, and 840 µs from 400 µs on, for a seventh more of processor time. Sleeping
until shortly before the answer is expected gained nothing: it ends as cold.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable
from typing import Final

from rpc.transports.tensorwire.core_contention import Contention, ThreadTimes, thread_times

_MOST_CREDIT = 16
_PRICE_OF_FAILURE = 4
_TRIAL_EVERY_SECONDS = 0.02
_TRIAL_SECONDS = 0.001
_WAITS_SAVED = 4
_LONGEST_SECONDS = 0.0005

PRICE: Final = 4
"""For each long wait that is polled for in vain, at least as many ended in time."""
_MOST_CONFIDENCE: Final = 16
_MARGIN: Final = 2.0
"""The polling time, in usual waits."""
_FALL: Final = 0.125
"""The share by which the usual wait falls towards a shorter one; to a longer one it jumps."""

_give_way = os.sched_yield


class UsualWait:
    """The usual length of the waits that outlast the first polling time.

    An adaptive mutex spins for as long as its lock was held lately. Likewise, a thread here goes
    on polling if most of the waits that outlasted the first polling time ended soon after.
    Sleeping costs both ends a wake-up, and what a thread does next takes longer in cold caches.
    How long a wait took is known even if the thread slept, so polling begins where it would have
    succeeded, and needs no trial.

    Waits that end within the first polling time say nothing about longer ones, and aren't
    counted. A wait that takes longer than ``longest`` costs as much confidence as four shorter
    ones earn. So a worker to which nothing comes, or comes rarely, polls as if there was nothing
    to learn. Sans-IO.

    Args:
        longest: seconds; no wait is polled for any longer because of what was learned.

    Attributes:
        seconds: to poll in all; 0.0 while polling on isn't worth it.
    """

    __slots__ = ("_confidence", "_longest", "_usual", "seconds")

    def __init__(self, longest: float) -> None:
        self._longest = longest
        self._usual = 0.0
        self._confidence = 0
        self.seconds = 0.0

    def ended(self, waited: float) -> None:
        """Takes a wait that outlasted the first polling time.

        Args:
            waited: the seconds until something came, or the wait was given up, sleep included.
        """
        if waited > self._longest:
            self._confidence = max(self._confidence - PRICE, 0)
        else:
            self._confidence = min(self._confidence + 1, _MOST_CONFIDENCE)
            fallen = self._usual + (waited - self._usual) * _FALL
            self._usual = max(waited, fallen)
        worth_it = self._confidence >= PRICE
        self.seconds = min(_MARGIN * self._usual, self._longest) if worth_it else 0.0


class BusyPoller:
    """Waits on one epoll instance, for one thread at a time.

    Args:
        epoll: what to wait on.
        max_events: to return at once.
        seconds: to poll before sleeping, on average; 0 to sleep at once.
        usual: has learned how long to poll for what takes longer than that.
        clock: tells the time in seconds, the same to all processes of the host.
        times: what the kernel counted of the running thread, if it does.
    """

    def __init__(
        self,
        epoll: select.epoll,
        max_events: int,
        seconds: float,
        usual: UsualWait,
        clock: Callable[[], float] = time.perf_counter,
        times: Callable[[], ThreadTimes | None] = thread_times,
    ) -> None:
        self._poll = epoll.poll
        self._max_events = max_events
        self._seconds = seconds
        self._usual = usual
        self._clock = clock
        self._most_saved = max(0.0, min(_WAITS_SAVED * seconds, _LONGEST_SECONDS - seconds))
        self._saved = 0.0
        self._credit = _MOST_CREDIT
        self._times = times
        self._contention = Contention()

    def wait(self, timeout: float) -> list[tuple[int, int]]:
        """Returns the events that are there, or come within ``timeout`` seconds (-1: some time)."""
        poll = self._poll
        if not self._seconds:
            return poll(timeout, self._max_events)
        clock = self._clock
        now = clock()
        contention = self._contention
        if now >= contention.look_at:
            contention.looked(now, self._times())
        if now < contention.paused_until:
            return poll(timeout, self._max_events)
        usual = self._usual
        if self._credit <= 0 and not usual.seconds and now % _TRIAL_EVERY_SECONDS > _TRIAL_SECONDS:
            self._saved = min(self._saved + self._seconds, self._most_saved)
            return self._sleep(timeout, now)
        began = now
        own_end = end = now + self._seconds + self._saved
        if now + usual.seconds > end:
            end = now + usual.seconds
        while True:
            events = poll(0, self._max_events)
            if events:
                self._credit = min(self._credit + 1, _MOST_CREDIT)
                self._saved = min(max(own_end - now, 0.0), self._most_saved)
                if now - began > self._seconds:
                    usual.ended(now - began)
                return events
            _give_way()
            now = clock()
            if now > end:
                self._credit = max(self._credit - _PRICE_OF_FAILURE, 0)
                self._saved = 0.0
                return self._sleep(timeout, began)

    def _sleep(self, timeout: float, began: float) -> list[tuple[int, int]]:
        """Sleeps until something comes; notes how long the wait has taken since it began."""
        events = self._poll(timeout, self._max_events)
        self._usual.ended(self._clock() - began)
        return events
