"""The deadline that a handler inherits, and how a timeout argument is read.

Owns the one place where torch's conventions (-1 = default, 0 = no limit) are
translated; inside, a timeout is seconds, and 0 means none.
"""

from __future__ import annotations

import contextvars

from rpc.constants import UNSET_RPC_TIMEOUT
from rpc.errors import RpcTimeoutError

_deadline: contextvars.ContextVar[float] = contextvars.ContextVar("rpc_deadline", default=0.0)

_MIN_TIMEOUT = 1e-6
_FOREVER = 1e9


def inherit(deadline: float) -> None:
    """Makes ``deadline`` (0 = none) bound every call made in the current context."""
    _deadline.set(deadline)


def effective_timeout(timeout: float, default: float, now: float) -> float:
    """What is left to a call: its own timeout, or its caller's if that ends earlier.

    Args:
        timeout: seconds as the user gave them; -1 means ``default``, 0 no limit;
            so does a billion or more.
        default: the agent's timeout in seconds, 0 for no limit.
        now: the agent's clock, which the inherited deadline refers to.

    Raises:
        RpcTimeoutError: nothing is left, or ``timeout`` is no time.
    """
    if timeout == UNSET_RPC_TIMEOUT:
        timeout = default
    elif not timeout >= 0:
        raise RpcTimeoutError(
            f"RPC ran for more than set timeout ({timeout * 1000:g} ms): "
            "timeout must be >= 0 seconds, or -1 for the default"
        )
    if timeout >= _FOREVER:
        timeout = 0.0
    deadline = _deadline.get()
    if not deadline:
        return timeout
    left = deadline - now
    if left <= 0:
        raise RpcTimeoutError(
            "RPC ran for more than the timeout of the call it was made in, and was not sent"
        )
    return max(min(timeout, left) if timeout else left, _MIN_TIMEOUT)
