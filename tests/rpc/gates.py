"""Handlers that run until the test lets them end."""

from __future__ import annotations

import threading
from collections import defaultdict

gate = threading.Event()
"""Clear it, call :func:`wait_at_the_gate` anywhere, and set it."""
reached = threading.Event()
"""Clear it, and it is set when a handler is at the gate."""


def wait_at_the_gate() -> None:
    """Runs until the gate is open."""
    reached.set()
    gate.wait(20)


class Gate:
    """Holds a handler until the test lets it go on."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.open = threading.Event()

    def pass_through(self) -> None:
        self.reached.set()
        assert self.open.wait(30.0)


gates: defaultdict[str, Gate] = defaultdict(Gate)


def pass_gate(name: str) -> None:
    gates[name].pass_through()
