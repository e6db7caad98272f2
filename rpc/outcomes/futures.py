"""The future a caller holds: torch's own, which can also be awaited.

Owns how results and errors reach whoever waits. It does not know calls or
messages; the agent gives it a way to wait and completes it.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import threading
import weakref
from _thread import RLock
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, cast

import torch

from rpc.errors import RemoteError
from rpc.runtime import streams, torch_modes
from rpc.runtime.executor import blocking
from rpc.runtime.signals import let_in, restore
from rpc.runtime.text import text_of
from rpc.wire.kept_errors import bare_copy
from rpc.wire.remote_errors import raisable, retell

T = TypeVar("T")
S = TypeVar("S")

if TYPE_CHECKING:
    _TorchFuture = torch.futures.Future
else:

    class _TorchFuture(torch.futures.Future, Generic[T]):
        """``torch.futures.Future`` spelled so that it can be subscripted at run time."""


Waiter = Callable[[Callable[[], object], Callable[[], None]], None]
Completion = Callable[[], None]
"""Completes a future, which may run its callbacks."""


def wait_in_usual_modes(
    waiter: Waiter, done: Callable[[], object], block: Callable[[], None]
) -> None:
    """Waits with torch's usual modes, so that callbacks run meanwhile see none of this thread's."""
    if torch_modes.are_changed():
        with torch_modes.usual():
            waiter(done, block)
    else:
        waiter(done, block)


_logger = logging.getLogger("rpc")

_is_done = torch._C.Future.done  # not by way of torch's function in Python

# An error's class may answer for its attributes as it likes, or raise.
_set_cause = vars(BaseException)["__cause__"].__set__
_name_of = vars(type)["__name__"].__get__

_CALLBACK = "a callback on "
_MOST_NESTED = 32
_MOST_TURNS = 16
"""Turns from which on links that a user's function meets are kept for later as well."""


class Collector(Protocol):
    """Waits for several futures."""

    def waits_for(self, future: Future[Any]) -> bool:
        """True if a future is one of them."""

    def failed(self, error: BaseException) -> None:
        """Notes that one of them failed."""


class _Collectors:
    """All that live.

    Futures fail seldom, and may be waited for together by the thousand; so a future that
    fails looks for who waits for it, and one that is waited for is told nothing.

    There is no lock: a finalizer or a signal handler that comes in here may fail a future,
    too. A dict is changed, and copied, in one step.
    """

    def __init__(self) -> None:
        self._living: dict[int, weakref.ref[Collector]] = {}

    def add(self, collector: Collector) -> None:
        reference = weakref.ref(collector, self._forget)
        self._living[id(reference)] = reference

    def _forget(self, reference: weakref.ref[Collector]) -> None:
        self._living.pop(id(reference), None)

    def of(self, future: Future[Any]) -> list[Collector]:
        living = [reference() for reference in self._living.copy().values()]
        return [each for each in living if each is not None and each.waits_for(future)]


_collectors = _Collectors()


def collect(futures: Iterable[Future[Any]], collector: Collector) -> None:
    """Tells ``collector``, while it lives, if one of ``futures`` fails or has failed.

    What the others fail with is no news either: whoever waits is told of one failure, and
    asks those that it kept.
    """
    _collectors.add(collector)
    for future in futures:
        with future._lock:  # it may have looked for collectors just before
            future._collected = True
            error, failure = future._error, future._failure
        if error is not None and failure is not None:
            failure.seen = True
            collector.failed(error)


class _ShutOut(threading.local):
    """The completions that the running thread leaves to others."""

    left: list[Completion] | None = None
    """True while it must run no callbacks: it delivers, and holds a future's lock."""


_shut_out = _ShutOut()


@contextlib.contextmanager
def _callbacks_shut_out() -> Iterator[list[Completion]]:
    """Collects in the list what would run callbacks of futures that wait for several."""
    left: list[Completion] = []
    before, _shut_out.left = _shut_out.left, left
    try:
        yield left
    finally:
        _shut_out.left = before


class _Failure:
    """A future's error as torch knows it: how to raise it, and whether anybody saw it.

    Torch keeps this where the garbage collector does not look, and an error knows
    the frames, and so often the future, that it was raised in. Therefore the error
    stays with the future as long as that lives; after that, a stand-in is kept here.
    """

    __slots__ = ("_future", "seen", "stand_in")

    def __init__(self, future: Future[Any], seen: bool) -> None:
        self._future = weakref.ref(future)
        self.seen = seen
        self.stand_in: BaseException | None = None

    def reveal(self, _: object) -> None:
        """Raises the error; torch calls it when the future's value is asked for in any way."""
        self.seen = True
        raise self._find() or RuntimeError("the call failed, and its future is gone")

    def _find(self) -> BaseException | None:
        future = self._future()
        return self.stand_in if future is None else future._error


class Future(_TorchFuture[T]):
    """The result of an asynchronous call.

    A :class:`torch.futures.Future` (so ``wait``, ``value``, ``done``, ``then``,
    ``add_done_callback``, ``torch.futures.wait_all`` and ``collect_all`` work),
    which can also be awaited in asyncio code. A failure that nobody ever looks
    at is logged when the future is garbage; ``torch.futures.wait_all`` and
    ``collect_all`` look at all of theirs.

    Args:
        devices: as for torch's.
        description: what the future is the result of, for that log line.
        waiter: how to wait; the default sleeps.
        waker: called when the future is done, so that a waiter that does something
            else meanwhile looks at it.
        canceller: gives up the call that this is the result of.
    """

    # There may be thousands at a time, and each collection of garbage looks at what they have.
    __slots__ = (
        "_collected",
        "_description",
        "_error",
        "_failure",
        "_gate",
        "_is_open",
        "_lock",
        "_waiter",
        "_waker",
        "_watched",
        "canceller",
    )

    def __init__(
        self,
        *,
        devices: list[int | str | torch.device] | None = None,
        description: str = "a call",
        waiter: Waiter | None = None,
        waker: Callable[[], None] | None = None,
        canceller: Callable[[Future[Any]], bool] | None = None,
    ) -> None:
        # As torch's own, in one call less.
        torch._C.Future.__init__(self, [torch.device(each) for each in devices] if devices else [])
        self._description = description
        self._waiter = waiter
        self._waker = waker
        self.canceller = canceller
        self._error: BaseException | None = None
        self._failure: _Failure | None = None
        self._is_open = False
        self._gate: threading.Lock | None = None
        self._lock = RLock()
        self._watched = False
        self._collected = False

    def wait(self) -> T:
        """Blocks until the result is there and returns it, or raises the call's error."""
        try:
            if not _is_done(self) and _followed.found:
                _follow_kept()
            if not _is_done(self):
                with blocking():
                    if self._waiter is None:
                        self._sleep()
                    else:
                        wait_in_usual_modes(self._waiter, self.done, self._sleep)
            return self._taken(torch._C.Future.wait(self))
        finally:
            del self  # the error knows this frame, and must not keep the future alive

    def value(self) -> T:
        """Returns the result of a completed future, or raises its error."""
        try:
            if not self.done():
                raise RuntimeError(f"{self._description} is not done; wait for it first")
            return self._taken(torch._C.Future.value(self))
        finally:
            del self  # as in wait

    @staticmethod
    def _taken(result: T) -> T:
        if streams.is_in_use():
            streams.take(result)
        return result

    def cancel(self) -> bool:
        """Gives up the call whose result this is, which fails with ``CallCancelledError``.

        A handler that has not started will not; one that runs can ask
        :func:`rpc.cancelled`, and an ``async def`` one is cancelled.

        Returns:
            False if the call is over, or this is no call's result but, for example, that
            of :meth:`then`.
        """
        canceller = self.canceller
        if canceller is None or self.done() or not canceller(self):
            return False
        self._note_seen()
        return True

    def then(self, callback: Callable[..., S]) -> Future[S]:
        """Returns a future of what ``callback(self)`` returns once this one is done.

        The callback runs in the context (distributed autograd, deadline) of this
        call to ``then``. An error that it raises fails the returned future, as an error of
        its own type that is also a ``RuntimeError``; what is no ``Exception``, such as
        ``SystemExit``, as a ``RemoteError`` that names it.
        """
        _require_callback("then", callback)
        call = self._description.removeprefix(_CALLBACK)  # once is enough for a long chain
        child: Future[S] = Future(description=_CALLBACK + call)
        child._waiter, child._waker = self._waiter, self._waker
        self._note_seen()
        super().add_done_callback(_Then(callback, child))
        return child

    def add_done_callback(self, callback: Callable[..., None]) -> None:
        """Calls ``callback(self)`` when done, or now if it already is."""
        _require_callback("add_done_callback", callback)
        self._note_seen()
        super().add_done_callback(_Told(callback))

    def _note_seen(self) -> None:
        """Notes that somebody knows, or will, if it fails: no log need tell."""
        with self._lock:
            self._watched = True
            if self._failure is not None:
                self._failure.seen = True

    def complete_unless_watched(
        self, value: T | None, error: BaseException | None, leave: Callable[[Completion], object]
    ) -> bool:
        """Completes the future if that runs no callback; False, and nothing done, if it would.

        What waits for several futures may be done with this one. If that would run callbacks,
        it is not completed here: ``leave`` is given what completes it.
        """
        with self._lock:
            if self._watched or (error is not None and _collectors.of(self)):
                return False
            if not self._collected:
                self._complete(value, error)
                return True
            with _callbacks_shut_out() as left:
                self._complete(value, error)
        for completion in left:
            leave(completion)
        return True

    def complete_or_leave(self, value: T | None, error: BaseException | None) -> None:
        """Completes the future; later and elsewhere if the running thread must run no callback."""
        left = _shut_out.left
        if left is None:
            self._complete(value, error)
        elif not self.complete_unless_watched(value, error, left.append):
            left.append(partial(self._complete, value, error))

    def _complete(self, value: T | None, error: BaseException | None) -> None:
        if error is None:
            self.set_result(cast(T, value))
        else:
            self.set_exception(error)

    def set_result(self, result: T) -> None:
        """Completes the future with a value; once."""
        if streams.is_in_use():
            streams.leave(result)
        if self._watched or self._collected:  # callbacks, which may take long, run at once
            self._open_gate()
        try:
            torch._C.Future.set_result(self, result)
        finally:
            # Who waits makes a gate and looks whether it is open, in this order.
            self._is_open = True
            if self._gate is not None:
                self._open_gate()
        if self._waker is not None:
            self._waker()

    def set_exception(self, result: BaseException) -> None:  # type: ignore[override]
        """Completes the future with an error, which ``wait`` and ``value`` raise."""
        if not isinstance(result, BaseException):
            raise TypeError(f"set_exception() needs an exception, but got {result!r}")
        self._fail(result)
        self._tell_failure()

    def _fail(self, error: BaseException) -> None:
        if not self.done():
            self._error = error
            self._failure = _Failure(self, self._watched or self._collected)
            super()._set_unwrap_func(self._failure.reveal)
        self.set_result(cast(T, None))

    def _tell_failure(self) -> None:
        error, failure = self._error, self._failure
        if error is None or failure is None:
            return
        for collector in _collectors.of(self):
            failure.seen = True
            collector.failed(error)

    def complete_from(self, get: Callable[[], T]) -> None:
        """Completes the future with what ``get()`` returns, or fails it with what that raises."""
        try:
            value = get()
        except BaseException as error:  # such as a SystemExit of somebody's pickling
            self.set_exception(raisable(error))
        else:
            self.set_result(value)

    def __await__(self) -> Generator[Any, None, T]:
        """Waits without blocking the running asyncio loop."""
        loop = asyncio.get_running_loop()
        bridge: asyncio.Future[None] = loop.create_future()

        def wake() -> None:
            if not bridge.done():
                bridge.set_result(None)

        def done(_: object) -> None:
            with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
                loop.call_soon_threadsafe(wake)

        self.add_done_callback(done)
        yield from bridge
        return self._taken(torch._C.Future.value(self))

    def _open_gate(self) -> None:
        self._is_open = True
        with self._lock:
            gate, self._gate = self._gate, None
        if gate is not None:
            gate.release()

    def _sleep(self) -> None:
        """Sleeps until it is all but done; torch's own wait keeps signal handlers from running."""
        with self._lock:
            gate = self._gate
            if gate is None:
                gate = threading.Lock()
                gate.acquire()
                self._gate = gate
            if self._is_open:
                return
        before = let_in()
        try:
            with gate:  # one after the other, all that wait go through
                pass
        finally:
            restore(before)

    def __del__(self) -> None:
        failure = getattr(self, "_failure", None)
        if failure is None or self._error is None:
            return
        failure.stand_in = _stand_in(self._error)
        if not failure.seen:
            kind, text = _name_of(type(self._error)), text_of(failure.stand_in)  # logs may be kept
            _logger.error("%s failed and nobody looked: %s: %s", self._description, kind, text)


def _let_go(done: object) -> None:
    """Wakes whoever waits for a future whose callbacks run, also a callback hung there just now."""
    if isinstance(done, Future):
        done._is_open = True
        if done._gate is not None:
            done._open_gate()


class _Followed(threading.local):
    """The chains of futures that the running thread follows."""

    nested: int = 0
    """The number of their links under way, each from within the completion of the one before."""
    turns: int = 0
    """The number of times it follows links one after another, each from within the one before."""
    found: list[tuple[_Link, object]] | None = None
    """Set while those that are met are kept for later."""


_followed = _Followed()


class _Link(ABC):
    """A call that a done future makes: a user's function, and what is done after it.

    That may be another future's completion, here or in the function itself, and so lead to
    the next link, some frames deeper. The first links of a chain are followed so, as torch
    does; those of a long one after each other, in the same order, or Python would run out of
    frames and the rest would never be done. Links that a function meets are followed at once
    as long as there is room, as it may wait for them in some way that is not seen here.
    """

    __slots__ = ()

    def __call__(self, done: object) -> None:
        _let_go(done)
        here = _followed
        if here.found is not None:
            here.found.append((self, done))
        elif here.nested < _MOST_NESTED:
            here.nested += 1
            try:
                complete = self._outcome(done)
                if complete is not None:
                    complete()
            finally:
                here.nested -= 1
        else:
            _follow_in_turn([(self, done)])

    def links_after(self, done: object) -> list[tuple[_Link, object]]:
        """Follows this link, but not those that it leads to, which are returned."""
        here = _followed
        before = here.found
        links: list[tuple[_Link, object]] = []
        try:
            here.found = None if here.turns < _MOST_TURNS else links
            complete = self._outcome(done)
            here.found = links
            if complete is not None:
                complete()
        except Exception:
            _logger.exception("a callback of a future, or the completion of its own, failed")
        finally:
            here.found = before
        return links

    @abstractmethod
    def _outcome(self, done: object) -> Completion | None:
        """Runs the function; returns what is done after it, if anything is."""


class _Told(_Link):
    """The link that ``add_done_callback`` hangs on a future: a callback."""

    __slots__ = ("_callback",)

    def __init__(self, callback: Callable[..., object]) -> None:
        self._callback = callback

    def _outcome(self, done: object) -> None:
        self._callback(done)


class _Then(_Link):
    """The link that ``then`` hangs on a future: a callback, and the future of what it returns.

    The callback runs in the context and the grad mode in which it was hung there, whoever
    completes the future.
    """

    __slots__ = ("_callback", "_child", "_context", "_has_grad")

    def __init__(self, callback: Callable[..., Any], child: Future[Any]) -> None:
        self._callback = callback
        self._child = child
        self._context = contextvars.copy_context()
        self._has_grad = torch.is_grad_enabled()

    def _outcome(self, done: object) -> Completion:
        try:
            if torch.is_grad_enabled() == self._has_grad:
                value = self._context.run(self._callback, done)
            else:
                with torch.set_grad_enabled(self._has_grad):
                    value = self._context.run(self._callback, done)
        except BaseException as error:
            return partial(self._child.set_exception, _as_runtime_error(error))
        return partial(self._child.set_result, value)


def _follow_in_turn(links: list[tuple[_Link, object]]) -> None:
    here = _followed
    here.turns += 1
    left = links[::-1]
    try:
        while left:
            link, done = left.pop()
            left += reversed(link.links_after(done))
    finally:
        here.turns -= 1


def _follow_kept() -> None:
    """Follows what the running thread has kept for later: it is about to wait."""
    while found := _followed.found:
        kept = found[:]
        found.clear()
        _follow_in_turn(kept)


def _stand_in(error: BaseException) -> BaseException:
    """A copy of ``error`` that knows no frames; runs next to no code, for finalizers."""
    try:
        return bare_copy(error)
    except BaseException:
        return RuntimeError(f"{_name_of(type(error))}: {text_of(error)}")


def _require_callback(method: str, callback: object) -> None:
    if not callable(callback):
        raise TypeError(f"{method}(): incompatible function arguments. Got {callback!r}")


def _as_runtime_error(error: BaseException) -> BaseException:
    """The error of a future whose callback raised ``error``. Never raises: nobody else would."""
    kind = type(error)  # its class may answer for what it is
    if issubclass(kind, RuntimeError):
        return error
    told = _retold(error)
    _set_cause(told, error)
    return told


def _retold(error: BaseException) -> BaseException:
    text = ""
    try:
        text = text_of(error)
        return retell(error, text) if isinstance(error, Exception) else raisable(error)
    except BaseException:  # it, or its class, raises where it is asked for what it has
        return RemoteError(f"{_name_of(type(error))}: {text}")
