"""The public functions that tell a watched job of this worker's progress.

Starts the reporter of a worker whose launcher wants one.
"""

from __future__ import annotations

import contextvars
import logging
import os
from contextlib import AbstractContextManager
from typing import Protocol

from rpc.current import current_agent
from rpc.observe.progress import Progress
from rpc.observe.reporter import WATCH, ReportedWorker, Reporter
from rpc.options import whole_number
from rpc.runtime.clock import Clock
from rpc.runtime.states import States

_logger = logging.getLogger("rpc")


class WatchedWorker(ReportedWorker, Protocol):
    """A worker with what is kept for it."""

    @property
    def states(self) -> States:
        """The objects that are kept with it."""

    @property
    def clock(self) -> Clock:
        """Its time."""


def progress_of(states: States, clock: Clock) -> Progress:
    """The progress of the worker with these states, made when it is first asked for."""
    return states.get(Progress, lambda: Progress(clock))


def report_to_launcher(worker: WatchedWorker) -> None:
    """Has a reporter answer whoever the environment names, if it names somebody."""
    path = os.environ.get(WATCH)
    if not path:
        return
    run = contextvars.copy_context().run
    progress = progress_of(worker.states, worker.clock)
    try:
        worker.states.get(Reporter, lambda: Reporter(path, worker, progress, run), Reporter.close)
    except OSError as error:
        _logger.warning("nobody can watch this worker: %s at %s=%s", error, WATCH, path)


def progress(steps: int = 1) -> None:
    """Counts steps of this worker's work, for whoever watches the job.

    ``ps.Optimizer``, pipelines and parameter servers count theirs themselves. A worker that
    counts, and then counts nothing for much longer than usual, is reported as standing still.

    Args:
        steps: how many were made since the last call.

    Raises:
        TypeError: ``steps`` is no whole number.
        ValueError: ``steps`` is negative.
        NotInitializedError: ``init_rpc`` was not called.

    Example::

        for batch in loader:
            train(batch)
            rpc.progress()
    """
    if whole_number("steps", steps) < 0:
        raise ValueError(f"steps={steps} is negative; count what was made since the last call")
    agent: WatchedWorker = current_agent()
    progress_of(agent.states, agent.clock).count(steps)


def slow_phase(name: str) -> AbstractContextManager[None]:
    """For the length of a ``with`` block, this worker's steps may take long.

    Nobody is reported as standing still meanwhile. The name is shown to whoever watches the job.

    Args:
        name: such as ``"evaluation"``.

    Raises:
        TypeError: ``name`` is no text.
        NotInitializedError: ``init_rpc`` was not called.

    Example::

        with rpc.slow_phase("evaluation"):
            evaluate(model)
    """
    if not isinstance(name, str):
        raise TypeError(f"name={name!r} is a {type(name).__name__}, not a str")
    agent: WatchedWorker = current_agent()
    return progress_of(agent.states, agent.clock).phase(name)
