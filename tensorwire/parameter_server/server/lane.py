"""Has one thread at a time work on a shard, in order; a thread that brings work does what waits.

So no work waits for a thread to wake, and the order in which decisions were made is the order in
which the state changes.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

T = TypeVar("T")


class Lane(Generic[T]):
    """The work of one shard.

    Args:
        work: does one thing; must not raise.
    """

    def __init__(self, work: Callable[[T], None]) -> None:
        self.state_lock = threading.Lock()
        """The work holds it while it uses the state; hold it to look at the state between."""
        self._work = work
        self._lock = threading.Lock()
        self._queue: deque[T] = deque()
        self._busy = False

    def put(self, things: Iterable[T]) -> None:
        """Queues work; call :meth:`run` afterwards, without any lock."""
        with self._lock:
            self._queue.extend(things)

    def run(self) -> None:
        """Does all that is queued, unless another thread is doing so."""
        while batch := self._take():
            try:
                for thing in batch:
                    self._work(thing)
            finally:
                with self._lock:
                    self._busy = False

    def _take(self) -> list[T]:
        with self._lock:
            if self._busy or not self._queue:
                return []
            self._busy = True
            batch = list(self._queue)
            self._queue.clear()
            return batch
