"""The host that a process is on: which it is, and how much of it the process may use.

Two processes share a host, for a purpose, if the same boot of the same kernel runs
both and they share the namespace that the purpose needs. Host names, and what
containers make of them, play no role. Even so this is only a reason to try: who
uses it proves that it holds.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NAMESPACES = Path("/proc/self/ns")
_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def host_identity(namespace: str, namespaces: Path = _NAMESPACES) -> str:
    """Equal for two processes of one kernel that share a namespace; empty if unknown.

    Args:
        namespace: by the kernel's name: ``net`` for those that see the same abstract Unix
            sockets, ``pid`` for those that know each other by the same process numbers.
        namespaces: the folder in which the kernel shows this process's.
    """
    if not sys.platform.startswith("linux"):
        return ""
    try:
        return f"{_BOOT_ID.read_text().strip()}/{(namespaces / namespace).stat().st_ino}"
    except OSError:
        return ""


def usable_cores(quota_file: Path = _QUOTA) -> int:
    """Returns how many cores this process may use, by affinity and by its container's quota."""
    cores = len(os.sched_getaffinity(0))
    with suppress(OSError, ValueError):  # no quota, or none that is known
        quota, period = map(int, quota_file.read_text().split())
        cores = min(cores, max(1, quota // period))
    return cores
