"""Decides under a lock, and makes calls only once it is released."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager


class Outbox:
    """A list of calls to make once a lock is released.

    Args:
        lock: may be taken again by the thread that holds it.
    """

    def __init__(self, lock: AbstractContextManager[object]) -> None:
        self._lock = lock
        self._depth = 0
        self._waiting: list[Callable[[], object]] = []

    @contextmanager
    def acting(self) -> Iterator[None]:
        """Holds the lock; what was queued by :meth:`later` is done after it is released."""
        with self._lock:
            self._depth += 1
            try:
                yield
            finally:
                self._depth -= 1
                out: list[Callable[[], object]] = []
                if not self._depth:
                    out, self._waiting = self._waiting, out
        for each in out:
            each()

    def later(self, what: Callable[[], object]) -> None:
        """Does something without the lock, soon; call it with the lock held."""
        self._waiting.append(what)
