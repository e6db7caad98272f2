"""Calls to workers that have not joined their dynamic group yet: made when these do.

So ``rpc_async`` returns at once. ``membership`` knows who has joined, and ``caller`` makes
the calls.
"""

from __future__ import annotations

import contextvars
from functools import partial
from typing import Any, Protocol

from rpc.calls.call_parts import CallParts
from rpc.calls.outstanding import OutstandingCalls
from rpc.errors import CallCancelledError
from rpc.group.membership import Membership
from rpc.outcomes.futures import Future
from rpc.outcomes.sinks import FutureSink, Sink
from rpc.runtime import finalizers
from rpc.runtime.signals import restore, shut_out
from rpc.worker_info import WorkerInfo

_LEAST_SECONDS = 1e-6


class MakeCall(Protocol):
    """Makes the call."""

    def __call__(self, to: WorkerInfo, *, timeout: float, sink: Sink) -> object:
        """Sends its request; ``timeout`` in seconds, 0 for no limit."""


class CallToCome:
    """A call to a worker that is waited for.

    Args:
        shared: with the other parts of the worker's calls.
        caller: makes the call.
        membership: learns who joins.
        to: the worker, by name or id.
        sink: takes the outcome.
        call: makes the call, in the context of now; its arguments are taken then.
    """

    def __init__(
        self,
        shared: CallParts,
        caller: OutstandingCalls,
        membership: Membership,
        to: str | int,
        sink: FutureSink,
        call: MakeCall,
    ) -> None:
        self._shared = shared
        self._caller = caller
        self._membership = membership
        self._to = to
        self._sink = sink
        self._call = call
        self._context = contextvars.copy_context()
        self._deadline = 0.0
        self._number = -1
        self._cancelled = False

    def wait(self, seconds: float) -> None:
        """Begins to wait; for worker and call together there are ``seconds``, 0 for no limit."""
        shared = self._shared
        before = shut_out()
        try:
            self._deadline = shared.clock.now() + seconds if seconds else 0.0
            self._sink.future.canceller = self._cancel
            self._number = self._membership.when_joined(self._to, self._over)
            if seconds:
                shared.timers.at(self._deadline, partial(self._membership.hurry, self._number))
        finally:
            restore(before)

    def _over(self) -> None:
        self._shared.completions.submit(lambda: self._context.run(self._go_on))

    def _cancel(self, future: Future[Any]) -> bool:
        """Gives up, whether the call was made meanwhile or not."""
        if finalizers.running():
            self._shared.references.do_later(lambda: self._cancel(future))
            return True
        before = shut_out()
        try:
            self._cancelled = True
            self._membership.hurry(self._number)
            self._caller.cancel(future)
            return True
        finally:
            restore(before)

    def _go_on(self) -> None:
        """The wait is over: makes the call if the worker is there, or says why not."""
        future, caller = self._sink.future, self._caller
        try:
            self._make()
        except BaseException as error:
            future.set_exception(error)
        future.canceller = caller.cancel
        if self._cancelled:
            caller.cancel(future)

    def _make(self) -> None:
        if self._cancelled:
            raise CallCancelledError(f"the call on {self._to} was cancelled by its caller")
        self._membership.refuse(self._to)
        worker = self._shared.group.find(self._to)
        left = self._deadline and max(self._deadline - self._shared.clock.now(), _LEAST_SECONDS)
        self._call(worker, timeout=left, sink=self._sink)
