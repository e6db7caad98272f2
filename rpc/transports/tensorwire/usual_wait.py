"""Learns how long to poll for what has not come within the first polling time.

An adaptive mutex spins for as long as its lock was held lately. Likewise, a thread here goes on
polling if most of the waits that outlasted the first polling time ended soon after. Sleeping
costs both ends a wake-up, and what a thread does next takes longer in cold caches. How long a
wait took is known even if the thread slept, so polling begins where it would have succeeded,
and needs no trial.

Waits that end within the first polling time say nothing about longer ones, and aren't counted.
A wait that takes longer than ``longest`` costs as much confidence as four shorter ones earn.
So a worker to which nothing comes, or comes rarely, polls as if there was nothing to learn.
Sans-IO.
"""

from __future__ import annotations

from typing import Final

PRICE: Final = 4
"""For each long wait that is polled for in vain, at least as many ended in time."""
_MOST_CONFIDENCE: Final = 16
_MARGIN: Final = 2.0
"""The polling time, in usual waits."""
_FALL: Final = 0.125
"""The share by which the usual wait falls towards a shorter one; to a longer one it jumps."""


class UsualWait:
    """The usual length of the waits that outlast the first polling time.

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
