"""Waits for the answer to one call."""

from __future__ import annotations

import threading
from typing import Any


class Answer:
    """An answer that is waited for."""

    def __init__(self) -> None:
        self._there = threading.Event()
        self._value: Any = None

    def set(self, value: Any) -> None:
        """It is there."""
        self._value = value
        self._there.set()

    def wait(self) -> Any:
        """Waits for it. Calls that are not answered end when their callee is lost."""
        self._there.wait()
        return self._value
