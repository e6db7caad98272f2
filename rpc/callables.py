"""Refuses arguments that are to be called and cannot be; those of torch's futures are theirs."""

from __future__ import annotations


def require_callable(argument: str, value: object) -> None:
    """Refuses what cannot be called.

    Raises:
        TypeError: ``value`` cannot; the text names ``argument``.
    """
    if not callable(value):
        raise TypeError(f"{argument}={value!r} cannot be called; give a function")
