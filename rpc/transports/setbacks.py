"""When to try again what failed for want of something that may be there later."""

from __future__ import annotations

import errno
import math
import time
from collections.abc import Callable

FIRST_PAUSE_SECONDS = 1.0
LONGEST_PAUSE_SECONDS = 32.0
_PASSING = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})


class Setbacks:
    """The failures of one thing that is tried at times. Not thread-safe.

    Args:
        clock: tells the time in seconds.

    Attributes:
        is_final: it failed for a reason that does not pass.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._pause = FIRST_PAUSE_SECONDS
        self._not_before = -math.inf
        self._told = False
        self.is_final = False

    def may_try(self) -> bool:
        """Whether it may be tried now."""
        return not self.is_final and self._clock() >= self._not_before

    def failed(self, error: int) -> str:
        """It did not work. After what may pass there is a pause, which doubles.

        Args:
            error: why not, as the system's number; 0 if there is none.

        Returns:
            How long it is done without, for the log; empty if that was said before.
        """
        self.is_final = error not in _PASSING
        self._not_before = self._clock() + self._pause
        self._pause = min(2 * self._pause, LONGEST_PAUSE_SECONDS)
        if self._told and not self.is_final:
            return ""
        self._told = True
        return "from now on" if self.is_final else "for now"

    def worked(self) -> None:
        """It did, so the next pause is a short one."""
        self._pause = FIRST_PAUSE_SECONDS
