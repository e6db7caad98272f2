"""Signals, for tests that are sent some."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.waiting import until


def freeze(pid: int) -> None:
    """Stops a process; returns when it has, as the signal alone does not wait for that.

    What runs on another core goes on for a while, and may answer what it is sent.
    """
    os.kill(pid, signal.SIGSTOP)
    threads = Path("/proc", str(pid), "task")
    until(lambda: all(_state(thread) == "T" for thread in threads.iterdir()))


def _state(thread: Path) -> str:
    """As in ``man 5 proc``; its name, which comes before, is in parentheses."""
    try:
        return (thread / "stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "gone"  # since it was listed


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
