"""Checks what users give, before anything is sent: one clear error for each mistake."""

from __future__ import annotations

import math


def number(
    where: str, name: str, value: object, least: float = 0.0, below: float = math.inf
) -> None:
    """Raises unless ``value`` is a finite number from ``least`` on, below ``below``.

    Raises:
        TypeError: it is no number.
        ValueError: it is out of range.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{where}: {name}={value!r} is a {type(value).__name__}, not a number")
    if not (math.isfinite(value) and least <= value < below):
        bound = "" if below == math.inf else f" and below {below:g}"
        raise ValueError(f"{where}: {name}={value!r} must be finite, at least {least:g}{bound}")


def whole(where: str, name: str, value: object, least: int = 1, below: int | None = None) -> None:
    """Raises unless ``value`` is a whole number of at least ``least``, below ``below``.

    Raises:
        TypeError: it is no whole number.
        ValueError: it is out of range.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(
            f"{where}: {name}={value!r} is a {type(value).__name__}, not a whole number"
        )
    if value < least:
        raise ValueError(f"{where}: {name}={value!r} must be at least {least}")
    if below is not None and value >= below:
        raise ValueError(f"{where}: {name}={value!r} must be below {below}")


def text(where: str, name: str, value: object) -> None:
    """Raises unless ``value`` is a text that is not empty and that can be sent.

    Raises:
        TypeError: it is no text.
        ValueError: it is empty, or has half a surrogate pair, which UTF-8 does not know.
    """
    instance(where, name, value, str, "a text")
    if not value:
        raise ValueError(f"{where}: {name}={value!r} must have at least one character")
    if any("\ud800" <= each <= "\udfff" for each in str(value)):
        raise ValueError(
            f"{where}: {name}={value!r} has half a surrogate pair, which cannot be written as UTF-8"
        )


def instance(
    where: str, name: str, value: object, kind: type | tuple[type, ...], wanted: str
) -> None:
    """Raises unless ``value`` is of a kind.

    Raises:
        TypeError: it is not; says what is ``wanted``.
    """
    if not isinstance(value, kind):
        raise TypeError(f"{where}: {name}={value!r} is a {type(value).__name__}, not {wanted}")
