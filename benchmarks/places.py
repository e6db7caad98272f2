"""The core on which a process works: that of its busiest thread.

Two processes that answer each other may stay on one core while another is idle, which makes small
calls half as fast. So a turn says in which state it was.
"""

from __future__ import annotations

from pathlib import Path

_CORE_FIELD = 36
"""Of a thread's ``stat``, counted after its name; see proc(5)."""

_seen: dict[str, int] = {}
"""Nanoseconds that each thread has run, when last looked at."""


def take(tasks: Path = Path("/proc/self/task")) -> int | None:
    """Return the core of the thread that ran most since this was last asked.

    Args:
        tasks: the folder of the process's threads.

    Returns:
        The core's number, or None where the kernel does not tell.
    """
    busiest, most, ran = None, -1, {}
    try:
        for thread in tasks.iterdir():
            ran[thread.name] = int(thread.joinpath("schedstat").read_text().split()[0])
            lately = ran[thread.name] - _seen.get(thread.name, 0)
            if lately > most:
                busiest, most = thread, lately
        if busiest is None:
            return None
        core = busiest.joinpath("stat").read_text().rpartition(")")[2].split()[_CORE_FIELD]
    except (OSError, ValueError, IndexError):
        return None  # no Linux, or a thread that has just ended
    _seen.clear()
    _seen.update(ran)
    return int(core)
