"""Where the threads of a process are in C: what shows who keeps Python's lock for good.

A process that hangs that way cannot tell its Python stacks, which torch's fixture asks for.
"""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterable

_FRAMES = 30


def show(processes: Iterable[int], seconds: float) -> None:
    """Prints the stacks of processes, given by their ids, if there is gdb and it may look.

    Stops when ``seconds`` are over.
    """
    gdb = shutil.which("gdb")
    end = time.monotonic() + seconds
    for process in processes:
        left = end - time.monotonic()
        if gdb is None or left <= 0:
            return
        print(f"--- native stacks of process {process}", flush=True)
        look = ["-p", str(process), "-ex", f"thread apply all backtrace {_FRAMES}"]
        try:
            subprocess.run(
                [gdb, "-nx", "-batch", *look],
                stdin=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=left,
                check=False,
            )
        except subprocess.TimeoutExpired:
            print(f"gdb did not end in {seconds:.0f} seconds", flush=True)
