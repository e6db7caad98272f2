"""Time as an agent sees it: the machine's, or one that only moves when a test says so."""

from __future__ import annotations

import threading
import time
from typing import Protocol


class Alarm:
    """Wakes the one thread that waits for it; can be set anywhere, even in a finalizer.

    A ``threading.Event`` cannot: when the garbage collector runs in the middle of
    one of its methods, and a finalizer on the same thread sets the same event,
    the thread waits for itself.
    """

    __slots__ = ("unset",)

    def __init__(self) -> None:
        self.unset = threading.Lock()
        self.unset.acquire()

    def set(self) -> None:
        """Ends the current or the next wait."""
        try:
            self.unset.release()
        except RuntimeError:  # it is set already
            return

    def wait(self, seconds: float | None) -> None:
        """Returns when set, which ends being set, or when the time is over; None is forever."""
        limit = threading.TIMEOUT_MAX
        self.unset.acquire(timeout=-1 if seconds is None else min(max(seconds, 0.0), limit))


class Clock(Protocol):
    """Tells the time in seconds and waits for it to pass."""

    def now(self) -> float:
        """Seconds on a clock that never goes back."""

    def wait(self, alarm: Alarm, deadline: float | None) -> None:
        """Returns when ``alarm`` is set, or when the clock reaches ``deadline``."""


class MonotonicClock:
    """The machine's monotonic clock."""

    now = staticmethod(time.monotonic)

    def wait(self, alarm: Alarm, deadline: float | None) -> None:
        """Returns when ``alarm`` is set, or when the clock reaches ``deadline``."""
        alarm.wait(None if deadline is None else deadline - time.monotonic())


class VirtualClock:
    """A clock that stands still until :meth:`advance` moves it.

    Several agents may share one. Example::

        clock = VirtualClock()
        future = agent.rpc_async("peer", slow, timeout=5)
        clock.advance(5.1)  # the call has now timed out, in no time
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._now = 0.0
        self._sleepers: dict[Alarm, float] = {}

    def now(self) -> float:
        """Virtual seconds since the clock was made."""
        with self._lock:
            return self._now

    def wait(self, alarm: Alarm, deadline: float | None) -> None:
        """Returns when ``alarm`` is set, or when the clock reaches ``deadline``."""
        with self._lock:
            if deadline is not None and self._now >= deadline:
                return
            if deadline is not None:
                self._sleepers[alarm] = deadline
        alarm.wait(None)
        with self._lock:
            self._sleepers.pop(alarm, None)

    def advance(self, seconds: float) -> None:
        """Moves time forward and wakes whoever slept until then.

        Raises:
            ValueError: ``seconds`` is negative.
        """
        if not seconds >= 0:
            raise ValueError(f"time does not go back, not even by {-seconds} seconds")
        with self._lock:
            self._now += seconds
            for alarm, deadline in self._sleepers.items():
                if deadline <= self._now:
                    alarm.set()
