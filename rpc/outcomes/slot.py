"""A place for a value that some thread will fill and others wait for.

What an owner keeps for each RRef. Unlike a future it may stay unfilled or fail
without anybody being told.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, NoReturn

import torch

from rpc.errors import CallCancelledError, RpcTimeoutError
from rpc.outcomes.futures import Waiter, wait_in_usual_modes
from rpc.runtime import deadlines, streams
from rpc.runtime.executor import blocking
from rpc.wire.kept_errors import again

_WITHOUT_CODE = frozenset({type(None), bool, int, float, str, bytes, torch.Tensor})


class Slot:
    """Empty, filled with a value, or failed with an error; once."""

    __slots__ = ("_callbacks", "_done", "_error", "_lock", "_value", "_waiting")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: list[threading.Lock] = []  # each is held, and let go to wake who waits
        self._callbacks: list[Callable[[Slot], None]] = []
        self._done = False
        self._value: Any = None
        self._error: BaseException | None = None

    def fill(self, value: Any) -> None:
        """Gives the value; ignored if the slot was filled or failed before."""
        if streams.is_in_use():
            streams.leave(value)
        self._settle(value, None)

    def fail(self, error: BaseException) -> None:
        """Gives the error instead of a value."""
        self._settle(None, error)

    def done(self) -> bool:
        """True once filled or failed."""
        return self._done

    def error(self) -> BaseException | None:
        """The error it failed with; None unless it did."""
        return self._error

    def runs_no_code(self) -> bool:
        """True if what it keeps can be freed on any thread."""
        return type(self._value) in _WITHOUT_CODE

    def value(self) -> Any:
        """The value of a slot that is done; raises a copy of its error."""
        if self._error is not None:
            raise again(self._error)
        if streams.is_in_use():
            streams.take(self._value)
        return self._value

    def wait(self, timeout: float = 0.0) -> Any:
        """Blocks until done, then does as :meth:`value`; ``timeout`` in seconds, 0 for none.

        Raises:
            RpcTimeoutError: the time is over.
            CallCancelledError: nobody waits any more for the handler that this is called in.
        """
        if not self._done:
            with blocking():
                self._await(timeout or None)
            if not self._done:
                self._give_up(timeout)
        return self.value()

    def wait_with(self, waiter: Waiter) -> None:
        """Waits until done in the way of ``waiter``, as long as it takes."""
        with blocking():
            wait_in_usual_modes(waiter, self.done, self._sleep)

    def _give_up(self, timeout: float) -> NoReturn:
        if deadlines.is_cancelled():
            raise CallCancelledError(
                "the value of an RRef was waited for in a handler that its caller gave up"
            )
        raise RpcTimeoutError(
            f"RPC ran for more than set timeout ({timeout * 1000:g} ms) while "
            "waiting for the value of an RRef"
        )

    def _sleep(self) -> None:
        woken = self._queue()
        if woken is not None:
            woken.acquire()

    def _await(self, timeout: float | None) -> None:
        """Waits until done, or that is of no use any more."""
        woken = self._queue()
        if woken is None:
            return
        forget = deadlines.when_cancelled(partial(self._wake, woken))
        try:
            if not woken.acquire(timeout=-1 if timeout is None else timeout):
                self._wake(woken)
        finally:
            forget()

    def _queue(self) -> threading.Lock | None:
        """A lock that is let go when this is done; None if it is."""
        woken = threading.Lock()
        woken.acquire()
        with self._lock:
            if self._done:
                return None
            self._waiting.append(woken)
        return woken

    def _wake(self, woken: threading.Lock) -> None:
        with self._lock:
            if woken in self._waiting:
                self._waiting.remove(woken)
                woken.release()

    def waiters(self) -> int:
        """Threads that wait for it."""
        with self._lock:
            return len(self._waiting)

    def when_done(self, callback: Callable[[Slot], None]) -> None:
        """Calls ``callback(self)`` on the filling thread, or now if done."""
        with self._lock:
            if not self._done:
                self._callbacks.append(callback)
                return
        callback(self)

    def forget(self, callback: Callable[[Slot], None]) -> None:
        """Does not call one given to :meth:`when_done` any more, if it has not yet."""
        with self._lock, suppress(ValueError):
            self._callbacks.remove(callback)

    def _settle(self, value: Any, error: BaseException | None) -> None:
        with self._lock:
            if self._done:
                return
            self._value, self._error, self._done = value, error, True
            callbacks, self._callbacks = self._callbacks, []
            waiting, self._waiting = self._waiting, []
        for woken in waiting:
            woken.release()
        for callback in callbacks:
            callback(self)
