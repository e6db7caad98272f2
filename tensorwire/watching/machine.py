"""Reads what the kernel says of a process, from ``/proc``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from tensorwire.watching.views import ProcessView

_TICKS: Final = os.sysconf("SC_CLK_TCK")
_PAGE: Final = os.sysconf("SC_PAGE_SIZE")


def look_at(pid: int) -> ProcessView:
    """The process of that number; without a state if there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ProcessView(pid)
    fields = text.rpartition(")")[2].split()  # after the name, which may hold anything
    return ProcessView(
        pid=pid,
        state=fields[0],
        cpu_seconds=(int(fields[11]) + int(fields[12])) / _TICKS,
        resident_bytes=int(fields[21]) * _PAGE,
        threads=int(fields[17]),
    )
