"""The thread that runs a backward pass does all the pass's work on its worker.

Gradients that come back are delivered on threads that others depend on. The thread that
waits for the end of the pass has nothing else to do, and where the transport has it read
what arrives, nothing needs to be handed to another thread at all.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Generic, TypeVar

from rpc.executor import blocking
from rpc.futures import wait_in_usual_modes
from rpc.transports.base import Transport

R = TypeVar("R")

Work = Callable[[], None]


class Home(Generic[R]):
    """Has work done by the thread that made this, until there is a result.

    Args:
        transport: how that thread waits.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._thread = threading.get_ident()
        self._queue: SimpleQueue[Work | None] = SimpleQueue()
        self._taken: list[Work | None] = []
        self._results: list[R] = []

    def is_here(self) -> bool:
        """True if the calling thread is the one that does the work."""
        return threading.get_ident() == self._thread

    def leave(self, work: Work) -> None:
        """Leaves ``work`` to the thread."""
        self._queue.put(work)
        self._transport.wake()

    def close(self, result: R) -> None:
        """There is no more to do."""
        self._results.append(result)
        self._queue.put(None)
        self._transport.wake()

    def work(self) -> R:
        """Does what there is to do until the end; returns the result."""
        while (work := self._next()) is not None:
            work()
        return self._results[0]

    def _next(self) -> Work | None:
        if self._queue.empty():
            with blocking():
                wait_in_usual_modes(self._transport.wait, self._is_due, self._take)
        if not self._taken:
            self._take()
        return self._taken.pop()

    def _is_due(self) -> bool:
        return bool(self._taken) or not self._queue.empty()

    def _take(self) -> None:
        self._taken.append(self._queue.get())
