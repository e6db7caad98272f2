"""Sees to it that no thread of ours is in one of torch's stores as the interpreter ends.

A store's requests give the interpreter lock away. A daemon thread that comes back from
one after the interpreter has ended is ended by Python in the middle of C++, which aborts
the process. So a thread that goes there again and again says when it does. Once the
program's own exit hooks have run it is waited for, and goes there no more. So is a thread
that nobody waits for any more, as its request took too long.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

SECONDS_TO_COME_BACK = 1.0
"""Seconds that an ending process waits for a thread that a store keeps, as its host is frozen."""


class ProcessEndsError(Exception):
    """Nobody may go to a store any more. Never leaves the package."""


class _Visit:
    """One thread's stay."""

    def __init__(self) -> None:
        self._visitor = threading.current_thread()
        self._staying = threading.Lock()
        self._staying.acquire()

    def end(self) -> None:
        self._staying.release()

    def await_end(self, until: float) -> None:
        if self._visitor.is_alive():  # in a forked child, its parent's are not
            self._staying.acquire(timeout=max(0.0, until - time.monotonic()))


class Visits:
    """The threads that are there. Changed in single steps, so without a lock."""

    def __init__(self) -> None:
        self._under_way: set[_Visit] = set()
        self._left_behind: set[threading.Thread] = set()
        self._over = False
        self._at_exit: weakref.finalize[[], Visits] | None = None

    @contextmanager
    def one(self) -> Iterator[None]:
        """Returns a context for a block of requests to a store.

        Raises:
            ProcessEndsError: none may be made any more.
        """
        self._be_told_of_the_end()
        visit = _Visit()
        self._under_way.add(visit)
        try:
            if self._over:
                raise ProcessEndsError
            yield
        finally:
            self._under_way.discard(visit)
            visit.end()

    def left_behind(self, visitor: threading.Thread) -> None:
        """Has the end wait for a thread that is there for a single time, and says nothing."""
        self._be_told_of_the_end()
        for thread in list(self._left_behind):
            if not thread.is_alive():
                self._left_behind.discard(thread)
        self._left_behind.add(visitor)

    def end(self, seconds: float = SECONDS_TO_COME_BACK) -> None:
        """Admits no more visits, and waits some ``seconds`` for those who are there."""
        self._over = True
        until = time.monotonic() + seconds
        for visit in list(self._under_way):
            visit.await_end(until)
        for thread in list(self._left_behind):
            thread.join(max(0.0, until - time.monotonic()))

    def _be_told_of_the_end(self) -> None:
        """By a finalizer: these run after the program's own exit hooks, which may shut down."""
        if self._at_exit is None:
            self._at_exit = weakref.finalize(self, self.end)


_of_this_process = Visits()

visit = _of_this_process.one
"""Context for a block of requests to a store; raises ``ProcessEndsError`` where none may be made.
"""

stays_behind = _of_this_process.left_behind
"""Has the end of this process wait for a thread that a store keeps, and nobody waits for."""
