"""Time as an agent sees it: the machine's, or one that only moves when a test says so."""

from __future__ import annotations

import threading
import time
from typing import Protocol


class Clock(Protocol):
    """Tells the time in seconds and waits for it to pass."""

    def now(self) -> float:
        """Seconds on a clock that never goes back."""

    def wait(self, woken: threading.Event, deadline: float | None) -> None:
        """Returns when ``woken`` is set, or when the clock reaches ``deadline``."""


class MonotonicClock:
    """The machine's monotonic clock."""

    def now(self) -> float:
        """Seconds since some point in the past."""
        return time.monotonic()

    def wait(self, woken: threading.Event, deadline: float | None) -> None:
        """Returns when ``woken`` is set, or when the clock reaches ``deadline``."""
        woken.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))


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
        self._sleepers: set[threading.Event] = set()

    def now(self) -> float:
        """Virtual seconds since the clock was made."""
        with self._lock:
            return self._now

    def wait(self, woken: threading.Event, deadline: float | None) -> None:
        """Returns when ``woken`` is set, or when the clock reaches ``deadline``."""
        with self._lock:
            if deadline is not None and self._now >= deadline:
                return
            self._sleepers.add(woken)
        woken.wait()
        with self._lock:
            self._sleepers.discard(woken)

    def advance(self, seconds: float) -> None:
        """Moves time forward and wakes whoever sleeps on this clock."""
        with self._lock:
            self._now += seconds
            sleepers = list(self._sleepers)
        for sleeper in sleepers:
            sleeper.set()
