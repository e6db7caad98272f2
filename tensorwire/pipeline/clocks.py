"""Brings the monotonic clocks of workers together.

Workers on one running kernel share the clock. Of others the difference is measured: a reply
tells their time, and is taken to have been written in the middle of the quickest of some round
trips.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")
_ROUND_TRIPS: Final = 9


@dataclass(frozen=True, slots=True)
class Reading:
    """A clock, and which kernel's it is.

    Args:
        kernel: differs between kernels, and between runs of one; empty if it is not known.
        nanoseconds: what the clock showed.
    """

    kernel: str
    nanoseconds: int


def read() -> Reading:
    """Reads the clock here."""
    kernel = _BOOT.read_text().strip() if _BOOT.exists() else ""
    return Reading(kernel, time.perf_counter_ns())


def offset(ask: Callable[[], Reading], read_here: Callable[[], Reading] = read) -> int:
    """The nanoseconds by which another clock is ahead of this one.

    Args:
        ask: reads the other clock.
        read_here: reads this clock.
    """
    best: tuple[int, int] | None = None
    for _ in range(_ROUND_TRIPS):
        before, there, after = read_here(), ask(), read_here()
        if there.kernel and there.kernel == before.kernel:
            return 0
        took = after.nanoseconds - before.nanoseconds
        ahead = there.nanoseconds - (before.nanoseconds + after.nanoseconds) // 2
        if best is None or took < best[0]:
            best = took, ahead
    assert best is not None
    return best[1]
