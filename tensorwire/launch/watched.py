"""The agent's part in a watched job: tells ``tensorwire.watching`` what runs, and by which plan."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rpc.extend import WATCH, KeyValueStore
from tensorwire.launch.plan import Order, Phase, Plan, Seat
from tensorwire.launch.processes import WorkerProcess
from tensorwire.watching.views import NodeView, WorkerView
from tensorwire.watching.watch import JobWatch, Seen, StallPolicy

_logger = logging.getLogger("rpcrun")


@dataclass(frozen=True, slots=True)
class Watching:
    """The settings of watching a job.

    Args:
        policy: what is done about workers that stand still.
        dashboard: ``[HOST:]PORT`` of the page; empty for none.
        tls: files with certificate and key of the page; None for plain HTTP.
    """

    policy: StallPolicy = field(default_factory=StallPolicy)
    dashboard: str = ""
    tls: tuple[str, str] | None = None


class AgentWatch:
    """The watch of one agent.

    Args:
        job: the job's id.
        node: the agent's number.
        values: the job's values, in its store.
        watching: how the job is watched.
    """

    def __init__(self, job: str, node: int, values: KeyValueStore, watching: Watching) -> None:
        self._node = node
        self._ends: dict[str, str] = {}
        self._watch = JobWatch(job, node, values, watching.policy)
        self._page = None
        if watching.dashboard:
            from tensorwire.watching.dashboard.server import Page

            self._page = Page(self._watch, watching.dashboard, watching.tls)
            _logger.info("the job's page: %s", self._page.address)

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables by which workers find this agent."""
        return {WATCH: self._watch.path}

    def ended(self, name: str, how: str) -> None:
        """Notes how a worker's process ended."""
        self._ends[name] = how

    def round(self, plan: Plan, processes: Mapping[int, WorkerProcess]) -> list[WorkerProcess]:
        """Tells the watch what runs; returns processes that stand still and are to be killed."""
        local = {process.seat.name: process for process in processes.values()}
        numbers = {node.id: node for node in plan.nodes}
        workers = []
        for seat in plan.seats:
            node = numbers.get(seat.holder)
            elsewhere = node is not None and node.number != self._node
            workers.append(
                WorkerView(
                    seat.name,
                    seat.role,
                    seat.id,
                    seat.life,
                    _state(seat, seat.id in processes, elsewhere),
                    -1 if node is None else node.number,
                    "" if node is None else node.host,
                    self._ends.get(seat.name, ""),
                )
            )
        phase = {Phase.SUCCEEDED: "succeeded", Phase.FAILED: "failed"}.get(plan.phase, "running")
        self._watch.update(
            Seen(
                phase,
                tuple(NodeView(node.number, node.host) for node in plan.nodes),
                tuple(workers),
                {name: process.id for name, process in local.items()},
                {name: _files(process) for name, process in local.items()},
            )
        )
        told = self._watch.to_restart()
        return [each for each in local.values() if (each.seat.name, each.seat.life) in told]

    def close(self) -> None:
        """Ends it."""
        if self._page is not None:
            self._page.close()
        self._watch.close()


def begin_watch(
    job: str, node: int, values: KeyValueStore, watching: Watching
) -> AgentWatch | None:
    """Begins to watch a job; where that cannot be it runs unwatched, unless a page is wanted."""
    try:
        return AgentWatch(job, node, values, watching)
    except OSError as error:
        if watching.dashboard:
            raise
        _logger.warning("rpcrun top cannot show this job: %s", error)
        return None


def _state(seat: Seat, runs_here: bool, is_elsewhere: bool) -> str:
    if seat.done:
        return "done"
    if seat.order is Order.RUN and (runs_here or is_elsewhere):
        return "runs"
    return "dead" if seat.order is Order.RUN and seat.life > 1 else "waits"


def _files(process: WorkerProcess) -> Sequence[str]:
    folder = Path(process.folder)
    return tuple(str(folder / name) for name in ("stdout.log", "stderr.log"))
