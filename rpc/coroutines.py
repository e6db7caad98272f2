"""Which event loop an ``async def`` handler runs on, and where its outcome goes.

Owns the loops; the first coroutine starts one. All run there, on one thread, as long as
none holds it up. While one waits in a blocking way (``rpc_sync``, ``wait``, ``to_here``),
those that have not begun begin on another loop, or the call that is waited for might need
one of them, and would never come back. Those that have begun belong to their loop, and
stand still until the wait is over, as in any program of asyncio.

A loop that was made once stays until the worker closes, as what coroutines leave running
stays on it; there are as many more as coroutines ever waited at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import threading
import time
import types
from collections.abc import Callable, Coroutine, Generator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from rpc.errors import AgentClosedError
from rpc.event_loop import EventLoop
from rpc.executor import SECONDS_TO_END, Executor

_CLOSED = "this worker shut down"

_logger = logging.getLogger("rpc")


@dataclass(frozen=True, slots=True)
class _Job:
    """A coroutine, and all that is known of it when it is handed in."""

    coroutine: Coroutine[Any, Any, Any]
    context: contextvars.Context
    has_grad: bool
    succeed: Callable[[Any], None]
    fail: Callable[[BaseException], None]


class _Ticket:
    """Who can cancel a coroutine has it, and must not keep the outcome."""

    __slots__ = ("job", "task")

    def __init__(self) -> None:
        self.job: _Job | None = None  # while it runs
        self.task: asyncio.Task[Any] | None = None


class Coroutines:
    """Runs coroutines on event loops of its own.

    Args:
        name: of the threads.
        executor: runs what follows a coroutine's end, so that encoding a large
            result does not hold up a loop.
    """

    def __init__(self, name: str, executor: Executor) -> None:
        self._name = name
        self._executor = executor
        self._lock = threading.Lock()
        self._loops: list[EventLoop] = []
        self._not_begun: dict[_Ticket, _Job] = {}
        self._closed = False

    def run(
        self,
        coroutine: Coroutine[Any, Any, Any],
        succeed: Callable[[Any], None],
        fail: Callable[[BaseException], None],
    ) -> Callable[[], None]:
        """Runs a coroutine in the caller's context and, if that is off, grad mode.

        Its end is reported on the executor.

        Returns:
            What cancels it, if it has not ended; any thread may call it.
        """
        has_grad = torch.is_grad_enabled()
        job = _Job(coroutine, contextvars.copy_context(), has_grad, succeed, fail)
        ticket = _Ticket()
        found = False
        with self._lock:
            closed = self._closed
            if not closed:
                self._not_begun[ticket] = job
                found = self._tell_a_free_loop()
        if closed:
            coroutine.close()
            fail(AgentClosedError(_CLOSED))
        elif not found:
            self._add_loop()
        return partial(self._cancel, ticket)

    def close(self, seconds: float = SECONDS_TO_END) -> None:
        """Cancels what still runs and joins the threads.

        A coroutine that holds its loop for as many ``seconds`` on end is named in the log
        and abandoned, and so is what coroutines left to threads.
        """
        began = time.monotonic()
        with self._lock:
            self._closed = True
            loops, self._loops = self._loops, []
            left, self._not_begun = self._not_begun, {}
        for loop in loops:
            loop.stop()
        for job in left.values():
            self._give_up(job, AgentClosedError(_CLOSED))
        for loop in loops:
            passed = time.monotonic() - began
            loop.join(max(0.0, seconds - passed), SECONDS_TO_END - passed)

    # --- Which loop; with the lock held

    def _tell_a_free_loop(self) -> bool:
        """Has a loop begin what has not begun, if any could now."""
        for loop in self._loops:
            if not loop.is_blocked and loop.is_usable():
                self._tell(loop)
                return True
        return False

    def _tell(self, loop: EventLoop) -> None:
        if not loop.is_fetching:
            loop.is_fetching = True
            loop.soon(partial(self._fetch, loop))

    # --- On the loops' threads

    def _fetch(self, loop: EventLoop) -> None:
        """Begins one coroutine, and comes back for the next when that has begun.

        It may hold up this loop, and the others are free then to begin elsewhere.
        """
        with self._lock:
            ticket, job = next(iter(self._not_begun.items()), (None, None))
            loop.is_fetching = len(self._not_begun) > 1
            more = loop.is_fetching
        if ticket is not None and job is not None:
            name = getattr(job.coroutine, "__qualname__", "a handler")
            context = job.context.copy()  # it may be entered on another loop just now
            context.run(loop.begin, self._run(ticket), name, partial(self._ended, ticket))
        if more:
            loop.soon(partial(self._fetch, loop))

    async def _run(self, ticket: _Ticket) -> Any:
        with self._lock:
            job = self._not_begun.pop(ticket, None)
            if job is None:  # it was cancelled, or began on another loop
                return None
            ticket.job, ticket.task = job, asyncio.current_task()
        coroutine, has_grad = job.coroutine, job.has_grad
        del job, ticket  # an error knows this frame
        return await (coroutine if has_grad else _without_grad(coroutine))

    def _ended(self, ticket: _Ticket, task: asyncio.Task[Any]) -> None:
        if ticket.task is task:
            job, ticket.job, ticket.task = ticket.job, None, None
        elif task.cancelled():  # by another coroutine, before it had begun
            job = self._take(ticket)
        else:
            job = None
        if job is not None:
            job.coroutine.close()
            report = partial(_report, task, self._closed, job.succeed, job.fail)
            self._executor.submit(partial(job.context.run, report))

    def _blocks(self, loop: EventLoop) -> None:
        """A coroutine waits on the thread of ``loop``: those that have not begun go elsewhere."""
        with self._lock:
            loop.is_blocked = True
            needed = bool(self._not_begun) and not self._tell_a_free_loop()
        if needed:
            self._add_loop()

    def _goes_on(self, loop: EventLoop) -> None:
        with self._lock:
            loop.is_blocked = False
            if self._not_begun:
                self._tell(loop)

    # --- On any thread

    def _add_loop(self) -> None:
        """Starts one more loop, if none is free by now."""
        try:
            with self._lock:
                if self._closed or self._tell_a_free_loop():
                    return
                loop = self._make_loop()
                self._loops.append(loop)
                self._tell(loop)
            loop.start()
        except (OSError, RuntimeError) as error:  # no descriptors, or no threads
            self._not_added(error)

    def _make_loop(self) -> EventLoop:
        number = len(self._loops)
        name = f"{self._name}-{number}" if number else self._name
        return EventLoop(name, self._blocks, self._goes_on)

    def _not_added(self, error: Exception) -> None:
        """What has not begun does so when a loop goes on; if there is none, it never will."""
        left: dict[_Ticket, _Job] = {}
        with self._lock:
            self._loops = [loop for loop in self._loops if loop.is_usable()]
            if not self._loops:
                left, self._not_begun = self._not_begun, {}
        _logger.error("%s: no further event loop can be started: %s", self._name, error)
        for job in left.values():
            self._give_up(job, error)

    def _take(self, ticket: _Ticket) -> _Job | None:
        """What has not begun, for whoever asks first."""
        with self._lock:
            return self._not_begun.pop(ticket, None)

    def _give_up(self, job: _Job, error: BaseException) -> None:
        job.coroutine.close()
        self._executor.submit(partial(job.context.run, job.fail, error))

    def _cancel(self, ticket: _Ticket) -> None:
        job = self._take(ticket)
        if job is not None:
            self._give_up(job, asyncio.CancelledError())
            return
        task = ticket.task
        if task is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                task.get_loop().call_soon_threadsafe(task.cancel)


@types.coroutine
def _without_grad(coroutine: Coroutine[Any, Any, Any]) -> Generator[Any, Any, Any]:
    """Each step by itself is in ``no_grad``: between two, others run on the thread.

    torch's own decorator throws into generators in a way that Python 3.12 deprecates.
    """
    step = partial(coroutine.send, None)
    while True:
        try:
            with torch.no_grad():
                awaited = step()
        except StopIteration as end:
            return end.value
        finally:
            del step  # it may have an error, whose traceback has this frame
        try:
            step = partial(coroutine.send, (yield awaited))
        except BaseException as error:
            step = partial(coroutine.throw, error)


def _report(
    task: asyncio.Task[Any],
    closed: bool,
    succeed: Callable[[Any], None],
    fail: Callable[[BaseException], None],
) -> None:
    error: BaseException | None
    if task.cancelled():
        error = AgentClosedError(_CLOSED) if closed else asyncio.CancelledError()
    else:
        error = task.exception()
    if error is None:
        succeed(task.result())
    else:
        fail(error)
