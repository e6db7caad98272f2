"""Decides when to try again what failed, as the system was short of something, and what to log."""

from __future__ import annotations

import errno
import math
import time
from collections.abc import Callable

FIRST_PAUSE_SECONDS = 1.0
LONGEST_PAUSE_SECONDS = 32.0
_PASSING = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})


def number_of(error: BaseException) -> int:
    """The system's number of an error; 0 if it has none."""
    return getattr(error, "errno", None) or 0


class Refusals:
    """Reasons why what a peer offers cannot be taken; each is logged once."""

    def __init__(self) -> None:
        self._told: set[tuple[int, int]] = set()

    def note(self, error: BaseException, of: int = 0) -> tuple[int, bool]:
        """The number of a reason, for the answer, and whether it is to be told.

        Args:
            error: the reason.
            of: which of the peer's things was offered, if each has its own.
        """
        number = number_of(error)
        is_new = (of, number) not in self._told
        self._told.add((of, number))
        return number, is_new


class Backoff:
    """Pauses between the attempts at one thing. Not thread-safe.

    Args:
        clock: tells the time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._pause = FIRST_PAUSE_SECONDS
        self._not_before = -math.inf
        self._told = False
        self._is_final = False

    def may_try(self) -> bool:
        """Returns whether it may be tried now."""
        return not self._is_final and self._clock() >= self._not_before

    def failed(self, error: int) -> str:
        """Notes a failure. After what may pass there is a pause, which doubles.

        Args:
            error: why not, as the system's number; 0 if there is none.

        Returns:
            How long it is done without, for the log; empty if that was said before.
        """
        self._is_final = error not in _PASSING
        self._not_before = self._clock() + self._pause
        self._pause = min(2 * self._pause, LONGEST_PAUSE_SECONDS)
        if self._told and not self._is_final:
            return ""
        self._told = True
        return "from now on" if self._is_final else "for now"

    def worked(self) -> None:
        """Notes a success, so that the next pause is a short one."""
        self._pause = FIRST_PAUSE_SECONDS
