"""Takes the outcome of an outgoing request to a waiting thread or a future.

A sink is told once, by whatever thread learns of it, that the reply arrived or
that the call failed. Unpacking a reply may run user code (``__setstate__``,
callbacks), so a sink decides on which thread that happens: the waiting caller's
own, the system executor's, or a delivering thread that the transport can spare.
Even a future that no Python code watches may have callbacks: torch's
``collect_all`` leaves them where Python does not see them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

from rpc.errors import DecodeError, caused
from rpc.outcomes.futures import Future, Waiter
from rpc.runtime import torch_modes
from rpc.runtime.current_thread import current
from rpc.runtime.executor import blocking
from rpc.runtime.signals import let_in, restore
from rpc.runtime.torch_modes import function_modes as _function_modes
from rpc.runtime.torch_modes import is_inference as _is_inference
from rpc.transports.base import Frame, Unreceived
from rpc.wire.codec import ImportNeeded, decode, decode_loaded
from rpc.wire.messages import BARE_REPLY, Reply
from rpc.wire.simple_values import NOT_SIMPLE, decode_simple


class RunsCompletions(Protocol):
    """Runs what completes a future, on a thread that may run user code."""

    lends_delivery: bool
    """True if delivering threads may complete a future that has no callbacks we know of."""

    def submit(self, task: Callable[[], None]) -> None:
        """Queues ``task``."""

    def run_on_delivery(self, task: Callable[[], None]) -> None:
        """Runs ``task`` on the calling, delivering thread if the transport can spare it."""


Decode = Callable[..., Any]
Adopt = Callable[[bytes], object]
"""Takes the references that came with a reply, which are let go of with what it returns."""
Unpack = Callable[[Reply, Frame, Decode], Any]


class Sink(Protocol):
    """Takes the outcome of one request."""

    def replied(self, reply: Reply, frame: Frame, unpack: Unpack) -> None:
        """Takes the reply; ``unpack`` returns its value or raises its error."""

    def failed(self, error: Exception) -> None:
        """Takes the error, as there will be no reply."""


class WaitingCaller:
    """A thread that blocks until the outcome is there, and unpacks it itself.

    Attributes:
        is_waiting: the outcome was not there yet when the thread last looked.
    """

    __slots__ = ("_adopt", "_arrived", "_told", "is_waiting")

    def __init__(self) -> None:
        self._adopt: list[Adopt] | None = None
        self._arrived = threading.Lock()
        self._arrived.acquire()
        self._told: list[tuple[Reply, Frame, Unpack] | Exception] = []
        self.is_waiting = True

    def replied(self, reply: Reply, frame: Frame, unpack: Unpack) -> None:
        """Hands the packed reply to the waiting thread."""
        self._told.append((reply, frame, unpack))
        if self._adopt is not None:
            self._drop(self._adopt)
        self._arrived.release()

    def failed(self, error: Exception) -> None:
        """Hands the error to the waiting thread."""
        self._told.append(error)
        self._arrived.release()

    def abandon(self, adopt: Adopt) -> None:
        """Waits no more; the references of a reply are let go of unread.

        For a call that has ended: its reply is here, or is being handed over.
        """
        self._adopt = [adopt]
        if self._told:
            self._drop(self._adopt)

    def _drop(self, adopt: list[Adopt]) -> None:
        """Drops the reply on whichever of the two threads comes last, or the first if they meet."""
        with suppress(IndexError):
            take = adopt.pop()
            told = self._told.pop()
            if isinstance(told, tuple) and told[0].references:
                take(told[0].references)

    def result(self, wait: Waiter) -> Any:
        """Blocks; returns the reply's value or raises the call's error.

        What is no ``Exception`` and raised by unpacking the reply becomes a ``DecodeError``.
        """
        if _is_inference() or _function_modes():
            with torch_modes.usual():
                return self.result(wait)
        told = self._told
        is_there = told.__len__  # a function of Python's would take longer than it does
        if current.place is None:
            wait(is_there, self._block)
        else:
            with blocking():
                wait(is_there, self._block)
        self.is_waiting = False
        outcome = told.pop()  # it refers to the call, which refers to this
        if not isinstance(outcome, tuple):
            raise outcome
        reply, frame, unpack = outcome
        if reply is BARE_REPLY and type(frame[3]) is not Unreceived:
            value = decode_simple(frame[3], (), ())
            if value is not NOT_SIMPLE:
                return value
        try:
            return unpack(reply, frame, decode)
        except Exception:
            raise
        except BaseException as error:  # of the value's, as signal handlers are shut out here
            raise caused(harmless(error), error) from error

    def _block(self) -> None:
        before = let_in()
        try:
            self._arrived.acquire()
        finally:
            restore(before)


class FutureSink:
    """A future that the outcome completes."""

    __slots__ = ("_completions", "future")

    def __init__(self, future: Future[Any], completions: RunsCompletions) -> None:
        self.future = future
        self._completions = completions

    def replied(self, reply: Reply, frame: Frame, unpack: Unpack) -> None:
        """Unpacks the reply and completes the future, off this thread if need be."""
        outcome = _simple_outcome(reply, frame, unpack)
        if outcome is None:
            self._completions.run_on_delivery(
                lambda: self._complete(*_outcome(reply, frame, unpack))
            )
        elif not (
            self._completions.lends_delivery
            and self.future.complete_unless_watched(*outcome, self._completions.submit)
        ):
            self._completions.run_on_delivery(lambda: self._complete(*outcome))

    def failed(self, error: Exception) -> None:
        """Fails the future, off this thread, on which everybody's deadlines may depend."""
        self._completions.submit(lambda: self._complete(None, error))

    def _complete(self, value: Any, error: Exception | None) -> None:
        if error is None:
            self.future.set_result(value)
        else:
            self.future.set_exception(error)


Answered = Callable[[Any, Exception | None], None]
"""Takes the value of a reply, or the error of the call."""


class AnswerSink:
    """A function of the framework's own, called where the reply is delivered.

    Args:
        answered: must neither block nor run user code.
        completions: runs it where an error, which may run code as it is unpacked, came.
    """

    __slots__ = ("_answered", "_completions")

    def __init__(self, answered: Answered, completions: RunsCompletions) -> None:
        self._answered = answered
        self._completions = completions

    def replied(self, reply: Reply, frame: Frame, unpack: Unpack) -> None:
        """Passes the reply on, at once if that runs no code of others."""
        outcome = _simple_outcome(reply, frame, unpack)
        if outcome is not None:
            self._answered(*outcome)
        else:
            self._completions.submit(lambda: self._answered(*_outcome(reply, frame, unpack)))

    def failed(self, error: Exception) -> None:
        """Passes the error on, off this thread, on which everybody's deadlines may depend."""
        self._completions.submit(lambda: self._answered(None, error))


class AwaitedAnswerSink(AnswerSink):
    """A sink whose thread waits soon, and has the answer delivered then."""

    __slots__ = ()


READ_BY_SENDER = (WaitingCaller, AwaitedAnswerSink)
"""Sinks whose reply need not be read before the thread that sent the request waits."""


def _simple_outcome(
    reply: Reply, frame: Frame, unpack: Unpack
) -> tuple[Any, Exception | None] | None:
    """Unpacks what can be unpacked anywhere, for it runs no code of others; None if it might."""
    if not reply.plain or reply.references or reply.extensions:
        return None
    try:
        return unpack(reply, frame, decode_loaded), None
    except ImportNeeded:
        return None
    except Exception as error:
        return None, error


def _outcome(reply: Reply, frame: Frame, unpack: Unpack) -> tuple[Any, Exception | None]:
    try:
        return unpack(reply, frame, decode), None
    except BaseException as error:
        return None, harmless(error)


def harmless(error: BaseException) -> Exception:
    """The error to tell for one of unpacking, which must end neither this thread nor who waits."""
    if isinstance(error, Exception):
        return error
    return caused(DecodeError(f"unpacking what arrived raised {type(error).__name__}"), error)
