"""Things to do at a time on an agent's clock. Owns the order; the pulse does them."""

from __future__ import annotations

import heapq
import itertools
import threading
from collections.abc import Callable

Task = Callable[[], None]


class Timers:
    """Tasks with the time at which each is due.

    Args:
        wake: makes :meth:`beat` run soon.
        submit: runs a task on a thread that it may block.
    """

    def __init__(self, wake: Callable[[], None], submit: Callable[[Task], None]) -> None:
        self._wake = wake
        self._submit = submit
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._due: list[tuple[float, int, Task]] = []

    def at(self, when: float, task: Task) -> None:
        """Runs ``task`` at ``when``, in seconds on the agent's clock."""
        with self._lock:
            heapq.heappush(self._due, (when, next(self._numbers), task))
        self._wake()

    def beat(self, now: float) -> float | None:
        """Submits what is due; returns when the next is."""
        due: list[Task] = []
        with self._lock:
            while self._due and self._due[0][0] <= now:
                due.append(heapq.heappop(self._due)[2])
            following = self._due[0][0] if self._due else None
        for task in due:
            self._submit(task)
        return following

    def drop(self) -> None:
        """Forgets what is not due yet."""
        with self._lock:
            self._due.clear()
