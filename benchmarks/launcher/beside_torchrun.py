"""Seconds that a job with roles takes to start, beside torchrun.

The workers are programs that only note when they begin, so that what is measured is the launcher:
the time until the last worker runs, and until the launcher has ended. Both launchers take turns,
so that they see the same machine.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.launcher.jobs import spread

_PROGRAM: Final = """
import os, pathlib, sys, time
begun = time.time()
pathlib.Path(sys.argv[1], os.environ["RPC_WORKER_ID" if "RPC_WORKER_ID" in os.environ else "RANK"]
             ).write_text(str(begun))
"""
_LAUNCHERS: Final = {"torchrun": "torch.distributed.run", "rpcrun": "tensorwire.launch"}


@dataclass(frozen=True, slots=True)
class Run:
    """The time of one job.

    Args:
        started: seconds until the last worker ran.
        ended: seconds until the launcher had ended.
    """

    started: float
    ended: float


def measure(launcher: str, workers: int) -> Run:
    """Runs one job.

    Raises:
        CalledProcessError: it failed, and has said why.
    """
    flags = ["--nproc-per-node", str(workers)]
    if launcher == "rpcrun":
        flags = ["--role", f"ps:{workers // 2}", "--role", f"trainer:{-(-workers // 2)}"]
    with tempfile.TemporaryDirectory(prefix="launch_") as folder:
        program = Path(folder, "program.py")
        program.write_text(_PROGRAM)
        notes = Path(folder, "notes")
        notes.mkdir()
        command = [sys.executable, "-m", _LAUNCHERS[launcher], "--standalone", *flags]
        begun = time.time()
        subprocess.run([*command, str(program), str(notes)], check=True, stderr=subprocess.DEVNULL)
        ended = time.time()
        times = [float(note.read_text()) for note in notes.iterdir()]
    if len(times) != workers:
        raise RuntimeError(f"{len(times)} of {workers} workers of {launcher} have run")
    return Run(max(times) - begun, ended - begun)


def measure_all(options: argparse.Namespace) -> None:
    """A job with roles beside torchrun's: until all workers run, and until it is over."""
    for workers in options.workers:
        runs: dict[str, list[Run]] = {launcher: [] for launcher in _LAUNCHERS}
        for number in range(options.times):
            for launcher in [*runs] if number % 2 == 0 else reversed([*runs]):
                runs[launcher].append(measure(launcher, workers))
        print(f"{workers} workers")
        started = {launcher: [run.started for run in each] for launcher, each in runs.items()}
        ended = {launcher: [run.ended for run in each] for launcher, each in runs.items()}
        print(f"  until all run    {_line(started)}")
        print(f"  until it is over {_line(ended)}", flush=True)


def _line(times: dict[str, list[float]]) -> str:
    cells = [f"{launcher} {spread(each)} s" for launcher, each in times.items()]
    pairs = zip(times["torchrun"], times["rpcrun"], strict=True)
    ratios = [ours / theirs for theirs, ours in pairs]
    return ", ".join([*cells, f"ratio {spread(ratios)}"])
