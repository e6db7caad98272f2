"""Starts and ends the workers of a test.

torch's fixture spawns four interpreters per test, each of which imports torch:
seven seconds of processor time before the test begins. Ours forks a process that has
imported everything and runs no threads. Either way the worker ends as a spawned one
does, with its exit handlers run, and none outlives its test.
"""

from __future__ import annotations

import atexit
import multiprocessing
from typing import Any

import torch.multiprocessing

from torch_suite import native_stacks
from torch_suite.setup import Setup, Start

_SECONDS_TO_DIE = 5.0
_SECONDS_TO_LOOK = 20.0


class Launch:
    """Mixed into each test class, before torch's fixture."""

    processes: list[multiprocessing.Process]

    def _spawn_processes(self: Any) -> None:
        method = Setup.of_process().start.value
        self._start_processes(torch.multiprocessing.get_context(method).Process)

    def _get_timedout_process_traceback(self: Any) -> None:
        running = [worker.pid for worker in self.processes if worker.is_alive()]
        native_stacks.show(running, _SECONDS_TO_LOOK)
        super()._get_timedout_process_traceback()  # type: ignore[misc]

    def tearDown(self: Any) -> None:
        workers = self.processes
        super().tearDown()  # type: ignore[misc]
        for worker in workers:
            worker.join(_SECONDS_TO_DIE)
            if worker.is_alive():
                worker.kill()
                worker.join()
            worker.close()

    @classmethod
    def _run(cls: Any, *args: Any, **kwargs: Any) -> None:
        forked = Setup.of_process().start is Start.FORK
        if forked:
            atexit._clear()
        try:
            super()._run(*args, **kwargs)  # type: ignore[misc]
        finally:
            if forked:
                atexit._run_exitfuncs()
