"""Refuses what cannot be called, or called with; arguments of torch's futures are theirs."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Mapping
from typing import Any, Final

from torch import nn

_SINGLE_VALUES: Final = (str, bytes, bytearray, Mapping, nn.Module)
"""Types of one argument whose tuple was forgotten, although they can be iterated."""


def require_callable(argument: str, value: object) -> None:
    """Refuses what cannot be called.

    Raises:
        TypeError: ``value`` cannot; the text names ``argument``.
    """
    if not callable(value):
        raise TypeError(f"{argument}={value!r} cannot be called; give a function")


def require_call(func: object, args: Any, kwargs: Any) -> None:
    """Refuses what makes no call; what most calls are made of is looked at here alone.

    Raises:
        TypeError: ``func`` cannot be called, or see :func:`require_arguments`.
    """
    if not callable(func):
        require_callable("func", func)
    kind = type(args)
    if kind is not tuple and kind is not list and args is not None:
        require_arguments(args, kwargs)
    if type(kwargs) is dict:
        for name in kwargs:
            if type(name) is not str:
                require_arguments(args, kwargs)
    elif kwargs is not None:
        require_arguments(args, kwargs)


def require_arguments(args: Any, kwargs: Any) -> None:
    """Refuses values that cannot be the arguments of a call, and would fail elsewhere or never.

    Args:
        args: the positional arguments.
        kwargs: the arguments by name.

    Raises:
        TypeError: these cannot be; the text says which of the two it is.
    """
    if args is not None and (
        not isinstance(args, Iterable)
        or isinstance(args, _SINGLE_VALUES)
        or hasattr(args, "__array__")
    ):
        raise TypeError(
            f"args={_shown(args)} is a {type(args).__name__}, not a tuple or list of arguments; "
            "a single one is args=(value,)"
        )
    if kwargs is None or (isinstance(kwargs, tuple | list) and not kwargs):
        return
    if not isinstance(kwargs, Mapping):
        raise TypeError(
            f"kwargs={_shown(kwargs)} is a {type(kwargs).__name__}, not a dict of arguments by name"
        )
    for name in kwargs:
        if not isinstance(name, str):
            raise TypeError(
                f"kwargs={_shown(kwargs)} has the key {_shown(name)}, which is a "
                f"{type(name).__name__}, not the name of an argument"
            )


def _shown(value: object) -> str:
    """In a line, however large it is."""
    return " ".join(reprlib.repr(value).split())
