"""Texts of objects of users' classes, which may raise where they are asked for one."""

from __future__ import annotations

from collections.abc import Callable


def text_of(value: object) -> str:
    """``str(value)``, or what there is to say instead. Never raises."""
    return _attempt(str, value)


def says(error: BaseException) -> str:
    """The text of an error, or at least its name."""
    return text_of(error) or type(error).__name__


def repr_of(value: object) -> str:
    """``repr(value)``, or what there is to say instead. Never raises."""
    return _attempt(repr, value)


def class_name(kind: type) -> str:
    """A class's name with its module, unless it is Python's own. Never raises."""
    module, name = _told_by(kind, "__module__"), _told_by(kind, "__qualname__")
    return name if module in ("builtins", "") else f"{module}.{name}"


def _told_by(kind: type, attribute: str) -> str:
    """Past the class of the class, which may answer as it likes, or raise; nothing for no text."""
    try:
        text = type.__getattribute__(kind, attribute)
    except Exception:  # what a class's module is, its body may set
        return ""
    return text if type(text) is str else ""


def _attempt(render: Callable[[object], str], value: object) -> str:
    try:
        return str(render(value))
    except BaseException as failure:
        raised = _told_by(type(failure), "__name__")
        return f"<{class_name(type(value))} whose text raises {raised}>"
