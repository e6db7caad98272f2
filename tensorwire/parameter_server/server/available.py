"""The memory that is left on this machine, and its devices."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

_SECONDS: Final = 0.5
_KEPT: Final = 1 << 28
"""Bytes that are left to others."""


@dataclass(frozen=True, slots=True)
class Claim:
    """The room that one push to one shard may need.

    Args:
        place: cluster, shard, trainer.
        number: of the push.
        bytes: how much.
    """

    place: tuple[str, int, int]
    number: int
    bytes: int


class _Last:
    """The value that was read last, and when."""

    bytes = 1 << 62
    at = -1.0


def device(wanted: str | torch.device) -> torch.device | None:
    """The device on which a server is to keep rows; None for the host's memory.

    Raises:
        ValueError: this machine has no such device.
    """
    try:
        chosen = torch.device(wanted)
        if chosen.type != "cpu":
            torch.empty(0, device=chosen)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"serve: device={str(wanted)!r} cannot be used here: {error}") from error
    return None if chosen.type == "cpu" else chosen


def bytes_free(device: torch.device | None = None) -> int:
    """Bytes that a process may take, as of half a second ago at most.

    Args:
        device: where the rows are; its memory counts, too.
    """
    if device is not None and device.type == "cuda":
        return min(bytes_free(), torch.cuda.mem_get_info(device)[0])
    now = time.monotonic()
    if now - _Last.at > _SECONDS:
        _Last.bytes, _Last.at = max(0, min(_of_machine(), _of_group()) - _KEPT), now
    return _Last.bytes


def _of_machine() -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 1 << 62
    available = [line for line in lines if line.startswith("MemAvailable:")]
    return int(available[0].split()[1]) << 10 if available else 1 << 62


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
