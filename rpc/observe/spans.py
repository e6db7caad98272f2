"""Shows calls to profilers and traces, at both ends.

Nothing of this runs unless somebody looks, which callers and callees check for
every call. Owns the spans that ``torch.profiler`` and ``torch.autograd.profiler``
show: ``rpc_sync#func(worker0 -> worker1)`` at the caller, from the making of a call
until its result is decoded, and ``rpc_handler#func(...)`` at the callee.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from types import CoroutineType
from typing import Any, Protocol

import torch
from torch._C._autograd import _profiler_enabled as profiler_enabled
from torch.autograd import profiler

from rpc.errors import RemoteError
from rpc.extensions import CallObserver, ObservedHandler
from rpc.observe import tracing
from rpc.observe.names import operator_name, span_name
from rpc.observe.profiling import EXTENSION, collector, followed
from rpc.observe.trace_records import CallKind, CallRecord, HandlerRecord
from rpc.outcomes.futures import Future
from rpc.outcomes.sinks import Decode, FutureSink, Sink, Unpack, WaitingCaller
from rpc.transports.base import Frame
from rpc.wire.codec import ImportNeeded
from rpc.wire.messages import Operation, Reply, Status
from rpc.worker_info import WorkerInfo

__all__ = ["WatchedSink", "profiler_enabled", "profiling", "run_handler", "traced", "watching"]

traced = tracing.active

_RUN_A_FUNCTION = (CallKind.SYNC, CallKind.ASYNC, CallKind.REMOTE)


def profiling() -> bool:
    """True if a profiler may be recording this thread."""
    return profiler._is_profiler_enabled or profiler_enabled()


class Observer(Protocol):
    """Looks at one call."""

    def replied(self) -> None:
        """Notes that the reply arrived, or that it is known that none will."""

    def ended(self, error: BaseException | None) -> None:
        """Notes that the result is there, or the error that is raised instead."""


class WatchedSink:
    """Passes a call's outcome on, and tells observers before anybody else learns of it."""

    __slots__ = ("_kind", "_observers", "_over", "_sink")

    def __init__(self, sink: Sink, kind: CallKind, observers: Sequence[Observer]) -> None:
        self._sink = sink
        self._kind = kind
        self._observers = observers
        self._over = False

    def replied(self, reply: Reply, frame: Frame, unpack: Unpack) -> None:
        """Passes the reply on. Whoever unpacks it ends the call; nobody does for ``remote``."""
        for observer in self._observers:
            observer.replied()
        if self._kind is CallKind.REMOTE:
            is_error = reply.status is Status.ERROR
            self.over(RemoteError("the owner could not run it") if is_error else None)
            self._sink.replied(reply, frame, unpack)
        else:
            # Not the bare reply itself, whose value nobody would have to unpack.
            self._sink.replied(Reply(*reply), frame, self._ending(unpack))

    def failed(self, error: Exception) -> None:
        """Tells the observers that there will be no reply, and passes the error on."""
        for observer in self._observers:
            observer.replied()
        self.over(error)
        self._sink.failed(error)

    def over(self, error: BaseException | None) -> None:
        """Tells the observers, once, that the call is over."""
        if not self._over:
            self._over = True
            for observer in self._observers:
                observer.ended(error)

    def _ending(self, unpack: Unpack) -> Unpack:
        def unpack_and_end(reply: Reply, frame: Frame, decode: Decode) -> Any:
            try:
                value = unpack(reply, frame, decode)
            except ImportNeeded:  # it will be unpacked again, where imports are allowed
                raise
            except BaseException as error:
                self.over(error)
                raise
            self.over(None)
            return value

        return unpack_and_end


def feeds(sink: Sink, future: Future[Any]) -> bool:
    """True if a call's outcome goes to this future."""
    sink = _inside(sink)
    return isinstance(sink, FutureSink) and sink.future is future


def leads_to(sink: Sink, wanted: Sink) -> bool:
    """True if a call's outcome goes to this sink."""
    return _inside(sink) is wanted


def goes_on(sink: Sink) -> bool:
    """True if a call that failed is tried again."""
    return getattr(_inside(sink), "goes_on", False) is True


def tell_expired(sink: Sink, call: object) -> None:
    """Lets a sink that may try again know which request of its is given up."""
    inside = _inside(sink)
    if hasattr(inside, "expired"):
        inside.expired = call


def _inside(sink: Sink) -> Sink:
    while isinstance(sink, WatchedSink):
        sink = sink._sink
    return sink


@contextlib.contextmanager
def watching(
    me: WorkerInfo,
    operation: Operation,
    to: WorkerInfo,
    name: str,
    sink: Sink,
    load: Callable[[str], object],
    looking_on: Sequence[CallObserver],
) -> Iterator[WatchedSink]:
    """Observes a request that ``me`` sends inside the block, and its outcome after it.

    Args:
        me: the calling worker.
        operation: of the request.
        to: the worker that is asked.
        name: of the function.
        sink: takes the outcome.
        load: loads an extension of calls.
        looking_on: the extensions that look at calls.
    """
    kind = _kind_of(operation, sink)
    observers: list[Observer] = []
    with contextlib.ExitStack() as scopes:
        key, calls = span_name(kind.value, name, me.name, to.name), collector()
        if calls is not None and kind in _RUN_A_FUNCTION:
            load(EXTENSION)
            recorded = calls.start(key, me.id)
            observers.append(recorded)
            scopes.enter_context(recorded.asking())
        elif profiling() and kind is not CallKind.MESSAGE:
            observers.append(_ProfiledCall(key))
        place = tracing.active()
        if place is not None and place.recording.of(me):
            record = place.recording.begin_call(kind, operator_name(name), to.id)
            observers.append(_TracedCall(record, place.recording.now))
            scopes.enter_context(tracing.sending(place, record))
        for extension in looking_on:
            call = extension.call_begins(kind.value, name, to)
            if call is not None:
                observers.append(call)
                scopes.enter_context(call.sending())
        watched = WatchedSink(sink, kind, observers)
        try:
            yield watched
        except BaseException as error:
            watched.over(error)
            raise


def run_handler(
    now: Callable[[], float],
    caller: WorkerInfo,
    here: str,
    name: str,
    run: Callable[[], Any],
    looking_on: Sequence[CallObserver],
) -> Any:
    """Calls a handler and observes it; returns what it returned.

    Args:
        now: the worker's clock, in seconds.
        caller: the worker that asks.
        here: name of the worker that serves.
        name: of the function.
        run: calls the handler.
        looking_on: the extensions that look at calls.
    """
    begun = [each.handler_begins(name, caller) for each in looking_on]
    observers: list[ObservedHandler] = [each for each in begun if each is not None]
    place = tracing.active()
    record = place.handler if place is not None else None
    if record is not None:
        record.running = now()
    try:
        result = _in_a_span(f"{operator_name(name)}({caller.name} -> {here})", run)
    except BaseException as error:
        _tell_ended(observers, error)
        raise
    finally:
        if record is not None:
            record.returned = record.ran = now()
    if not isinstance(result, torch._C.Future) and type(result) is not CoroutineType:
        _tell_ended(observers, None)
        return result
    if record is not None:
        observers.append(_TracedHandler(record, now))
    return _when_there(result, observers)


def _in_a_span(key: str, run: Callable[[], Any]) -> Any:
    """Runs a handler, within a span of the profile that may be recorded here."""
    if not profiling() or followed():
        return run()
    span = ProfilerSpan(f"rpc_handler#{key}")
    try:
        return run()
    finally:
        span.end()


def _when_there(result: Any, observers: Sequence[ObservedHandler]) -> Any:
    """Wraps a future or coroutine: tells observers when its result is there."""
    if type(result) is CoroutineType:
        return _awaited(result, observers)
    result.add_done_callback(lambda done: _tell_ended(observers, _error_of(done)))
    return result


def _error_of(done: torch.futures.Future[Any]) -> BaseException | None:
    try:
        done.value()
    except BaseException as error:
        return error
    return None


async def _awaited(
    coroutine: Coroutine[Any, Any, Any], observers: Sequence[ObservedHandler]
) -> Any:
    try:
        result = await coroutine
    except BaseException as error:
        _tell_ended(observers, error)
        raise
    _tell_ended(observers, None)
    return result


def _tell_ended(observers: Sequence[ObservedHandler], error: BaseException | None) -> None:
    for each in observers:
        each.ended(error)


# While it is held no profile stops. Reentrant: a finaliser may end a span anywhere.
_lock = threading.RLock()
_open: set[ProfilerSpan] = set()


class ProfilerSpan:
    """A span in a profile of ``torch.profiler``, from now until ``end``, on any thread.

    It is in the profile of the thread that makes it, and ends with that at the latest. torch
    frees what it knows of a span when the profile stops, and the end of a span that is still
    open writes there. So the first span puts a function of ours before the one that stops
    profiles.
    """

    __slots__ = ("_ended",)

    def __init__(self, key: str) -> None:
        _stand_before_the_stop()
        span = profiler.record_function(key)
        self._ended: torch.futures.Future[None] = torch.futures.Future()
        with _lock:
            span.__enter__()  # type: ignore[no-untyped-call]
            # torch runs the end of the span with the profiler state of this thread.
            span._call_end_callbacks_on_future(self._ended)
            span.__exit__(None, None, None)
            _open.add(self)

    def end(self) -> None:
        """Ends the span; does nothing if it has ended, or its profile has."""
        with _lock:
            if self in _open:
                _open.remove(self)
                self._ended.set_result(None)


@functools.cache
def _stand_before_the_stop() -> None:
    stop = profiler._disable_profiler  # type: ignore[attr-defined]

    @functools.wraps(stop)
    def end_all_and_stop() -> Any:
        with _lock:
            for span in list(_open):
                span.end()
            return stop()

    profiler._disable_profiler = end_all_and_stop  # type: ignore[attr-defined]


class _ProfiledCall:
    """A call in a profile of the thread that makes it."""

    def __init__(self, key: str) -> None:
        self._span = ProfilerSpan(key)

    def replied(self) -> None:
        return

    def ended(self, error: BaseException | None) -> None:
        self._span.end()


class _TracedCall:
    """A call in a distributed trace."""

    def __init__(self, record: CallRecord, now: Callable[[], float]) -> None:
        self._record = record
        self._now = now

    def replied(self) -> None:
        self._record.replied = self._now()

    def ended(self, error: BaseException | None) -> None:
        self._record.ended = self._now()
        self._record.failed = error is not None


class _TracedHandler:
    """A handler in a distributed trace, whose result is there later than it returns."""

    def __init__(self, record: HandlerRecord, now: Callable[[], float]) -> None:
        self._record = record
        self._now = now

    def ended(self, error: BaseException | None) -> None:
        self._record.ran = self._now()


def _kind_of(operation: Operation, sink: Sink) -> CallKind:
    if operation is Operation.CREATE:
        return CallKind.REMOTE
    if operation is Operation.FETCH:
        return CallKind.TO_HERE
    if operation is Operation.EXTENSION:
        return CallKind.MESSAGE
    is_waited_for = isinstance(sink, WaitingCaller) or getattr(sink, "is_waited_for", False)
    return CallKind.SYNC if is_waited_for else CallKind.ASYNC
