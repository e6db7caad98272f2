"""The place that the running thread serves as it runs handlers, and whether it waits."""

from __future__ import annotations

import threading
from typing import Protocol


class Place(Protocol):
    """A place where handlers run; it has others go on elsewhere while one of them waits."""

    def enter_wait(self) -> None:
        """Notes that the running thread, which serves this place, begins to wait."""

    def leave_wait(self) -> None:
        """Notes that it has waited."""


class _CurrentThread(threading.local):
    """The place that the running thread serves, if any, and whether it waits."""

    place: Place | None = None
    waiting: bool = False
    is_shared: bool = False
    """True if it runs several handlers in turns."""
    takes_part: bool = False
    """True if it knows how many threads torch may use for one operation."""


current = _CurrentThread()
