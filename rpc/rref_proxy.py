"""``rref.rpc_sync().method(...)`` and its siblings: calls through a reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rpc import finalizers
from rpc.rref import RRef, call_method

if TYPE_CHECKING:
    from rpc.agent import Agent


class RRefProxy:
    """Turns attribute access into calls of the referenced value's methods on its owner.

    Args:
        rref: whose value.
        flavour: ``rpc_sync``, ``rpc_async`` or ``remote``.
        timeout: seconds of each call; -1 for the default, 0 for no limit.
    """

    def __init__(self, rref: RRef[Any], flavour: str, timeout: float) -> None:
        self._rref = rref
        self._flavour = flavour
        self._timeout = timeout

    def __getattr__(self, name: str) -> Callable[..., Any]:
        rref, flavour, timeout = self._rref, self._flavour, self._timeout

        def call(*args: Any, **kwargs: Any) -> Any:
            agent: Agent = rref._keeper.agent
            if finalizers.running():
                if flavour != "rpc_async":
                    finalizers.refuse(flavour)
                return agent.later(lambda: call(*args, **kwargs))
            if flavour == "remote":
                _require_method(rref._get_type(timeout), name)
            rref._keeper.require_usable(rref._holding)
            start = getattr(agent, flavour)
            return start(rref.owner(), call_method, (rref, name, args, kwargs), None, timeout)

        return call


def _require_method(kind: type, name: str) -> None:
    if not hasattr(kind, name):
        raise AttributeError(f"type object {kind.__name__!r} has no attribute {name!r}")
