"""Lets TorchScript functions be called like Python functions, and says when they cannot.

They have a schema instead of a signature, a qualified name instead of a module and
a name, and errors in words of their own, which programs may look for.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch

from rpc.errors import RpcError, caused

_NO_AGENT: Final = "Current RPC agent is not set!"
"""Begins what torch raises in TorchScript code that makes a call where no agent of torch's runs."""


def asynchronous(script: Any) -> Callable[..., torch.futures.Future[Any]]:
    """A Python function that calls ``script`` and stands where that is defined.

    It raises ``RuntimeError`` if ``script`` returns anything but a future.
    """

    @functools.wraps(script)
    def wrapper(*args: Any, **kwargs: Any) -> torch.futures.Future[Any]:
        result = script(*args, **kwargs)
        if isinstance(result, torch._C.Future):
            return result  # type: ignore[return-value]
        raise RuntimeError(
            f"Async functions must return an IValue of Future type, but got {type(result).__name__}"
        )

    module, _, name = script.qualified_name.removeprefix("__torch__.").rpartition(".")
    wrapper.__module__ = module or "__main__"
    wrapper.__name__ = wrapper.__qualname__ = name
    return wrapper


def check_arguments(script: Any, args: Sequence[object], kwargs: Mapping[str, object]) -> None:
    """Sees at the caller whether ``script`` can be called so; types are checked where it runs.

    Raises:
        RuntimeError: there are too many arguments, too few, or some it does not know.
    """
    schema = script.schema
    names = [each.name for each in schema.arguments]
    if len(args) > len(names):
        raise RuntimeError(
            f"{schema.name}() expected at most {len(names)} argument(s) but received "
            f"{len(args)} argument(s). Declaration: {schema}"
        )
    rest = schema.arguments[len(args) :]
    unknown = kwargs.keys() - {each.name for each in rest}
    if unknown:
        raise RuntimeError(
            f"{schema.name}() got an unexpected argument {min(unknown)!r}. Declaration: {schema}"
        )
    missing = [e.name for e in rest if e.name not in kwargs and not e.has_default_value()]
    if missing:
        raise RuntimeError(
            f"{schema.name}() is missing value for argument {missing[0]!r}. Declaration: {schema}"
        )


def explained(error: BaseException) -> BaseException:
    """The error that a function raised, or one that says why its TorchScript code cannot call.

    Calls that TorchScript code makes itself are carried by torch's agent, which runs over
    TENSORPIPE only.
    """
    if type(error) is not RuntimeError or _NO_AGENT not in str(error):
        return error
    told = RpcError(
        "TorchScript code can make remote calls over TENSORPIPE only, and this worker's backend is "
        "another: set RPC_BACKEND=TENSORPIPE for every worker, or make the call from Python"
    )
    return caused(told, error).with_traceback(error.__traceback__)
