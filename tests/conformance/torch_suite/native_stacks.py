"""The C stacks of a process's threads, which show who keeps Python's lock for good.

A process that hangs that way cannot tell its Python stacks, which torch's fixture asks for.
"""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterable

_FRAMES = 30


def show(processes: Iterable[int], seconds: float) -> None:
    """Prints the stacks of processes, given by their ids, if there is gdb, or why it may not look.

    What takes longer than ``seconds`` for all of them is left out.
    """
    gdb = shutil.which("gdb")
    if gdb is None:
        return
    looking = {process: _look(gdb, process) for process in processes}
    end = time.monotonic() + seconds
    for process, gdbs in looking.items():
        print(f"--- native stacks of process {process}", flush=True)
        try:
            print(gdbs.communicate(timeout=max(0.0, end - time.monotonic()))[0], flush=True)
        except subprocess.TimeoutExpired:
            gdbs.kill()
            print(f"{gdbs.communicate()[0]}gdb did not end in {seconds:.0f} seconds", flush=True)


def _look(gdb: str, process: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [gdb, "-nx", "-batch", "-p", str(process), "-ex", f"thread apply all backtrace {_FRAMES}"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
