"""Signals, for tests that are sent some."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def heeding_interrupts() -> Iterator[None]:
    """This process, and what it starts inside, heeds Ctrl-C, although it may run in the background.

    A shell has what it puts there ignore it.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
