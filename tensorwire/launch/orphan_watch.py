"""A small process that ends an agent's workers if the agent itself is killed.

Run by its path, without site packages: it starts in some milliseconds. The agent tells it on
its standard input which processes there are; when that ends, and the agent did not say that
all is well, it ends them: SIGTERM, then SIGKILL a second later, to all of their process group.

    run PID       a process began
    ended PID     it is gone
    file PATH     delete this file in the end
    well          the agent ends; nothing is left to do but to delete the files
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterable

SECONDS_TO_END = 1.0


def guard(lines: Iterable[str]) -> tuple[set[int], list[str]]:
    """Returns the processes that are left, and the files to delete."""
    processes: set[int] = set()
    files: list[str] = []
    for line in lines:
        word, _, value = line.rstrip("\n").partition(" ")
        if word == "run":
            processes.add(int(value))
        elif word == "ended":
            processes.discard(int(value))
        elif word == "file":
            files.append(value)
        elif word == "well":
            processes.clear()
    return processes, files


def send(process: int, number: int) -> bool:
    """Sends a signal to a process and all of its group; False if there is none."""
    try:
        if os.getpgid(process) == process:
            os.killpg(process, number)
        else:
            os.kill(process, number)
    except ProcessLookupError:
        return False
    return True


def main() -> None:
    """Guards until the standard input ends, and then does what there is to do."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    processes, files = guard(sys.stdin)
    for path in files:
        with contextlib.suppress(OSError):
            os.unlink(path)
    left = [process for process in processes if send(process, signal.SIGTERM)]
    deadline = time.monotonic() + SECONDS_TO_END
    while left and time.monotonic() < deadline:
        time.sleep(0.02)
        left = [process for process in left if send(process, 0)]
    for process in left:
        send(process, signal.SIGKILL)


if __name__ == "__main__":
    main()
