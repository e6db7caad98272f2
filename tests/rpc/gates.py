"""A handler that runs until the test lets it end."""

from __future__ import annotations

import threading

gate = threading.Event()
"""Clear it, call :func:`wait_at_the_gate` anywhere, and set it."""
reached = threading.Event()
"""Clear it, and it is set when a handler is at the gate."""


def wait_at_the_gate() -> None:
    """Runs until the gate is open."""
    reached.set()
    gate.wait(20)
