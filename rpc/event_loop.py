"""The asyncio loop on which an agent runs its ``async def`` handlers; started by the first."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable, Coroutine
from typing import Any

from rpc.executor import Executor


class EventLoop:
    """One thread with an asyncio loop.

    Args:
        name: of the thread.
        executor: runs what follows a coroutine's end, so that encoding a large
            result does not hold up the loop.
    """

    def __init__(self, name: str, executor: Executor) -> None:
        self._name = name
        self._executor = executor
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def run(
        self,
        coroutine: Coroutine[Any, Any, Any],
        succeed: Callable[[Any], None],
        fail: Callable[[BaseException], None],
    ) -> None:
        """Runs a coroutine in the caller's context; its end is reported on the executor."""
        context = contextvars.copy_context()

        def ended(task: asyncio.Task[Any]) -> None:
            if task.cancelled():
                report: Callable[[], None] = lambda: fail(asyncio.CancelledError())  # noqa: E731
            elif (error := task.exception()) is not None:
                report = lambda: fail(error)  # noqa: E731
            else:
                report = lambda: succeed(task.result())  # noqa: E731
            self._executor.submit(lambda: context.run(report))

        def begin() -> None:
            asyncio.ensure_future(coroutine, loop=loop).add_done_callback(ended)

        loop = self._running()
        loop.call_soon_threadsafe(begin, context=context)

    def close(self) -> None:
        """Cancels what still runs and joins the thread."""
        with self._lock:
            loop, thread = self._loop, self._thread
            self._loop = self._thread = None
        if loop is None or thread is None:
            return

        def stop() -> None:
            for task in asyncio.all_tasks(loop):
                task.cancel()
            loop.call_soon(loop.stop)

        loop.call_soon_threadsafe(stop)
        thread.join()
        loop.close()

    def _running(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(
                    target=self._loop.run_forever, name=self._name, daemon=True
                )
                self._thread.start()
            return self._loop
