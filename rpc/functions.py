"""Decorators for functions that other workers call."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

from rpc.wire.script_functions import asynchronous

P = ParamSpec("P")
T = TypeVar("T")


def async_execution(
    fn: Callable[P, torch.futures.Future[T]],
) -> Callable[P, torch.futures.Future[T]]:
    """Marks a function whose returned future's value, not the future, is the call's result.

    The reply is sent when the future completes; until then no handler thread is
    held. With ``staticmethod`` or ``classmethod``, this decorator is the inner one.

    Args:
        fn: must return a ``torch.futures.Future``; anything else fails the call
            with ``RuntimeError``.

    Raises:
        TypeError: ``fn`` cannot be called, as a ``classmethod`` object cannot.

    Example::

        @rpc.functions.async_execution
        def add_chained(to, x, y, z):
            return rpc.rpc_async(to, torch.add, args=(x, y)).then(lambda f: f.wait() + z)
    """
    if not callable(fn):
        raise TypeError(
            f"{fn!r} cannot be marked as async_execution, as it cannot be called; "
            "mark a function, inside of classmethod"
        )

    @functools.wraps(fn)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> torch.futures.Future[T]:
        return fn(*args, **kwargs)

    if isinstance(fn, torch.jit.ScriptFunction):
        wrapper = asynchronous(fn)  # type: ignore[assignment]
    wrapper._wrapped_async_rpc_function = fn  # type: ignore[attr-defined]
    return wrapper


def idempotent(fn: Callable[P, T]) -> Callable[P, T]:
    """Declares that it does no harm to run a function more than once; returns it.

    Only such functions can be called with ``retry=``. Order among other decorators
    does not matter.

    Args:
        fn: the function.

    Raises:
        TypeError: the function cannot be marked, as it is built in; wrap it in one of
            your own.

    Example::

        @rpc.functions.idempotent
        def fetch(key):
            return table[key]
    """
    try:
        fn._rpc_idempotent = True  # type: ignore[attr-defined]
        if isinstance(fn, staticmethod | classmethod):  # looked up in its class it is the inner one
            fn.__func__._rpc_idempotent = True  # type: ignore[attr-defined]
    except (AttributeError, TypeError):
        raise TypeError(
            f"{fn!r} cannot be marked as idempotent; wrap it in a function of your own"
        ) from None
    return fn


def is_idempotent(func: object) -> bool:
    """True if ``func`` was marked with :func:`idempotent`."""
    return getattr(func, "_rpc_idempotent", False) is True


def is_async_execution(func: object) -> bool:
    """True if ``func`` was marked with :func:`async_execution`."""
    return getattr(func, "_wrapped_async_rpc_function", None) is not None
