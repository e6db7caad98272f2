"""The deadline that a handler inherits, if it is still wanted, and how timeouts are read.

Owns the one place where torch's conventions (-1 = default, 0 = no limit) are
translated; inside, a timeout is seconds, and 0 means none.
"""

from __future__ import annotations

import contextvars
import math
from collections.abc import Callable
from typing import Protocol, SupportsFloat

from rpc.constants import UNSET_RPC_TIMEOUT
from rpc.errors import RpcTimeoutError


class Scope(Protocol):
    """The request that the running code serves."""

    deadline: float
    """The time on the agent's clock when nobody waits for its result any more; 0 for never."""
    cancelled: bool
    """True if nobody waits for its result any more."""

    def when_cancelled(self, wake: Callable[[], None]) -> Callable[[], None]:
        """Calls ``wake`` when it is cancelled, or now; returns what undoes this."""


_scope: contextvars.ContextVar[Scope | None] = contextvars.ContextVar("rpc_scope", default=None)

_MIN_TIMEOUT = 1e-6
FOREVER = 1e9
"""Seconds that mean no limit, as do more."""


enter = _scope.set
"""Makes a request's deadline bound every call made in the current context."""
scope = _scope.get
"""The request that the running code serves; None outside of handlers."""


def cancelled(now: float) -> bool:
    """True if nobody waits for the result of what runs in the current context."""
    serving = scope()
    return serving is not None and is_over(serving, now)


def is_over(request: Scope, now: float) -> bool:
    """True if nobody waits for the result of a request."""
    return request.cancelled or 0.0 < request.deadline <= now


def is_cancelled() -> bool:
    """True if the caller of what runs in the current context gave it up, or is gone."""
    serving = scope()
    return serving is not None and serving.cancelled


def when_cancelled(wake: Callable[[], None]) -> Callable[[], None]:
    """Calls ``wake`` once nobody waits for the result of what runs in the current context.

    That it is past its deadline is not told.

    Args:
        wake: called at most once, on any thread, or at once; must not block.

    Returns:
        What undoes this; to be called when ``wake`` is not needed any more.
    """
    serving = scope()
    return _nothing if serving is None else serving.when_cancelled(wake)


_nothing: Callable[[], None] = [].clear
"""Does nothing, without a function of Python's."""


class Timeouts:
    """The time that a worker's calls may take.

    Args:
        default: of those that say nothing, in seconds, 0 for no limit; may be changed.
        now: the worker's clock, in seconds.
    """

    __slots__ = ("default", "now")

    def __init__(self, default: float, now: Callable[[], float]) -> None:
        self.default = default
        self.now = now

    def of(self, timeout: SupportsFloat) -> float:
        """Seconds left to an operation; see :func:`effective_timeout`."""
        return effective_timeout(timeout, self.default, self.now())


def seconds_of(value: object, argument: str) -> float:
    """A time as the user gave it, which may be of any type of real number.

    Args:
        value: in seconds.
        argument: what the user calls it.

    Raises:
        TypeError: it is no number.
    """
    if isinstance(value, (float, int, SupportsFloat)):
        try:
            return float(value)
        except OverflowError:
            return math.inf if value > 0 else -math.inf  # type: ignore[operator]
        except Exception:  # of a type's own; a tensor of several elements has it, too
            pass
    raise TypeError(f"{argument} must be a number of seconds, but got {value!r}")


def limit_of(seconds: float) -> float:
    """A limit in seconds as it is sent: 0 if there is none, or a billion or more."""
    return 0.0 if seconds >= FOREVER else seconds


def effective_timeout(timeout: SupportsFloat, default: float, now: float) -> float:
    """The time left to a call: its own timeout, or its caller's if that ends earlier.

    Args:
        timeout: seconds as the user gave them; -1 means ``default``, 0 no limit;
            so does a billion or more.
        default: the agent's timeout in seconds, 0 for no limit.
        now: the agent's clock, which the inherited deadline refers to.

    Raises:
        RpcTimeoutError: nothing is left, or ``timeout`` is no time.
        TypeError: it is no number.
    """
    if type(timeout) is not float:
        timeout = seconds_of(timeout, "timeout")
    if timeout == UNSET_RPC_TIMEOUT:
        timeout = default
    elif not timeout >= 0:
        raise RpcTimeoutError(
            f"RPC ran for more than set timeout ({timeout * 1000:g} ms): "
            "timeout must be >= 0 seconds, or -1 for the default"
        )
    if timeout >= FOREVER:
        timeout = 0.0
    serving = scope()
    if serving is None or not serving.deadline:
        return timeout
    left = serving.deadline - now
    if left <= 0:
        raise RpcTimeoutError(
            "RPC ran for more than the timeout of the call it was made in, and was not sent"
        )
    return max(min(timeout, left) if timeout else left, _MIN_TIMEOUT)
