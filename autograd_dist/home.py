"""The thread that runs a backward pass does all the pass's work on its worker.

Gradients that come back are delivered on threads that others depend on. The thread that
waits for the end of the pass has nothing else to do, and where the transport has it read
what arrives, nothing needs to be handed to another thread at all.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

from rpc.extend import Worker

R = TypeVar("R")

Work = Callable[[], None]


class Home(Generic[R]):
    """Has work done by the thread that made this, until there is a result.

    Args:
        worker: how that thread waits.

    Attributes:
        thread: the thread that does the work.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self.thread = threading.get_ident()
        self._work: deque[Work | None] = deque()
        self._woken: SimpleQueue[None] = SimpleQueue()
        self._results: list[R] = []

    def leave(self, work: Work) -> None:
        """Leaves ``work`` to the thread."""
        self._work.append(work)
        self._woken.put(None)
        if threading.get_ident() != self.thread:
            self._worker.wake()

    def close(self, result: R) -> None:
        """Ends the thread's work, as there is no more to do."""
        self._results.append(result)
        self._work.append(None)
        self._woken.put(None)
        if threading.get_ident() != self.thread:
            self._worker.wake()

    def work(self) -> R:
        """Does what there is to do until the end; returns the result."""
        is_due: Any = self._work.__len__
        while True:
            while not self._work:  # it may be woken for what it did already
                self._worker.wait(is_due, self._woken.get)
            work = self._work.popleft()
            if work is None:
                return self._results[0]
            work()
