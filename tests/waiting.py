"""Waits for what another thread or process brings about and nobody announces."""

from __future__ import annotations

import time
from collections.abc import Callable


def eventually(
    condition: Callable[[], bool],
    seconds: float = 10.0,
    pause: float = 0.002,
    meanwhile: Callable[[], object] | None = None,
) -> bool:
    """True if a condition comes true.

    Args:
        condition: looked at again and again.
        seconds: to wait at most.
        pause: seconds between two looks.
        meanwhile: called before each look but the first, such as to let virtual time pass.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        if meanwhile is not None:
            meanwhile()
        time.sleep(pause)
    return True


def until(
    condition: Callable[[], bool],
    seconds: float = 20.0,
    pause: float = 0.002,
    meanwhile: Callable[[], object] | None = None,
) -> None:
    """Waits as :func:`eventually` does; fails the test if the condition does not come true."""
    assert eventually(condition, seconds, pause, meanwhile), f"not true after {seconds} s"
