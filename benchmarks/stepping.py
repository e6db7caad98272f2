"""Groups of processes that do steps when told, for benchmarks that compare programs.

All groups are alive at the same time. The measurement goes round them, and those whose turn it
is not are stopped, so a machine that changes its speed does so for all alike.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch

from benchmarks.member import die_with_parent

_SECONDS_TO_ANSWER = 300.0

Step = Callable[[], object]
"""One step of a program; what it returns is told to the measurement."""
Begin = Callable[[int, str], Step | None]
"""Begins one process, given its rank and a file to meet at; None if others tell it what to do."""


Live = Callable[[int, str, Connection], None]
"""A process's whole life, given its rank, a folder of the group and its end of a connection. It
sends True if it drives, else False; then, for each number of steps it gets, what came of them."""


class StoppedGroup:
    """The processes of one program; stopped unless it is their turn.

    Args:
        live: the life of each process, which ends when it is killed.
        size: how many there are.
        warm_up: how many times they step at once; ``first`` has what came of each.

    Attributes:
        told: what came of the last step that was measured, in each process that drives.
    """

    def __init__(self, live: Live, size: int, warm_up: int) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="benchmarks_")
        self._ends: list[Connection] = []
        self._processes = []
        fork = multiprocessing.get_context("fork")
        gc.freeze()  # or else each collection in a child copies the memory that it looks at
        for rank in range(size):
            near, far = fork.Pipe()
            arguments = (rank, self._folder.name, far)
            self._processes.append(fork.Process(target=live, args=arguments, daemon=True))
            self._processes[-1].start()
            far.close()
            self._ends.append(near)
        self._drivers = [end for end in self._ends if self._answer(end)]
        self.first = [self.run(1) for _ in range(warm_up)]
        self.told: list[Any] = []
        self._signal(signal.SIGSTOP)

    def measure(self, steps: int) -> float:
        """Seconds per step."""
        self._signal(signal.SIGCONT)
        self.run(1)  # to get going again
        began = time.perf_counter()
        self.told = self.run(steps)
        taken = time.perf_counter() - began
        self._signal(signal.SIGSTOP)
        return taken / steps

    def run(self, steps: int) -> list[Any]:
        """Does some steps; returns what came of the last one in each process that drives."""
        for end in self._drivers:
            end.send(steps)
        return [self._answer(end) for end in self._drivers]

    def close(self) -> None:
        """Ends the processes."""
        self._signal(signal.SIGKILL)
        for process in self._processes:
            process.join()
        for end in self._ends:
            end.close()
        self._folder.cleanup()

    def _answer(self, end: Connection) -> Any:
        if not end.poll(_SECONDS_TO_ANSWER):
            raise RuntimeError("a process of the benchmark does not answer")
        return end.recv()

    def _signal(self, number: signal.Signals) -> None:
        for process in self._processes:
            assert process.pid is not None, "it was started"
            os.kill(process.pid, number)


class SteppingGroup(StoppedGroup):
    """A :class:`StoppedGroup` whose processes have a function for one step.

    Args:
        begin: what each process begins with.
        size: how many there are.
        threads: of torch, in each.
        warm_up: how many times they step at once.
    """

    def __init__(self, begin: Begin, size: int, threads: int, warm_up: int) -> None:
        super().__init__(partial(_live, begin, threads), size, warm_up)


def _live(begin: Begin, threads: int, rank: int, folder: str, end: Connection) -> None:
    """Does the work of a process: steps, as many as it is told; it is killed when all is done."""
    die_with_parent()
    torch.set_num_threads(threads)
    step = begin(rank, f"{folder}/meeting")
    gc.collect()
    gc.freeze()  # or one full collection of all modules, 0.2 s long, falls into somebody's round
    end.send(step is not None)
    if step is None:
        threading.Event().wait()
    assert step is not None, "only who drives comes here"
    while True:
        value: object = None
        for _ in range(end.recv()):
            value = step()
        end.send(value)
