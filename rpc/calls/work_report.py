"""Tells what a worker makes, serves, keeps and waits for: for people, programs and a shutdown."""

from __future__ import annotations

import logging
from typing import Any

from rpc.calls.call_parts import CallParts
from rpc.calls.callee import Callee
from rpc.calls.caller import Caller
from rpc.debug import gil_wait_seconds
from rpc.group.directory import Directory
from rpc.group.shutdown import Work
from rpc.observe.metrics import Snapshot
from rpc.runtime.executor import Executor

_logger = logging.getLogger("rpc")


class WorkReport:
    """A view of one worker.

    Args:
        shared: the parts of its calls.
        caller: makes them.
        callee: serves those of others.
        directory: knows whom it waits for.
        executor: runs handlers.
        num_worker_threads: handlers that run at once.

    Attributes:
        gil_profiling: measure how long a thread waits for the interpreter lock.
    """

    def __init__(
        self,
        shared: CallParts,
        caller: Caller,
        callee: Callee,
        directory: Directory,
        executor: Executor,
        num_worker_threads: int,
    ) -> None:
        self._shared = shared
        self._caller = caller
        self._callee = callee
        self._directory = directory
        self._executor = executor
        self._num_worker_threads = num_worker_threads
        self.gil_profiling = False

    def debug_info(self) -> dict[str, Any]:
        """Tells what this worker waits for, runs and keeps; for people."""
        counts = self._shared.references.counts()
        info: dict[str, Any] = {name: getattr(counts, name) for name in counts.__slots__}
        info["calls"] = self._caller.outstanding()
        info["retrying"] = self._caller.retries.paused()
        info["waiting_for"] = (
            [] if self._directory.membership is None else self._directory.membership.waited_for()
        )
        info["serving"] = self._callee.serving()
        info["handler_threads"] = self._executor.thread_count()
        info["workers"] = [worker.name for worker in self._shared.group.living()]
        info.update(self._shared.extensions.debug_info())
        return info

    def metrics(self) -> Snapshot:
        """Counts of the calls that this worker made and served so far; see ``rpc.metrics``."""
        return Snapshot(self._shared.me.name, self._caller.metrics(), self._callee.metrics())

    def get_debug_info(self) -> dict[str, str]:
        """Counters under the names that the original gives them; see ``rpc.debug``."""
        threads, serving = self._executor.thread_count(), len(self._callee.serving())
        outstanding = str(len(self._caller.outstanding()))
        info = {
            "agent.thread_pool_size": str(self._num_worker_threads),
            "agent.num_idle_threads": str(max(0, threads - serving)),
            "agent.num_pending_requests": outstanding,
            "agent.client_active_calls": outstanding,
            "agent.server_active_calls": str(serving),
        }
        if self.gil_profiling:
            info["agent.gil_average_wait_time_us"] = f"{gil_wait_seconds() * 1e6:.0f}"
        return info

    def work(self) -> Work:
        """Counts what this worker has made, served and sent so far."""
        sent, received = self._shared.control.totals()
        return Work(self._caller.sent() + self._callee.handled(), sent, received)

    def is_quiet(self) -> bool:
        """True if nothing is under way here."""
        shared = self._shared
        parts = (self._caller, self._callee, shared.completions, shared.references)
        return all(part.quiet() for part in parts)

    def under_way(self) -> list[str]:
        """Names what keeps this worker from being quiet, one by one; like calls are named once."""

        def name(worker: int) -> str:
            return repr(self._shared.group.peer(worker).info.name)

        calls = [f"{row['call']} called by {name(row['from'])}" for row in self._callee.serving()]
        calls += [
            f"{row['call']} called on {name(row['to'])}" for row in self._caller.outstanding()
        ]
        others = (
            (self._caller, "calls that were given up and not answered"),
            (self._shared.references, "notices of references"),
            (self._shared.completions, "callbacks of futures"),
        )
        # The first of them only: what asks may itself run where callbacks do.
        return list(dict.fromkeys(calls)) or [what for part, what in others if not part.quiet()][:1]

    def name_what_runs_on(self) -> None:
        """Says in the log which calls did not end in the time that closing gave them."""
        for row in self._callee.serving():
            _logger.error(
                "%r left while %s, called by %r, was still running after %.1f s",
                self._shared.me.name,
                row["call"],
                self._shared.group.peer(row["from"]).info.name,
                row["age"],
            )

    def name_of(self, worker_id: int) -> str:
        """The name of a worker, also of one that is lost."""
        return self._shared.group.peer(worker_id).info.name
