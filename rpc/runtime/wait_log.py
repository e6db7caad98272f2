"""Decides when a wait says in the log what it waits for. No I/O, and no clock but one's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

FIRST: Final = (5.0, 10.0, 20.0, 40.0)
_EVERY: Final = 60.0


class WaitLog:
    """The moments at which one wait is told of.

    Args:
        began: the time, in seconds of any clock.
        first: seconds after that at which to tell of it. Default 5, 10, 20 and 40.
        every: seconds between later ones. Default 60.

    Example::

        log = WaitLog(time.monotonic())
        while not condition.wait(1):
            if log.is_due(time.monotonic()):
                logger.warning("waits for ...")
    """

    def __init__(self, began: float, first: Sequence[float] = (), every: float = _EVERY):
        self.began, self._first, self._every = began, first or FIRST, every
        self._told = 0

    def next_at(self) -> float:
        """The time at which to tell of it next."""
        last = len(self._first) - 1
        beyond = max(0, self._told - last)
        return self.began + self._first[min(self._told, last)] + beyond * self._every

    def is_due(self, now: float) -> bool:
        """True once for each of the moments, of which those that were missed count as one."""
        if now < self.next_at():
            return False
        while self.next_at() <= now:
            self._told += 1
        return True
