"""Names calls: in errors, dumps, metrics, profiles and traces.

Caller and callee name the same call alike, before anything of it was run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rpc.rrefs.rref import call_method
from rpc.wire import codec
from rpc.wire.messages import Operation, Request

MethodName = bytes | str
"""A method's name, or, to save time, how the codec names a function that is found by name."""

UNDECODED = "(undecoded)"
"""The name of a call whose own is only in its payload, which nobody has looked at."""

_TORCH_FUNCTIONS = "_VariableFunctionsClass."


def method_name(func: object, args: Sequence[Any]) -> str:
    """The name of what a call asks for; few distinct ones in any program.

    A method called through a reference is ``RRef.<its name>``, whatever the
    value's type, which only the owner knows. A callable without a name of its
    own goes by that of its type, a TorchScript function by its qualified name.
    """
    if func is call_method:
        return f"RRef.{args[1]}"
    if isinstance(func, torch.jit.ScriptFunction):  # its ``__qualname__`` is that of the class
        return str(func.qualified_name)
    try:
        name = func.__qualname__  # type: ignore[attr-defined]
    except AttributeError:
        return type(func).__qualname__
    return name if type(name) is str else type(func).__qualname__


def announced_name(request: Request) -> MethodName:
    """The name of what a request asks for, as far as its header tells."""
    if request.operation is Operation.FETCH:
        return "to_here"
    if request.operation is Operation.EXTENSION:
        return f"{request.target.decode(errors='replace')} message"
    if request.operation is Operation.METHOD:
        return f"RRef.{request.function.decode(errors='replace')}"
    if not request.function or request.function == codec.name_of(call_method):
        return UNDECODED
    return request.function


def text_of(name: MethodName) -> str:
    """A method's name as people know it: its ``__qualname__``, or ``torch.add``."""
    if isinstance(name, bytes):
        module, _, name = name.decode("utf-8", "replace").rpartition("\0")
        return f"torch.{name}" if module == "torch" else name
    if name.startswith(_TORCH_FUNCTIONS):
        return "torch." + name[len(_TORCH_FUNCTIONS) :]
    return name


def operator_name(name: str) -> str:
    """A name in profiles, which call torch's operators as the dispatcher does: ``aten::add``."""
    return f"aten::{name[6:]}" if name.startswith("torch.") else name


def span_name(kind: str, name: str, here: str, there: str) -> str:
    """The name of a call's span in profiles and traces; the same as in the original.

    Args:
        kind: ``sync``, ``async``, ``remote``, ``to_here``, or ``message`` for an extension's.
        name: of the function.
        here: name of the calling worker.
        there: name of the other.
    """
    if kind == "to_here":
        return f"to_here#({here})->({there})"
    if kind == "message":
        return f"{name}({here} -> {there})"
    return f"rpc_{kind}#{operator_name(name)}({here} -> {there})"
