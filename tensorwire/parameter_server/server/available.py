"""The memory that is left on this machine."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Final

_SECONDS: Final = 0.5
_KEPT: Final = 1 << 28
"""Bytes that are left to others."""


class _Last:
    """The value that was read last, and when."""

    bytes = 1 << 62
    at = -1.0


def bytes_free() -> int:
    """Bytes that a process may take, as of half a second ago at most."""
    now = time.monotonic()
    if now - _Last.at > _SECONDS:
        _Last.bytes, _Last.at = max(0, min(_of_machine(), _of_group()) - _KEPT), now
    return _Last.bytes


def _of_machine() -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 1 << 62
    found = [line for line in lines if line.startswith("MemAvailable:")]
    return int(found[0].split()[1]) << 10 if found else 1 << 62


def _of_group() -> int:
    try:
        most = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = Path("/sys/fs/cgroup/memory.current").read_text().strip()
        cached = Path("/sys/fs/cgroup/memory.stat").read_text().splitlines()
    except OSError:
        return 1 << 62
    if most == "max":
        return 1 << 62
    files = sum(int(line.split()[1]) for line in cached if line.startswith("inactive_file "))
    return int(most) - int(used) + files
