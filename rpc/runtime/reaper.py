"""Takes handles that were garbage collected off the thread they died on.

A finalizer may run anywhere, even inside a lock of ours: it only puts the
handle on a queue that is safe to use there. One thread empties the queue,
many handles at a time. So with what else a finalizer wants done.
"""

from __future__ import annotations

import logging
import queue
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from rpc.runtime.threads import Thread

_logger = logging.getLogger("rpc")

T = TypeVar("T")

LINGER_SECONDS = 0.01


@dataclass(frozen=True, slots=True)
class _Task:
    """Something else to do."""

    task: Callable[[], object]


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
        self._queue: queue.SimpleQueue[T | _Task | None] = queue.SimpleQueue()
        self._stopping = False
        self._stop_early: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._unburied: deque[None] = deque()  # one entry each; counts without a lock
        self._thread = Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def put(self, dead: T) -> None:
        """Queues a dead handle; safe in finalizers."""
        self._unburied.append(None)
        self._queue.put(dead)

    def call(self, task: Callable[[], object]) -> None:
        """Queues something else to do, which must not block; safe in finalizers."""
        self._unburied.append(None)
        self._queue.put(_Task(task))

    def quiet(self) -> bool:
        """True if everything queued so far was dealt with."""
        return not self._unburied

    def stop(self) -> None:
        """Ends the thread and joins it; handles are left, what finalizers wanted is done."""
        self._stopping = True
        self._stop_early.put(None)
        self._queue.put(None)
        if self._thread.is_alive():
            self._thread.join()
        self._do(self._take_all())

    def _run(self) -> None:
        while (first := self._queue.get()) is not None:
            try:  # noqa: SIM105 - it would be three functions of Python's for each batch
                self._stop_early.get(timeout=self._linger)
            except queue.Empty:
                pass
            batch = [first, *self._take_all()]
            del first
            self._bury([dead for dead in batch if not isinstance(dead, _Task)])
            self._do(batch)
            count = len(batch)
            del batch
            for _ in range(count):
                self._unburied.popleft()
            self._buried()
            if self._stopping:
                return

    def _take_all(self) -> list[T | _Task]:
        taken = []
        while not self._queue.empty():
            if (each := self._queue.get()) is not None:
                taken.append(each)
        return taken

    def _do(self, batch: list[T | _Task]) -> None:
        for each in batch:
            if isinstance(each, _Task):
                try:
                    each.task()
                except Exception:
                    _logger.exception("what a finalizer had asked for failed")
