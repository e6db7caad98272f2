"""Carries out retries for one agent: the I/O half of ``retry``."""

from __future__ import annotations

import contextvars
import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rpc.errors import (
    CallCancelledError,
    RpcError,
    RpcTimeoutError,
    UnknownWorkerError,
    WorkerLostError,
)
from rpc.functions import is_idempotent
from rpc.futures import Future
from rpc.messages import Reply
from rpc.observation import leads_to
from rpc.retry import Attempts, RequestId, Retry
from rpc.sinks import FutureSink, Sink, Unpack
from rpc.transports.base import Frame
from rpc.worker_info import WorkerInfo

if TYPE_CHECKING:
    from rpc.agent import Agent

_TRANSIENT = (RpcTimeoutError, WorkerLostError, UnknownWorkerError)


@dataclass(frozen=True, slots=True)
class RetriedCall:
    """What is tried.

    Args:
        to: the worker, as the user wrote it.
        func: marked as idempotent.
        args: for it.
        kwargs: for it.
    """

    to: WorkerInfo | str | int
    func: Callable[..., Any]
    args: Sequence[Any]
    kwargs: dict[str, Any]


class Retries:
    """One agent's calls that may be tried again."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._open: dict[int, None] = {}

    def start(self, call: RetriedCall, timeout: float, retry: Retry, sink: Sink) -> RetriedSink:
        """Makes the first attempt; the outcome of the last goes to ``sink``.

        Args:
            call: what to try.
            timeout: seconds for all attempts together, as the user gave them.
            retry: how.
            sink: takes the outcome.

        Raises:
            TypeError: ``retry`` is none.
            ValueError: the function is not marked as idempotent.
        """
        if not isinstance(retry, Retry):
            raise TypeError(f"retry must be a rpc.Retry, but got {retry!r}")
        if not is_idempotent(call.func):
            raise ValueError(
                f"{call.func!r} cannot be called with retry: mark it with "
                "rpc.functions.idempotent if it does no harm to run it more than once"
            )
        limit = self._agent.timeout_of(timeout)
        with self._lock:
            number = next(self._numbers)
            self._open[number] = None
        attempts = Attempts(retry, self._agent.clock.now(), limit)
        tried = RetriedSink(self._agent, call, number, attempts, sink)
        tried.attempt()
        return tried

    def future(self, call: RetriedCall, timeout: float, retry: Retry) -> Future[Any]:
        """As :meth:`start`, with a future for the outcome."""
        agent = self._agent
        name = getattr(call.func, "__qualname__", repr(call.func))
        future = agent.caller.future(f"the call of {name} on {call.to}")
        tried = self.start(call, timeout, retry, FutureSink(future, agent.completions))
        future.canceller = tried.cancel
        return future

    def oldest(self) -> int:
        """The oldest of the calls that are not over."""
        with self._lock:
            return next(iter(self._open), 0)

    def over(self, number: int) -> None:
        """A call has its outcome."""
        with self._lock:
            self._open.pop(number, None)


class RetriedSink:
    """Takes the outcome of each attempt, and makes the next or passes it on."""

    __slots__ = ("_agent", "_attempts", "_call", "_cancelled", "_context", "_number", "_sink")

    def __init__(
        self, agent: Agent, call: RetriedCall, number: int, attempts: Attempts, sink: Sink
    ) -> None:
        self._agent = agent
        self._call = call
        self._number = number
        self._attempts = attempts
        self._sink = sink
        self._cancelled = False
        self._context = contextvars.copy_context()

    def attempt(self) -> None:
        """Sends the request, again."""
        agent, call, attempts = self._agent, self._call, self._attempts
        if self._cancelled:
            return
        now = agent.clock.now()
        timeout = attempts.begin(now)
        try:
            worker = agent.find_now(call.to)
        except RpcError as error:  # it is not there now
            attempts.not_sent()
            self.failed(error)
            return
        request = RequestId(self._number, agent.retries.oldest(), attempts.seconds_left(now))
        try:
            agent.caller.call(
                worker, call.func, call.args, call.kwargs, timeout, self, once=request.encode()
            )
        except _TRANSIENT as error:
            self.failed(error)
        except BaseException:
            agent.retries.over(self._number)
            raise

    def replied(self, reply: Reply, frame: Frame, unpack: Unpack) -> None:
        """An attempt succeeded, or the function raised, which no further one would change."""
        self._last().replied(reply, frame, unpack)

    def failed(self, error: Exception) -> None:
        """An attempt failed."""
        following = None
        if isinstance(error, _TRANSIENT) and not self._cancelled:
            following = self._attempts.next_after(self._agent.clock.now())
        if following is None:
            self._last().failed(error)
        else:
            self._agent.timers.at(following, self._attempt_again)

    def _attempt_again(self) -> None:
        try:
            self._context.copy().run(self.attempt)
        except Exception as error:
            self._last().failed(error)

    def _last(self) -> Sink:
        """Whoever takes the outcome, which may refer to this and is let go of."""
        self._agent.retries.over(self._number)
        sink, self._sink = self._sink, _Nobody()
        return sink

    def cancel(self, future: Future[Any]) -> bool:
        """Gives up, also between two attempts."""
        self._cancelled = True
        if not self._agent.caller.cancel_where(lambda sink: leads_to(sink, self)):
            self._last().failed(CallCancelledError("the call was cancelled by its caller"))
        return True


class _Nobody:
    """Takes what comes after the outcome."""

    def replied(self, reply: Reply, frame: Frame, unpack: Unpack) -> None:
        """Drops it."""

    def failed(self, error: Exception) -> None:
        """Drops it."""
