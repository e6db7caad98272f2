"""``rref.rpc_sync().method(...)`` and its siblings: calls through a reference."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from rpc.rrefs import rref as handles  # which imports this module
from rpc.runtime import finalizers

if TYPE_CHECKING:
    from rpc.rrefs.rref import RRef


class RRefProxy:
    """Turns attribute access into calls of the referenced value's methods on its owner.

    Args:
        rref: whose value.
        flavour: ``rpc_sync``, ``rpc_async`` or ``remote``.
        timeout: seconds of each call; -1 for the default, 0 for no limit.
    """

    def __init__(self, rref: RRef[Any], flavour: str, timeout: float) -> None:
        # Mangled, as methods of the value may have any name.
        self.__rref = rref
        self.__flavour = flavour
        self.__timeout = timeout

    def __getattr__(self, name: str) -> Callable[..., Any]:
        # A closure that refers to itself would be garbage that only the collector frees.
        return partial(_call, self.__rref, name, self.__flavour, self.__timeout)


def _call(
    rref: RRef[Any], name: str, flavour: str, timeout: float, /, *args: Any, **kwargs: Any
) -> Any:
    references, holding = rref._keeper, rref._holding
    calls = references.calls
    if finalizers.collecting and finalizers.running():
        if flavour != "rpc_async":
            finalizers.refuse(flavour)
        return calls.later(lambda: _call(rref, name, flavour, timeout, *args, **kwargs))
    if flavour == "remote":
        _require_attribute(rref, name, timeout)
    if flavour != "rpc_sync":  # which finds out itself, before anything is sent
        references.require_usable(holding)
    start, owner = getattr(calls, flavour), references.owner_of(holding)
    return start(owner, handles.call_method, (rref, name, *args), kwargs, timeout)


def _require_attribute(rref: RRef[Any], name: str, timeout: float) -> None:
    """Raises at the caller what a ``remote()`` would otherwise raise where its value is used."""
    kind = rref._get_type(timeout)
    if hasattr(kind, name):
        return
    owner, calls = rref.owner(), rref._keeper.calls
    if not calls.rpc_sync(owner, handles.has_attribute, (rref, name), None, timeout):
        raise AttributeError(f"{kind.__name__!r} object has no attribute {name!r}")
