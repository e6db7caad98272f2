"""Runs handlers on threads, and sees to it that blocked handlers starve nobody.

Owns its threads and its queue; knows nothing of messages. At most ``limit``
handlers run at once, not counting those that are blocked: a handler that waits
for another call says so (:func:`blocking`) and another thread takes its place.
Waits that cannot be seen from here (a lock, a wait inside C++) are caught by a
monitor: while tasks are queued and none has finished for a few milliseconds,
it adds a thread, ever more slowly, so that every cycle of waiting handlers
dissolves in the end, and threads beyond the limit retire when they are done.
"""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections import deque
from collections.abc import Callable, Iterator

Task = Callable[[], None]

_STALL_SECONDS = 0.005
_MONITOR_LINGER_CHECKS = 200


class _CurrentThread(threading.local):
    """Which executor, if any, the running thread works for."""

    executor: Executor | None = None


_current = _CurrentThread()


@contextlib.contextmanager
def blocking() -> Iterator[None]:
    """Marks a stretch in which the running thread waits; free outside handlers."""
    executor = _current.executor
    if executor is None:
        yield
        return
    executor._enter_wait()
    try:
        yield
    finally:
        executor._leave_wait()


def in_handler() -> bool:
    """True if the running thread is one of an executor's."""
    return _current.executor is not None


class Executor:
    """A pool of handler threads.

    Args:
        name: prefix of the threads' names.
        limit: how many tasks may run at once, not counting blocked ones; at least 1.
        context: each task runs in a copy of it.
    """

    def __init__(self, name: str, limit: int, context: contextvars.Context) -> None:
        self._name = name
        self._limit = limit
        self._context = context
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._queue: deque[Task] = deque()
        self._threads: set[threading.Thread] = set()
        self._idle = 0
        self._guests = 0
        self._waiting = 0
        self._extra = 0
        self._busy = 0
        self._finished = 0
        self._closed = False
        self._monitor: threading.Thread | None = None
        self._stop_monitor = threading.Event()

    def submit(self, task: Task) -> None:
        """Queues a task; tasks submitted after :meth:`close` are dropped."""
        with self._lock:
            if self._closed:
                return
            self._queue.append(task)
            self._busy += 1
            if len(self._queue) <= self._idle:
                self._work.notify()
            else:
                self._grow()

    def run_here(self, task: Task) -> None:
        """Runs a task on the calling thread if the limit allows, else queues it."""
        with self._lock:
            admitted = not self._closed and self._active() < self._allowed()
            if admitted:
                self._guests += 1
                self._busy += 1
        if not admitted:
            self.submit(task)
            return
        previous = _current.executor
        _current.executor = self
        try:
            self._context.copy().run(task)
        finally:
            _current.executor = previous
            with self._lock:
                self._guests -= 1
                self._retire_task()

    def busy(self) -> int:
        """Tasks queued or running."""
        with self._lock:
            return self._busy

    def thread_count(self) -> int:
        """Threads that exist now."""
        with self._lock:
            return len(self._threads)

    def close(self) -> None:
        """Drops queued tasks, lets running ones end, joins every thread but the caller's."""
        with self._lock:
            self._closed = True
            self._queue.clear()
            self._work.notify_all()
            threads = [*self._threads]
        self._stop_monitor.set()
        if self._monitor is not None:
            threads.append(self._monitor)
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join()

    def _active(self) -> int:
        return len(self._threads) + self._guests - self._idle - self._waiting

    def _allowed(self) -> int:
        return self._limit + self._extra

    def _grow(self) -> None:
        """Called with the lock held when a task is queued and no thread is idle."""
        if self._active() < self._allowed():
            thread = threading.Thread(target=self._serve, name=f"{self._name}-handler", daemon=True)
            self._threads.add(thread)
            thread.start()
        elif self._monitor is None:
            self._monitor = threading.Thread(
                target=self._watch, name=f"{self._name}-monitor", daemon=True
            )
            self._monitor.start()

    def _serve(self) -> None:
        _current.executor = self
        while (task := self._take()) is not None:
            self._context.copy().run(task)
            del task
            with self._lock:
                self._retire_task()

    def _take(self) -> Task | None:
        """The next task; None when this thread should end."""
        with self._lock:
            while not self._closed:
                if self._active() > self._allowed():
                    break
                if self._queue:
                    return self._queue.popleft()
                self._idle += 1
                self._work.wait()
                self._idle -= 1
            self._threads.discard(threading.current_thread())
            return None

    def _retire_task(self) -> None:
        self._busy -= 1
        self._finished += 1
        if self._extra and not self._queue:
            self._extra = 0

    def _enter_wait(self) -> None:
        with self._lock:
            self._waiting += 1
            if len(self._queue) > self._idle and not self._closed:
                self._grow()

    def _leave_wait(self) -> None:
        with self._lock:
            self._waiting -= 1

    def _watch(self) -> None:
        """Adds a thread whenever the queue stands still; ends after a quiet second."""
        seen = -1
        stalls = quiet = 0
        while not self._stop_monitor.wait(_STALL_SECONDS * (1 + stalls)):
            with self._lock:
                if self._closed:
                    return
                if not self._queue:
                    stalls, quiet = 0, quiet + 1
                    if quiet > _MONITOR_LINGER_CHECKS:
                        self._monitor = None
                        return
                    continue
                quiet = 0
                if self._finished == seen and not self._idle:
                    self._extra += 1
                    stalls += 1
                    self._grow()
                seen = self._finished
