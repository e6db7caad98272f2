"""Runs handlers on threads, and sees to it that blocked handlers starve nobody.

Owns its threads and its queue; knows nothing of messages. At most ``limit``
handlers run at once, not counting those that are blocked: a handler that waits
for another call says so (:func:`blocking`) and another thread takes its place.
Waits that cannot be seen from here (a lock, a wait inside C++) are caught by a
monitor: while tasks are queued and none has finished for a few milliseconds,
it adds a thread, ever more slowly, so that every cycle of waiting handlers
dissolves in the end, and threads beyond the limit retire when they are done.

One rule keeps the queue from being forgotten: as long as it is not empty,
either a thread is on its way to it (``_coming``), or the limit is reached and
the monitor watches. A thread that arrives takes a task and, if there are more,
sends for the next thread. So short tasks are worked off by few threads that do
not fight for the interpreter lock, and long ones still get a thread each.
Whatever lowers the number of active threads or raises the limit ends with
:meth:`Executor._staff`.
"""

from __future__ import annotations

import atexit
import contextvars
import enum
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from contextlib import suppress

import torch

from rpc.runtime.current_thread import Place, current
from rpc.runtime.threads import Thread

Task = Callable[[], None]

_MANY = 1 << 30
STALL_SECONDS = 0.005
"""Seconds for which no task ends, while others wait, until one more thread serves them."""
_MONITOR_LINGER_CHECKS = 200
SECONDS_TO_END = 5.0
"""Seconds that a handler gets to end in when its worker closes in peace."""

_logger = logging.getLogger("rpc")


class _Role(enum.Enum):
    """The purpose of a thread of an executor."""

    HANDLER = "handler"
    MONITOR = "monitor"


class blocking:  # it is used like a function
    """Marks a stretch in which the running thread waits; free outside handlers."""

    __slots__ = ("_place",)

    def __enter__(self) -> None:
        place = None if current.waiting else current.place
        self._place = place
        if place is not None:
            place.enter_wait()
            current.waiting = True

    def __exit__(self, *_: object) -> None:
        place = self._place
        if place is not None:
            current.waiting = False
            place.leave_wait()


def _take_part() -> None:
    """Lets ``torch.set_num_threads`` hold on this thread, too.

    Each thread has a number of OpenMP threads of its own, which torch sets when it is
    asked for it; oneDNN's convolutions do not ask, and took all cores.
    """
    torch.get_num_threads()
    current.takes_part = True


def in_handler() -> bool:
    """True if the running thread runs a task of an executor."""
    return isinstance(current.place, Executor)


def is_replaced_while_waiting() -> bool:
    """True if what waits for the running thread goes on elsewhere while that waits."""
    return current.place is not None


def abandon(threads: Collection[threading.Thread], until: float) -> None:
    """Leaves threads to what they run; the end of the process waits for them.

    If the interpreter ends while one is in an operator of torch, that aborts the process.

    Args:
        threads: which.
        until: how long it waits, on the monotonic clock.
    """
    atexit.register(_let_end, tuple(threads), until)


def _let_end(threads: Collection[threading.Thread], until: float) -> None:
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))


def share_this_thread(place: Place) -> None:
    """The running thread will run several handlers in turns, as an event loop does.

    Args:
        place: is told when it waits.
    """
    current.is_shared = True
    current.place = place


def is_shared_thread() -> bool:
    """True if other handlers could not go on while the running thread waits."""
    return current.is_shared


class Executor:
    """A pool of handler threads.

    A task should not raise; what it raises is logged, and the thread goes on.

    Args:
        name: prefix of the threads' names.
        limit: how many tasks may run at once, not counting blocked ones; at least 1.
        context: each task runs in a copy of it.
        short: told when a thread could not be started; :meth:`try_again` then, later.
        stall_seconds: see ``STALL_SECONDS``; may be set later, too.
    """

    def __init__(
        self,
        name: str,
        limit: int,
        context: contextvars.Context,
        short: Callable[[Executor], None] | None = None,
        stall_seconds: float = STALL_SECONDS,
    ) -> None:
        self.stall_seconds = stall_seconds
        self._name = name
        self._limit = limit
        self._context = context
        self._short = short
        self._lock = threading.Lock()
        self._all_started = threading.Condition(self._lock)
        self._queue: deque[Task] = deque()
        self._threads: list[threading.Thread] = []
        self._starting = 0
        self._size = 0
        self._idle: list[threading.Lock] = []  # one to wake each idle thread, latest last
        self._coming = 0
        self._guests = 0
        self.waiting = 0
        self._extra = 0
        self._busy = 0
        self._finished = 0
        self._closed = False
        self._monitored = False
        self._stop_monitor = threading.Event()

    def submit(self, task: Task) -> bool:
        """Queues a task; False, and the task is dropped, after :meth:`close`."""
        with self._lock:
            if self._closed:
                return False
            self._queue.append(task)
            self._busy += 1
            missing = self._staff()
        self._start(missing)
        return True

    def run_here(self, task: Task, guests: int = _MANY) -> bool:
        """Runs a task on the calling thread if the limit allows, else queues it.

        Args:
            task: what to run.
            guests: how many tasks may run on threads that are not this executor's.

        Returns:
            False, and the task is dropped, after :meth:`close`.
        """
        with self._lock:
            # As ``_active`` and ``_allowed`` say; every request comes here.
            active = self._size + self._guests - len(self._idle) - self.waiting
            admitted = (
                self._guests < guests and not self._closed and active < self._limit + self._extra
            )
            if admitted:
                self._guests += 1
                self._busy += 1
        if not admitted:
            return self.submit(task)
        if not current.takes_part:
            _take_part()
        previous = current.place, current.waiting
        current.place, current.waiting = self, False
        try:
            self._context.copy().run(task)
        except BaseException:
            self._log_failure()
        finally:
            current.place, current.waiting = previous
            missing = None
            with self._lock:
                self._guests -= 1
                if self._extra or self._queue:
                    self._task_ended()
                    missing = self._staff()
                else:
                    self._busy -= 1
                    self._finished += 1
            if missing is not None:
                self._start(missing)
        return True

    def enter_wait(self) -> None:
        """See :class:`Place`."""
        with self._lock:
            self.waiting += 1
            missing = self._staff()
        self._start(missing)

    def leave_wait(self) -> None:
        """See :class:`Place`."""
        with self._lock:
            self.waiting -= 1

    def try_again(self) -> None:
        """Starts the thread that could not be started, if it is still needed."""
        with self._lock:
            missing = self._staff()
        self._start(missing)

    def busy(self) -> int:
        """Tasks queued or running."""
        with self._lock:
            return self._busy

    def thread_count(self) -> int:
        """Handler threads that exist now."""
        with self._lock:
            return self._size

    def close(self, seconds: float = SECONDS_TO_END) -> list[Task]:
        """Lets running tasks end and joins every thread but the caller's.

        Args:
            seconds: how long to wait; tasks that run on are named in the log and abandoned.

        Returns:
            The tasks that were queued; they will not run.
        """
        with self._lock:
            self._closed = True
            dropped = [*self._queue]
            self._queue.clear()
            self._busy -= len(dropped)
            self._coming += len(self._idle)
            for wake_up in self._idle:
                wake_up.release()
            self._idle.clear()
            while self._starting:
                self._all_started.wait()
            threads = [*self._threads]
        self._stop_monitor.set()
        began = time.monotonic()
        others = [t for t in threads if t is not threading.current_thread()]
        _let_end(others, began + seconds)
        stuck = [thread for thread in others if thread.is_alive()]
        if stuck:
            _logger.error("%s: %d handlers do not end, and are abandoned", self._name, len(stuck))
            abandon(stuck, began + SECONDS_TO_END)
        return dropped

    # --- Decisions; all with the lock held

    def _active(self) -> int:
        return self._size + self._guests - len(self._idle) - self.waiting

    def _allowed(self) -> int:
        return self._limit + self._extra

    def _staff(self) -> _Role | None:
        """Restores the rule above by one thread; one to be started is returned for ``_start``."""
        if self._coming or not self._queue or self._closed:
            return None
        if self._active() >= self._allowed():
            return self._reserve_monitor()
        self._coming += 1
        if self._idle:
            self._idle.pop().release()
            return None
        self._size += 1
        self._starting += 1
        return _Role.HANDLER

    def _reserve_monitor(self) -> _Role | None:
        if self._monitored:
            return None
        self._monitored = True
        self._starting += 1
        return _Role.MONITOR

    def _not_started(self, role: _Role) -> None:
        if role is _Role.HANDLER:
            self._size -= 1
            self._coming -= 1
        else:
            self._monitored = False

    def _task_ended(self) -> None:
        self._busy -= 1
        self._finished += 1
        if self._extra and not self._queue:
            self._extra = 0

    # --- Threads

    def _start(self, role: _Role | None) -> None:
        """Starts the thread that ``_staff`` asked for; without the lock, as starting waits."""
        if role is None:
            return
        target = self._serve if role is _Role.HANDLER else self._watch
        thread = Thread(target=target, name=f"{self._name}-{role.value}", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            _logger.exception("%s cannot start a %s thread", self._name, role.value)
        with self._lock:
            if thread.ident is None:
                self._not_started(role)
            else:
                self._threads = [t for t in self._threads if t.is_alive()] + [thread]
            self._starting -= 1
            self._all_started.notify_all()
        if thread.ident is None and self._short is not None:
            self._short(self)

    def _serve(self) -> None:
        current.place = self
        _take_part()
        wake_up = threading.Lock()
        wake_up.acquire()
        with self._lock:
            self._coming -= 1
        while (task := self._take(wake_up)) is not None:
            self._run(task)
            del task
            with self._lock:
                self._task_ended()
        with self._lock:
            missing = self._staff()
        self._start(missing)

    def _take(self, wake_up: threading.Lock) -> Task | None:
        """The next task, waited for with ``wake_up``; None when this thread should end."""
        while True:
            task = missing = None
            with self._lock:
                if self._closed or self._active() > self._allowed():
                    self._size -= 1
                    return None
                if self._queue:
                    task = self._queue.popleft()
                    missing = self._staff()
                elif len(self._idle) >= self._limit:
                    self._size -= 1
                    return None
                else:
                    self._idle.append(wake_up)
            if task is not None:
                self._start(missing)
                return task
            wake_up.acquire()
            with self._lock:
                self._coming -= 1

    def _run(self, task: Task) -> None:
        """Raises nothing, whatever the task does."""
        try:
            self._context.copy().run(task)
        except BaseException:
            self._log_failure()

    def _log_failure(self) -> None:
        with suppress(BaseException):  # where the log goes may be broken, too
            _logger.exception("a task on %s raised an error that nobody handles", self._name)

    def _watch(self) -> None:
        """Adds a thread whenever the queue stands still; ends after a quiet second."""
        seen = -1
        stalls = quiet = 0
        while not self._stop_monitor.wait(self.stall_seconds * (1 + stalls)):
            missing = None
            with self._lock:
                if not self._queue:
                    stalls, quiet = 0, quiet + 1
                elif self._finished == seen:
                    stalls, quiet = stalls + 1, 0
                    self._extra = max(self._extra, self._active() + 1 - self._limit)
                    missing = self._staff()
                seen = self._finished
                if quiet > _MONITOR_LINGER_CHECKS:
                    self._monitored = False
                    return
            self._start(missing)
