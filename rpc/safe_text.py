"""Texts of objects of users' classes, which may raise where they are asked for one."""

from __future__ import annotations

from collections.abc import Callable


def text_of(value: object) -> str:
    """``str(value)``, or what there is to say instead. Never raises."""
    return _attempt(str, value)


def repr_of(value: object) -> str:
    """``repr(value)``, or what there is to say instead. Never raises."""
    return _attempt(repr, value)


def class_name(kind: type) -> str:
    """A class's name with its module, unless it is Python's own."""
    prefix = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    return prefix + kind.__qualname__


def _attempt(render: Callable[[object], str], value: object) -> str:
    try:
        return str(render(value))
    except BaseException as failure:
        return f"<{class_name(type(value))} whose text raises {type(failure).__name__}>"
