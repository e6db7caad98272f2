"""The asyncio loop on which an agent runs its ``async def`` handlers; started by the first.

Owns which coroutines run there, and what becomes of them. On which thread is ``handed_loop``'s.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Generator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch

from rpc.errors import AgentClosedError
from rpc.runtime.executor import SECONDS_TO_END, Executor, abandon
from rpc.runtime.handed_loop import HandedLoop, every_task
from rpc.runtime.threads import Thread

_SECONDS_TO_CANCEL = 2.0
_LEAST_SECONDS_FOR_THREADS = 1.0
_CLOSED = "this worker shut down"

_logger = logging.getLogger("rpc")


class EventLoop:
    """One asyncio loop, for all coroutines of a worker.

    Args:
        name: of its threads.
        executor: runs what follows a coroutine's end, so that encoding a large
            result does not hold up the loop.
    """

    def __init__(self, name: str, executor: Executor) -> None:
        self._name = name
        self._executor = executor
        self._lock = threading.Lock()
        self._beginning = threading.Lock()
        """Held while the loop is made, which only the first coroutines wait for."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._handed: HandedLoop | None = None
        self._threads = ThreadPoolExecutor(thread_name_prefix=f"{name}-thread")
        self._closed = False
        self._tasks: set[asyncio.Task[Any]] = set()  # asyncio's own references are weak

    def run(
        self,
        coroutine: Coroutine[Any, Any, Any],
        succeed: Callable[[Any], None],
        fail: Callable[[BaseException], None],
    ) -> Callable[[], None]:
        """Runs a coroutine in the caller's context and grad mode.

        Its end is reported on the executor.

        Returns:
            What cancels it, if it has not ended; any thread may call it.

        Raises:
            OSError: there is no descriptor for the loop.
            RuntimeError: there is no thread for it.
        """
        context = contextvars.copy_context()
        has_grad = torch.is_grad_enabled()

        def ended(task: asyncio.Task[Any]) -> None:
            begun.clear()  # who can cancel it must not keep it, and with it its outcome
            self._tasks.discard(task)
            error = _error_of(task, self._closed)  # asked for at once: it may not be reported
            report = partial(_report, task, error, succeed, fail)
            self._executor.submit(lambda: context.run(report))

        begun: list[asyncio.Task[Any]] = []

        def begin() -> None:
            task = asyncio.ensure_future(_WithItsModes(coroutine, has_grad))
            begun.append(task)
            self._tasks.add(task)
            task.add_done_callback(ended)

        def cancel() -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(lambda: [task.cancel() for task in begun])

        try:
            if self._loop is None:
                self._make()
        except BaseException:
            coroutine.close()
            raise
        with self._lock:
            if self._loop is not None:
                loop = self._loop
                loop.call_soon_threadsafe(begin, context=context)
                return cancel
        coroutine.close()
        fail(AgentClosedError(_CLOSED))
        return lambda: None

    def close(self, seconds: float = SECONDS_TO_END) -> None:
        """Cancels what still runs and joins the threads.

        A coroutine that holds the loop for as many ``seconds`` on end is named in the log
        and abandoned, and so is what coroutines left to threads.
        """
        began = time.monotonic()
        deadline = began + seconds
        with self._beginning, self._lock:
            self._closed = True
            loop, handed = self._loop, self._handed
            self._loop = self._handed = None
            if loop is None or handed is None:
                return
            with contextlib.suppress(RuntimeError):  # its thread broke, and closed it
                loop.call_soon_threadsafe(self._stop, loop, handed)
        if handed.runs_here():
            return
        left = handed.join(deadline)
        if left:
            _logger.error("%s: a coroutine holds the loop, and is abandoned", self._name)
            abandon(left, began + SECONDS_TO_END)
        least = min(_LEAST_SECONDS_FOR_THREADS, seconds)
        self._end_threads(max(least, deadline - time.monotonic()))

    def _stop(self, loop: asyncio.AbstractEventLoop, handed: HandedLoop) -> None:
        end = loop.create_task(_wind_up(loop))
        end.add_done_callback(lambda _: handed.end())

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

    def _make(self) -> None:
        """Makes and starts the loop, unless there is one or this was closed."""
        with self._beginning:
            if self._loop is not None or self._closed:
                return
            loop = asyncio.new_event_loop()
            loop.set_default_executor(self._threads)
            handed = HandedLoop(self._name, loop)
            handed.start()
            self._loop, self._handed = loop, handed


class _WithItsModes(Coroutine[Any, Any, Any]):
    """A coroutine each of whose steps by itself is in the coroutine's own modes of gradients.

    Between two steps others run on the thread, and the next may be on another one.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, Any], has_grad: bool) -> None:
        self._coroutine = coroutine
        self._has_grad = has_grad
        self._infers = False

    def send(self, value: Any) -> Any:
        return self._step(self._coroutine.send, value)

    def throw(self, *error: Any) -> Any:
        try:
            return self._step(self._coroutine.throw, *error)
        finally:
            del error  # the traceback of what is raised has this frame

    def close(self) -> None:
        self._step(self._coroutine.close)

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._coroutine.__await__()

    def __getattr__(self, name: str) -> Any:
        """Its name, code and frame, which asyncio shows."""
        return getattr(self._coroutine, name)

    def _step(self, step: Callable[..., Any], *values: Any) -> Any:
        with torch._C._InferenceMode(self._infers):  # at its end the thread has its own again
            if torch.is_grad_enabled() is not self._has_grad:
                torch.set_grad_enabled(self._has_grad)
            try:
                return step(*values)
            finally:
                del values
                self._has_grad = torch.is_grad_enabled()
                self._infers = torch.is_inference_mode_enabled()


def _error_of(task: asyncio.Task[Any], closed: bool) -> BaseException | None:
    if not task.cancelled():
        return task.exception()
    return AgentClosedError(_CLOSED) if closed else asyncio.CancelledError()


def _report(
    task: asyncio.Task[Any],
    error: BaseException | None,
    succeed: Callable[[Any], None],
    fail: Callable[[BaseException], None],
) -> None:
    if error is None:
        succeed(task.result())
    else:
        fail(error)


async def _wind_up(loop: asyncio.AbstractEventLoop) -> None:
    tasks = every_task(loop) - {asyncio.current_task(loop)}
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
