"""Decides whether a thread may poll at all: not while others wait for its core.

A thread that polls takes a core. With more processes than cores, callers that poll keep the
worker that should answer them from running. The kernel counts how long each thread was ready to
run and had no core; a thread that polls on a core of its own hardly ever waits, and of three
that share two cores each waits a third of the time. Sans-IO, but for ``thread_times``.

Trials cost what polling costs, and every process makes its own: sixteen of 20 ms, after pauses
of 50 and 100 ms, are more than two cores have. So they are short, and a thread that waited for
its core most of the time although it did not poll makes none.
"""

from __future__ import annotations

import threading
from typing import Final, NamedTuple

_LOOK_EVERY_SECONDS: Final = 0.02
_TRIAL_SECONDS: Final = 0.005
_LEAST_NANOSECONDS: Final = 4_000_000
"""Time that a thread must have wanted a core before it is judged; less says little."""
_MOST_WAITED: Final = 0.2
"""The share of the time for which a thread wanted a core that it may wait for one."""
_MOST_WAITED_ASLEEP: Final = 0.5
"""The same share for a thread that sleeps whenever it can, and whose wake-ups count as waits."""
_FIRST_PAUSE_SECONDS: Final = 0.05
_LONGEST_PAUSE_SECONDS: Final = 0.5


class ThreadTimes(NamedTuple):
    """The kernel's counts of one thread so far.

    Args:
        thread: which one.
        ran: nanoseconds on a core.
        waited: nanoseconds for which it was ready to run, and had none.
    """

    thread: int
    ran: int
    waited: int


def thread_times() -> ThreadTimes | None:
    """The counts of the running thread; None where the kernel does not count."""
    try:
        with open("/proc/thread-self/schedstat", "rb", 0) as file:
            ran, waited, _ = file.read().split()
        return ThreadTimes(threading.get_ident(), int(ran), int(waited))
    except (OSError, ValueError):
        return None


class Contention:
    """Learns whether whoever polls has a core of its own.

    Pauses become longer while each trial between them finds the cores taken.

    Attributes:
        paused_until: nobody may poll before; in seconds, on the clock of :meth:`looked`.
        look_at: when to look again.
    """

    __slots__ = ("_last", "_pause", "look_at", "paused_until")

    def __init__(self) -> None:
        self.paused_until = 0.0
        self.look_at = 0.0
        self._pause = 0.0
        self._last: ThreadTimes | None = None

    def looked(self, now: float, times: ThreadTimes | None) -> None:
        """Takes what the kernel has counted of the thread that polls.

        Args:
            now: seconds on any steady clock.
            times: as of now.
        """
        last = self._last
        asleep = self.paused_until > 0.0
        if times is None or last is None or last.thread != times.thread:
            self._poll(now, times, _TRIAL_SECONDS)
            return
        waited = times.waited - last.waited
        wanted = times.ran - last.ran + waited
        if wanted < _LEAST_NANOSECONDS:
            self._poll(now, times if asleep else last, _TRIAL_SECONDS)
        elif waited > (_MOST_WAITED_ASLEEP if asleep else _MOST_WAITED) * wanted:
            self._pause = min(max(2 * self._pause, _FIRST_PAUSE_SECONDS), _LONGEST_PAUSE_SECONDS)
            self.look_at = self.paused_until = now + self._pause
            self._last = times
        elif asleep:
            self._poll(now, times, _TRIAL_SECONDS)
        else:
            self._pause = 0.0
            self._poll(now, times, _LOOK_EVERY_SECONDS)

    def _poll(self, now: float, since: ThreadTimes | None, seconds: float) -> None:
        """Lets it poll, and judges it after some time by what was counted since."""
        self.paused_until = 0.0
        self.look_at = now + seconds
        self._last = since
