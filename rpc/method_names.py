"""What a call is called: in errors, dumps, metrics, profiles and traces.

Caller and callee name the same call alike, before anything of it was run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rpc.rref import call_method

_TORCH_FUNCTIONS = "_VariableFunctionsClass."


def method_name(func: object, args: Sequence[Any]) -> str:
    """The name of what a call asks for; few distinct ones in any program.

    A method called through a reference is ``RRef.<its name>``, whatever the
    value's type, which only the owner knows. A callable without a name of its
    own goes by that of its type.
    """
    if func is call_method:
        return f"RRef.{args[1]}"
    try:
        name = func.__qualname__  # type: ignore[attr-defined]
    except AttributeError:
        return type(func).__qualname__
    return name if type(name) is str else type(func).__qualname__


def shown(name: str) -> str:
    """A method's name as people know it: ``torch.add``, not the class torch keeps it in."""
    if name.startswith(_TORCH_FUNCTIONS):
        return "torch." + name[len(_TORCH_FUNCTIONS) :]
    return name


def operator_name(name: str) -> str:
    """A method's name in profiles, which call operators by their torch name: ``aten::add``."""
    if name.startswith(_TORCH_FUNCTIONS):
        return "aten::" + name[len(_TORCH_FUNCTIONS) :]
    return name


def span_name(kind: str, name: str, here: str, there: str) -> str:
    """The name of a call's span in profiles and traces; the same as in the original.

    Args:
        kind: ``sync``, ``async``, ``remote`` or ``to_here``.
        name: of the function.
        here: name of the calling worker.
        there: name of the other.
    """
    if kind == "to_here":
        return f"to_here#({here})->({there})"
    return f"rpc_{kind}#{operator_name(name)}({here} -> {there})"
