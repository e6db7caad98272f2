"""Runs one asyncio loop on several threads, of which one at a time has it.

A coroutine that waits in a blocking way (``rpc_sync``, ``wait``, ``to_here``) holds its
thread, but not the loop: that is handed to another thread until the wait is over, and then
handed back. So the others go on, as if the wait were an ``await``, and with them whatever
the coroutine waits for. As ever, no two of them run at the same time, and all belong to
one loop; where none blocks, one thread runs everything.

asyncio knows nothing of this, so three things of its own are looked after: which thread
runs the loop, which task is in a step, and how many callbacks the round that was left
counts on. What is to run in a ``Context`` that a waiting thread is in comes later: nobody
else can enter it. Loops that are not made as asyncio's are not handed on; they stand still.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from asyncio.tasks import _enter_task, _leave_task  # for who makes tasks, says asyncio
from collections import deque
from dataclasses import dataclass
from typing import Any

from rpc.runtime.executor import share_this_thread
from rpc.runtime.threads import Thread

_IDLE_KEPT = 1
_PAUSE = 0.001
"""Seconds until the callback of a file is tried again whose context a waiting thread is in.

The selector names the file at once as long as it is ready, and nothing tells when the context
is free; other callbacks come in between.
"""

_logger = logging.getLogger("rpc")


@dataclass(frozen=True, slots=True)
class _Left:
    """The state that a thread comes back to.

    Args:
        task: the one in a step, if it is not a mere callback that waits.
        callbacks: how many were there to be called, of which its round may want as many.
    """

    task: asyncio.Task[Any] | None
    callbacks: int


class _LoopState(threading.local):
    """The state that the running thread left."""

    left: _Left | None = None


def every_task(loop: asyncio.AbstractEventLoop) -> set[asyncio.Task[Any]]:
    """The tasks of a loop that have not ended, whichever thread made them; called by the loop.

    From Python 3.14 on ``asyncio.all_tasks`` tells the thread that runs a loop of those only
    that were made on it. It goes through all threads for one that does not.
    """
    running = asyncio._get_running_loop()
    asyncio._set_running_loop(None)
    try:
        return asyncio.all_tasks(loop)
    finally:
        asyncio._set_running_loop(running)


class HandedLoop:
    """The threads of one asyncio loop.

    Args:
        name: of the threads.
        loop: closed when the last of them ends.
    """

    def __init__(self, name: str, loop: asyncio.AbstractEventLoop) -> None:
        self._name = name
        self._loop = loop
        inside: Any = loop if isinstance(loop, asyncio.SelectorEventLoop) else None
        self._inside = inside
        self._lock = threading.Lock()
        self._is_held = False
        self._waiting = 0  # whoever has the loop has this and the next
        self._held_back: list[asyncio.Handle] = []
        if inside is not None:
            self._tell = inside.call_exception_handler
            inside.call_exception_handler = self._hold_back_or_tell
        self._returning: deque[threading.Lock] = deque()  # one to wake each that has waited
        self._idle: list[threading.Lock] = []  # likewise for each without anything to do
        self._threads: list[threading.Thread] = []
        self._count = 0
        self._ended = False
        self._all_out = threading.Event()
        self._here = _LoopState()

    def start(self) -> None:
        """Starts the first thread.

        Raises:
            RuntimeError: there cannot be another thread.
        """
        with self._lock:
            self._is_held = True
            self._count += 1
        self._start()

    def enter_wait(self) -> None:
        """See ``executor.Place``."""
        inside = self._inside
        if inside is None:
            return
        task = asyncio.current_task(self._loop)
        self._here.left = _Left(task, len(inside._ready))
        if task is not None:
            _leave_task(self._loop, task)
        inside._thread_id = None
        self._waiting += 1
        self._hand_on()

    def leave_wait(self) -> None:
        """See ``executor.Place``."""
        left, self._here.left = self._here.left, None
        if left is None:
            return
        self._take_back()
        self._waiting -= 1
        self._inside._thread_id = threading.get_ident()
        if left.task is not None:
            _enter_task(self._loop, left.task)
        held_back, self._held_back = self._held_back, []
        self._inside._ready.extend(held_back)
        for _ in range(left.callbacks - len(self._inside._ready)):
            self._loop.call_soon(_nothing)
        if self._returning or self._ended:  # it may have been told so while another had it
            self._loop.stop()

    def end(self) -> None:
        """Lets every thread end as soon as it has nothing to come back to; called by the loop."""
        with self._lock:
            self._ended = True
            idle, self._idle = self._idle, []
        for wake_up in idle:
            wake_up.release()
        self._loop.stop()

    def runs_here(self) -> bool:
        """True on one of the threads."""
        with self._lock:
            return threading.current_thread() in self._threads

    def join(self, until: float) -> list[threading.Thread]:
        """Waits for the threads.

        Args:
            until: how long, on the monotonic clock.

        Returns:
            Those that run on.
        """
        self._all_out.wait(max(0.0, until - time.monotonic()))
        with self._lock:
            threads = [*self._threads]
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))
        return [thread for thread in threads if thread.is_alive()]

    # --- Holding back

    def _hold_back_or_tell(self, context: dict[str, Any]) -> None:
        """Stands for the loop's ``call_exception_handler``."""
        handle, error = context.get("handle"), context.get("exception")
        if not (self._waiting and isinstance(handle, asyncio.Handle) and _was_not_begun(error)):
            self._tell(context)
        elif self._is_for_a_file(handle):  # and is called again at once, while that is ready
            time.sleep(_PAUSE)
        else:
            self._held_back.append(handle)

    def _is_for_a_file(self, handle: asyncio.Handle) -> bool:
        watched = self._inside._selector.get_map().values()
        return any(handle is each for key in watched for each in key.data)

    # --- Handing on

    def _hand_on(self) -> None:
        """Hands the loop to the thread that has waited, to an idle one, or to a new one."""
        with self._lock:
            wake_up = None
            if self._returning:
                wake_up = self._returning.popleft()
            elif self._ended:
                self._is_held = False
                return
            elif self._idle:
                wake_up = self._idle.pop()
            else:
                self._count += 1
        if wake_up is not None:
            wake_up.release()
            return
        try:
            self._start()
        except RuntimeError as error:  # the others go on when this one has waited
            _logger.error("%s cannot start a thread: %s", self._name, error)
            self._hand_back()

    def _hand_back(self) -> None:
        """Takes the loop back, as there is no other thread to run it now."""
        with self._lock:
            wake_up = self._next_to_return()
        if wake_up is not None:
            wake_up.release()

    def _next_to_return(self) -> threading.Lock | None:
        """Hands the loop to who has waited longest, or to nobody. Needs the lock."""
        wake_up = self._returning.popleft() if self._returning else None
        self._is_held = wake_up is not None
        return wake_up

    def _take_back(self) -> None:
        with self._lock:
            if not self._is_held:
                self._is_held = True
                return
            wake_up = threading.Lock()
            wake_up.acquire()
            self._returning.append(wake_up)
        self._loop.call_soon_threadsafe(self._loop.stop)
        wake_up.acquire()

    # --- Threads

    def _start(self) -> None:
        """Starts a thread that was counted, and that gets the loop."""
        thread = Thread(target=self._work, name=self._name, daemon=True)
        try:
            thread.start()
        except RuntimeError:
            self._count_out()
            raise

    def _work(self) -> None:
        share_this_thread(self)
        wake_up = threading.Lock()
        wake_up.acquire()
        me = threading.current_thread()
        with self._lock:
            self._threads = [each for each in self._threads if each.is_alive()] + [me]
        try:
            self._run()
            while self._rest(wake_up):
                self._run()
        finally:
            self._count_out()

    def _run(self) -> None:
        """Runs the loop until it is wanted elsewhere; a coroutine that stops it is not alone."""
        while not (self._returning or self._ended):
            with contextlib.suppress(KeyboardInterrupt, SystemExit):  # its caller is told
                self._loop.run_forever()

    def _rest(self, wake_up: threading.Lock) -> bool:
        """Hands the loop on, and waits until it is back; False if this thread is to end."""
        with self._lock:
            successor = self._next_to_return()
            stays = not self._ended and len(self._idle) < _IDLE_KEPT
            if stays and successor is not None:
                self._idle.append(wake_up)
        if successor is not None:
            successor.release()
        if not stays or successor is None:
            return False
        wake_up.acquire()
        return not self._ended

    def _count_out(self) -> None:
        with self._lock:
            self._count -= 1
            is_last = not self._count
        if is_last:
            self._loop.close()
            if self._inside is not None:
                del self._inside.call_exception_handler  # each would keep the other
            self._all_out.set()


def _was_not_begun(error: object) -> bool:
    """True of the error of a callback whose context is another thread's now."""
    if not isinstance(error, RuntimeError) or "cannot enter context" not in str(error):
        return False
    return error.__traceback__ is None or error.__traceback__.tb_next is None


def _nothing() -> None:
    """Stands for a callback that another thread has called."""
