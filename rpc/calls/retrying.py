"""Carries out retries for one agent: the I/O half of ``retry``."""

from __future__ import annotations

import contextvars
import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, SupportsFloat

import torch

from rpc.calls.call_parts import CallParts
from rpc.errors import (
    AgentClosedError,
    CallCancelledError,
    RpcError,
    RpcTimeoutError,
    UnknownWorkerError,
    WorkerLostError,
)
from rpc.functions import is_idempotent
from rpc.group.directory import Directory
from rpc.ids import Life
from rpc.observe.names import method_name, text_of
from rpc.observe.spans import leads_to
from rpc.outcomes.futures import Future
from rpc.outcomes.sinks import FutureSink, Sink, Unpack, WaitingCaller
from rpc.protocol.retry import Attempts, RequestId, Retry
from rpc.rrefs.keeper import ReferenceKeeper
from rpc.rrefs.rref import RRef
from rpc.runtime.signals import restore, shut_out
from rpc.transports.base import Frame
from rpc.wire.control import encode_passed
from rpc.wire.messages import Reply
from rpc.worker_info import WorkerInfo

if TYPE_CHECKING:
    from rpc.calls.caller import Call, Caller

_TRANSIENT = (RpcTimeoutError, WorkerLostError, UnknownWorkerError)


@dataclass(frozen=True, slots=True)
class Creation:
    """The reference that a ``remote()`` returned: it means one life of its owner.

    Args:
        owner: which.
        target: what its request carries.
    """

    owner: Life
    target: bytes


@dataclass(frozen=True, slots=True)
class RetriedCall:
    """The call that is tried.

    Args:
        to: the worker, as the user wrote it.
        func: marked as idempotent.
        args: for it.
        kwargs: for it.
        creation: of a ``remote()``.
    """

    to: WorkerInfo | str | int
    func: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    creation: Creation | None = None

    @property
    def name(self) -> str:
        """The function's, as in metrics and dumps."""
        return text_of(method_name(self.func, self.args))

    def may_succeed_after(self, error: Exception) -> bool:
        """True if a further attempt may end better; a value does not outlive its owner."""
        errors = _TRANSIENT if self.creation is None else RpcTimeoutError
        return isinstance(error, errors) and not getattr(error, "is_final", False)


@dataclass(frozen=True, slots=True)
class Pause:
    """The time between two attempts.

    Args:
        until: when the next begins, on the agent's clock.
        reason: what became of the last one.
    """

    until: float
    reason: str


class Retries:
    """One worker's calls that may be tried again.

    Args:
        shared: with the other parts of the worker's calls.
        directory: finds the worker that is meant.
        caller: makes the attempts.
    """

    def __init__(self, shared: CallParts, directory: Directory, caller: Caller) -> None:
        self.shared = shared
        self.directory = directory
        self.caller = caller
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._open: dict[int, RetriedSink] = {}
        self.closed = False
        """True once nothing is tried again any more."""

    def start(
        self, call: RetriedCall, timeout: SupportsFloat, retry: Retry, sink: Sink
    ) -> RetriedSink:
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
        require_retriable(call.func, retry)
        tried = self._new(call, timeout, retry, sink)
        try:
            tried.attempt()
        except BaseException:
            tried.abandon()
            raise
        return tried

    def sync(self, call: RetriedCall, timeout: SupportsFloat, retry: Retry) -> Any:
        """Starts a call as :meth:`start` does, and waits; gives the call up if interrupted."""
        waiting = WaitingCaller()
        tried: list[RetriedSink] = []

        def start() -> None:
            tried.append(self.start(call, timeout, retry, waiting))

        before = shut_out()
        try:
            return self.caller.run(waiting, start)
        except BaseException:
            if tried and waiting.is_waiting:
                tried[0].give_up()
            raise
        finally:
            restore(before)

    def _new(
        self, call: RetriedCall, timeout: SupportsFloat, retry: Retry, sink: Sink
    ) -> RetriedSink:
        limit = self.shared.timeouts.of(timeout)
        attempts = Attempts(retry, self.shared.clock.now(), limit)
        with self._lock:
            number = next(self._numbers)
            tried = self._open[number] = RetriedSink(self, call, number, attempts, sink)
        return tried

    def create(self, call: RetriedCall, timeout: SupportsFloat, retry: Retry) -> RRef[Any]:
        """Starts a ``remote()`` as :meth:`start` does; returns the reference.

        Raises:
            RpcError: the first request could not be sent.
        """
        require_retriable(call.func, retry)
        references = self.shared.references
        owner = self.directory.find(call.to, timeout)
        limit = self.shared.timeouts.of(timeout)
        before = shut_out()
        try:
            rref, passed, sink = references.creations.create(owner, call.func, limit)
            creation = Creation(passed.reference.owner, encode_passed((passed,)))
            tried = self._new(replace(call, to=owner, creation=creation), timeout, retry, sink)
            try:
                tried.send()
            except BaseException as error:
                tried.abandon()
                references.creations.not_sent(rref, passed, error)
                raise
            return rref
        finally:
            restore(before)

    def future(self, call: RetriedCall, timeout: SupportsFloat, retry: Retry) -> Future[Any]:
        """Starts a call as :meth:`start` does; returns a future of the outcome."""
        whom = call.to.name if isinstance(call.to, WorkerInfo) else call.to
        future = self.caller.future(f"the call of {call.name} on {whom}")
        before = shut_out()
        try:
            tried = self.start(call, timeout, retry, FutureSink(future, self.shared.completions))
        finally:
            restore(before)
        future.canceller = lambda _: tried.give_up()
        return future

    def oldest(self) -> int:
        """The oldest of the calls that are not over."""
        with self._lock:
            return next(iter(self._open), 0)

    def close(self, reason: str) -> None:
        """Fails the calls that wait for their next attempt; nothing is tried again from now on."""
        with self._lock:
            self.closed = True
            left = list(self._open.values())
        for tried in left:
            tried.end(AgentClosedError(f"{tried.call.name}: {reason}"))

    def paused(self) -> list[dict[str, Any]]:
        """A dump of the calls between two attempts; ``again_in`` is in seconds."""
        now = self.shared.clock.now()
        with self._lock:
            waiting = [(tried, tried.pause) for tried in self._open.values()]
        return [
            {
                "call": tried.call.name,
                "to": str(tried.call.to),
                "again_in": pause.until - now,
                "after": pause.reason,
            }
            for tried, pause in waiting
            if pause is not None
        ]

    def over(self, number: int) -> bool:
        """Notes that a call has its outcome; True if it is the first."""
        with self._lock:
            return self._open.pop(number, None) is not None


class RetriedSink:
    """Takes the outcome of each attempt, and makes the next or passes it on."""

    __slots__ = (
        "_attempts",
        "_cancelled",
        "_context",
        "_grad_enabled",
        "_number",
        "_retries",
        "_sink",
        "call",
        "expired",
        "goes_on",
        "is_waited_for",
        "pause",
    )

    def __init__(
        self, retries: Retries, call: RetriedCall, number: int, attempts: Attempts, sink: Sink
    ) -> None:
        self._retries = retries
        self.call = call
        self._number = number
        self._attempts = attempts
        self._sink = sink
        self._cancelled = False
        self.is_waited_for = isinstance(sink, WaitingCaller)
        """True if the caller holds a thread for the outcome."""
        self.goes_on = False
        """True after an attempt that failed and was not the last."""
        self.expired: Call | None = None
        """The last attempt that timed out; what it asked for may still run."""
        self.pause: Pause | None = None
        """Set between two attempts."""
        self._context = contextvars.copy_context()
        self._grad_enabled = torch.is_grad_enabled()

    def attempt(self) -> None:
        """Sends the request, again; what keeps it from leaving counts as an attempt's failure."""
        if self._cancelled:
            return
        try:
            self.send()
        except _TRANSIENT as error:
            self.failed(error)
        self._give_up_if_cancelled()

    def _give_up_if_cancelled(self) -> None:
        """Gives up a call that was cancelled while its request was encoded."""
        if self._cancelled:
            self._retries.caller.cancel_where(lambda sink: leads_to(sink, self))

    def send(self) -> None:
        """Begins an attempt; raises what keeps its request from leaving."""
        retries, call = self._retries, self.call
        now = retries.shared.clock.now()
        self.pause = None
        timeout = self._attempts.begin(now)
        try:
            worker = self._destination()
        except RpcError:  # it is not there now
            self._attempts.not_sent()
            raise
        left = self._attempts.seconds_left(now)
        once = RequestId(self._number, retries.oldest(), left).encode()
        target = None if call.creation is None else call.creation.target + once
        retries.caller.call(worker, call.func, call.args, call.kwargs, timeout, self, target, once)

    def _destination(self) -> WorkerInfo:
        call, group = self.call, self._retries.shared.group
        if call.creation is None:
            return self._retries.directory.find_now(call.to)
        owner = group.find(call.to)
        if group.life(owner.id) != call.creation.owner:
            raise WorkerLostError(owner.name, call.creation.owner.incarnation, "it was replaced")
        return owner

    def abandon(self) -> None:
        """Ends the attempts without telling an outcome, as nobody waits for it."""
        self._retries.over(self._number)

    def replied(self, reply: Reply, frame: Frame, unpack: Unpack) -> None:
        """Passes the reply on: a value, or the function's error, which no attempt would change."""
        self._last().replied(reply, frame, unpack)

    def failed(self, error: Exception) -> None:
        """Plans the next attempt after one failed, or passes the error on."""
        following = None
        again = not (self._cancelled or self._retries.closed)
        if again and self.call.may_succeed_after(error):
            following = self._attempts.next_after(self._retries.shared.clock.now())
        if following is None:
            self._last().failed(error)
        else:
            self.goes_on = True
            self.pause = Pause(following, f"{type(error).__name__}: {error}")
            self._retries.shared.timers.at(following, self._attempt_again)

    def _attempt_again(self) -> None:
        try:
            with torch.set_grad_enabled(self._grad_enabled):
                self._context.copy().run(self.attempt)
        except Exception as error:
            self.end(error)

    def end(self, error: Exception) -> bool:
        """Ends the attempts with an error; False if the outcome was told before."""
        sink = self._last()
        sink.failed(error)
        return not isinstance(sink, _Nobody)

    def _last(self) -> Sink:
        """The sink that takes the outcome; let go of here, as it may refer back."""
        self.goes_on = False
        self.expired = None
        if not self._retries.over(self._number):
            return _Nobody(self._retries.shared.references)
        sink, self._sink = self._sink, _Nobody(self._retries.shared.references)
        return sink

    def give_up(self) -> bool:
        """Cancels, also between two attempts; False if the call is over."""
        self._cancelled = True
        caller, expired = self._retries.caller, self.expired
        if caller.cancel_where(lambda sink: leads_to(sink, self)):
            return True
        if not self.end(CallCancelledError("the call was cancelled by its caller")):
            return False
        if expired is not None:
            caller.tell_cancelled([expired])
        return True


def require_retriable(func: object, retry: object) -> None:
    """Refuses what cannot be tried again.

    Raises:
        TypeError: ``retry`` is none.
        ValueError: the function is not marked as idempotent.
    """
    if not isinstance(retry, Retry):
        raise TypeError(f"retry must be a rpc.Retry, but got {retry!r}")
    if not is_idempotent(func):
        raise ValueError(
            f"{func!r} cannot be called with retry: mark it with "
            "rpc.functions.idempotent if it does no harm to run it more than once"
        )


class _Nobody:
    """Takes what comes after the outcome."""

    def __init__(self, references: ReferenceKeeper) -> None:
        self._references = references

    def replied(self, reply: Reply, frame: Frame, unpack: Unpack) -> None:
        """Drops it, and lets go of its references."""
        if reply.references:
            self._references.lending.adopt(reply.references)

    def failed(self, error: Exception) -> None:
        """Drops it."""
