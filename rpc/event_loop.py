"""One asyncio loop on a thread of its own, for ``async def`` handlers.

Owns the loop, its thread, and those that ``asyncio.to_thread`` uses there. Which coroutines
run on it, and what becomes of them, is ``coroutines``'.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from rpc.executor import SECONDS_TO_END, abandon, share_this_thread
from rpc.threads import Thread

_SECONDS_TO_CANCEL = 2.0
_LEAST_SECONDS_FOR_THREADS = 1.0

_logger = logging.getLogger("rpc")


class EventLoop:
    """One thread with an asyncio loop.

    Args:
        name: of the thread.
        blocks: called, with this, when the thread begins to wait for a call.
        goes_on: called, with this, when it has waited.

    Attributes:
        is_blocked: a coroutine holds the thread and waits; the owner's to set and guard.
        is_fetching: it was told that coroutines are there to begin; the same.
    """

    def __init__(
        self,
        name: str,
        blocks: Callable[[EventLoop], None],
        goes_on: Callable[[EventLoop], None],
    ) -> None:
        self.is_blocked = False
        self.is_fetching = False
        self._name = name
        self._blocks = blocks
        self._goes_on = goes_on
        self._loop = asyncio.new_event_loop()
        self._threads = ThreadPoolExecutor(thread_name_prefix=f"{name}-thread")
        self._loop.set_default_executor(self._threads)
        self._thread = Thread(target=self._serve, name=name, daemon=True)
        self._started = threading.Event()
        self._stopping = False
        self._tasks: set[asyncio.Task[Any]] = set()  # asyncio's own references are weak

    def start(self) -> None:
        """Starts the thread.

        Raises:
            RuntimeError: there cannot be another; what was to run here will not.
        """
        try:
            self._thread.start()
        except RuntimeError:
            self._loop.close()
            raise
        finally:
            self._started.set()

    def is_usable(self) -> bool:
        """False if its thread could not be started, or broke."""
        return not self._loop.is_closed()

    def soon(self, callback: Callable[[], object]) -> None:
        """Calls ``callback`` on the thread, unless it is gone; any thread may ask for it."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(callback)

    def begin(
        self,
        coroutine: Coroutine[Any, Any, Any],
        name: str,
        ended: Callable[[asyncio.Task[Any]], None],
    ) -> None:
        """Makes a task, in the current context; on the loop's own thread."""
        task = self._loop.create_task(coroutine, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(ended)

    def enter_wait(self) -> None:
        """See ``executor.Place``."""
        self._blocks(self)

    def leave_wait(self) -> None:
        """See ``executor.Place``."""
        self._goes_on(self)

    def stop(self) -> None:
        """Has what still runs cancelled, and the thread end."""
        self.soon(self._stop)

    def join(self, seconds: float, patience: float = SECONDS_TO_END) -> None:
        """Waits for the end of the threads, if it is not asked for on one of them.

        Args:
            seconds: how long; a coroutine that holds the loop on is named in the log and
                abandoned, and so is what coroutines left to threads.
            patience: how long the end of the process waits for what was abandoned.
        """
        until = time.monotonic() + seconds
        self._started.wait()
        if self._thread is threading.current_thread() or self._thread.ident is None:
            return
        self._thread.join(max(0.0, until - time.monotonic()))
        if self._thread.is_alive():
            _logger.error("%s: a coroutine holds the loop, and is abandoned", self._name)
            abandon([self._thread], time.monotonic() + patience)
        least = min(_LEAST_SECONDS_FOR_THREADS, seconds)
        self._end_threads(max(least, until - time.monotonic()))

    def _stop(self) -> None:
        self._stopping = True
        self._loop.stop()

    def _end_threads(self, seconds: float) -> None:
        """Ends those that ``asyncio.to_thread`` and the like use."""
        ending = Thread(
            target=partial(self._threads.shutdown, cancel_futures=True),
            name=f"{self._name}-end",
            daemon=True,
        )
        ending.start()
        ending.join(seconds)
        if ending.is_alive():
            _logger.error("%s: what coroutines left to threads is abandoned", self._name)

    def _serve(self) -> None:
        share_this_thread(self)
        loop = self._loop
        try:
            _run(loop, lambda: self._stopping)
            end = loop.create_task(_wind_up(loop))
            end.add_done_callback(lambda _: loop.stop())
            _run(loop, end.done)
        finally:
            loop.close()


def _run(loop: asyncio.AbstractEventLoop, over: Callable[[], bool]) -> None:
    """Runs the loop until ``over``; a coroutine that stops it is not alone on it."""
    while not over():
        with contextlib.suppress(KeyboardInterrupt, SystemExit):  # its caller is told
            loop.run_forever()


async def _wind_up(loop: asyncio.AbstractEventLoop) -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    if tasks:
        _, stubborn = await asyncio.wait(tasks, timeout=_SECONDS_TO_CANCEL)
        for task in stubborn:
            _logger.error("%r goes on although it was cancelled, and is abandoned", task)
    closing = asyncio.ensure_future(loop.shutdown_asyncgens())
    await asyncio.wait([closing], timeout=_SECONDS_TO_CANCEL / 2)
    closing.cancel()
    await asyncio.wait([closing], timeout=_SECONDS_TO_CANCEL / 2)
    if not closing.done():
        _logger.error("an asynchronous generator does not end, and is abandoned")
