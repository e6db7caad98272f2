"""Takes handles that were garbage collected off the thread they died on.

A finalizer may run anywhere, even inside a lock of ours: it only puts the
handle on a queue that is safe to use there. One thread empties the queue,
many handles at a time.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")

LINGER_SECONDS = 0.01


class Reaper(Generic[T]):
    """Collects dead handles and hands them to ``bury`` in batches.

    Args:
        name: of the thread.
        bury: takes a batch.
        buried: is told after each batch, when :meth:`quiet` may have become true.
        linger: seconds for which a batch is collected.
    """

    def __init__(
        self,
        name: str,
        bury: Callable[[list[T]], None],
        buried: Callable[[], None],
        linger: float = LINGER_SECONDS,
    ) -> None:
        self._bury = bury
        self._buried = buried
        self._linger = linger
        self._queue: queue.SimpleQueue[T | None] = queue.SimpleQueue()
        self._stopping = threading.Event()
        self._unburied: deque[None] = deque()  # one entry each; counts without a lock
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def put(self, dead: T) -> None:
        """Queues a dead handle; safe in finalizers."""
        self._unburied.append(None)
        self._queue.put(dead)

    def quiet(self) -> bool:
        """True if every handle queued so far was buried."""
        return not self._unburied

    def stop(self) -> None:
        """Ends the thread and joins it."""
        self._stopping.set()
        self._queue.put(None)
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while (first := self._queue.get()) is not None:
            self._stopping.wait(self._linger)
            batch = [first]
            del first
            while not self._queue.empty():
                dead = self._queue.get()
                if dead is None:
                    return
                batch.append(dead)
                del dead
            count = len(batch)
            self._bury(batch)
            del batch
            for _ in range(count):
                self._unburied.popleft()
            self._buried()
