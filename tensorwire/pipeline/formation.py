"""Has workers take part in a pipeline: one formation for as long as none of them is lost.

Owns the session, the plan that all workers were given and the tables that they have.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import rpc
from remote_module import RemoteModule
from rpc import extend
from tensorwire.pipeline import sessions
from tensorwire.pipeline.actions import Action, Table
from tensorwire.pipeline.backups.keeping import Keep
from tensorwire.pipeline.backups.places import Owners
from tensorwire.pipeline.errors import ScheduleError
from tensorwire.pipeline.placement import choose_table, fit, workers_of
from tensorwire.pipeline.plan import Loss, Plan, Rows
from tensorwire.pipeline.schedules import SCHEDULES, Schedule, forward_only
from tensorwire.pipeline.sessions import Sessions
from tensorwire.pipeline.sharing import Tie, make_equal, plan_sharing
from tensorwire.pipeline.stage import StageSettings
from tensorwire.pipeline.steps import Steps
from tensorwire.pipeline.validation import validate
from tensorwire.pipeline.wiring import Wiring
from tensorwire.pipeline.worker import Outbox

Stages = Sequence["RemoteModule | Sequence[RemoteModule]"]


@dataclass(slots=True)
class Design:
    """A pipeline as its user wants it; see :class:`~tensorwire.pipeline.Pipeline`.

    Args:
        stages: the modules of each stage, all replicas.
        wiring: how the stages are connected.
        schedule: makes the tables, or is the one table.
        loss: of the last stage's output and the target.
        tied: groups of parameters that stay equal.
        settings: how each stage runs.
        prefixes: of the names of each stage's parameters.
        placed: where the user put the stages, for which the schedule makes the tables.
    """

    stages: list[list[RemoteModule]]
    wiring: Wiring
    schedule: Table | Schedule
    loss: Loss | None
    tied: Sequence[Tie]
    settings: tuple[StageSettings, ...]
    prefixes: tuple[str, ...]
    placed: Owners = ()

    def modules(self) -> Iterator[RemoteModule]:
        """All modules, replicas included."""
        return (replica for replicas in self.stages for replica in replicas)


class Formation:
    """The workers of a pipeline, in one life of each.

    Args:
        design: what they take part in.
        keep: which copies of stages they make and go back to.

    Attributes:
        plan: what they were told.
        steps: runs steps with them.
    """

    def __init__(self, design: Design, keep: Keep) -> None:
        self._design = design
        self._steps_begun = 0
        owners = tuple(
            tuple(replica.get_module_rref().owner_name() for replica in replicas)
            for replicas in design.stages
        )
        self.workers = workers_of(owners)
        self.plan = Plan(
            session=uuid.uuid4().hex,
            driver=extend.worker().life,
            wiring=design.wiring,
            owners=owners,
            prefixes=design.prefixes,
            lives={worker: extend.life_of(worker) for worker in self.workers},
            settings=design.settings,
            loss=design.loss,
            shared=plan_sharing(design.stages, owners, design.tied),
            outputs_to_cpu=not design.stages[-1][0].is_device_map_set,
            keep=keep,
        )
        self._known: dict[Rows, dict[str, tuple[Action, ...]]] = {}
        parts = {worker: (self.plan, self._modules_of(worker)) for worker in self.workers}
        self.call_each(sessions.join, parts)
        self.steps = Steps(self.plan, Outbox(self.plan, extend.worker(), Sessions.here().seek))
        if keep.version is None:
            make_equal(self.plan, design.stages)

    def call_all(self, function: Callable[..., Any], *arguments: Any) -> dict[str, Any]:
        """Calls ``function(session, *arguments)`` on every worker; returns what each returns."""
        return self.call_each(function, dict.fromkeys(self.workers, arguments))

    def call_each(
        self, function: Callable[..., Any], arguments: Mapping[str, tuple[Any, ...]]
    ) -> dict[str, Any]:
        """Calls ``function(session, *arguments[worker])`` on these workers, at the same time.

        Raises:
            Exception: the first error of theirs, once all have answered.
        """
        calls = {
            worker: rpc.rpc_async(worker, function, (self.plan.session, *each))
            for worker, each in arguments.items()
        }
        answers, errors = {}, []
        for worker, call in calls.items():
            try:
                answers[worker] = call.wait()
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]
        return answers

    def rows(self, trains: bool, microbatches: int) -> dict[str, tuple[Action, ...]]:
        """Each worker's row of the table for so many micro-batches, which the workers have.

        Raises:
            ScheduleError: the schedule cannot serve as many.
        """
        key = Rows(trains, microbatches)
        if key not in self._known:
            rows = self._make_rows(trains, microbatches)
            self.call_each(sessions.install, {worker: (key, row) for worker, row in rows.items()})
            self._known[key] = rows
        return self._known[key]

    def next_step(self) -> int:
        """The number of the next step, of training or evaluation."""
        self._steps_begun += 1
        return self._steps_begun - 1

    def lost(self) -> list[str]:
        """The names of the workers that are gone, also if they came back since."""
        return [each for each, life in self.plan.lives.items() if not extend.is_living(life)]

    def leave(self) -> None:
        """Has the workers that are there forget the pipeline."""
        lost = self.lost()
        self.call_each(
            sessions.leave, {worker: () for worker in self.workers if worker not in lost}
        )

    def _modules_of(self, worker: str) -> dict[int, tuple[rpc.RRef[Any], str]]:
        return {
            index: (replica.get_module_rref(), replica.device)
            for index, replicas in enumerate(self._design.stages)
            for replica, owner in zip(replicas, self.plan.owners[index], strict=True)
            if owner == worker
        }

    def _make_rows(self, trains: bool, microbatches: int) -> dict[str, tuple[Action, ...]]:
        schedule = self._design.schedule if trains else forward_only
        if isinstance(schedule, Table):
            table = schedule
            if table.microbatches != microbatches:
                raise ScheduleError(
                    f"the table is for {table.microbatches} micro-batches, not {microbatches}"
                )
        else:
            table = choose_table(schedule, self._design.placed, microbatches)
        validate(table, self.plan.wiring)
        rows = fit(table, self.plan.owners, self.plan.wiring)
        validate(Table.of(rows.values()), self.plan.wiring)
        return rows


def as_replicas(stages: Stages) -> list[list[RemoteModule]]:
    """The stages, each as a list of its replicas.

    Raises:
        TypeError: one is no remote module.
        ValueError: there is none.
    """
    replicas: list[list[Any]] = [
        list(each) if isinstance(each, (list, tuple)) else [each] for each in stages
    ]
    if not replicas or not all(replicas):
        raise ValueError(f"stages={stages!r}: a pipeline needs a stage, and each stage a module")
    for each in (module for modules in replicas for module in modules):
        if not isinstance(each, RemoteModule):
            raise TypeError(f"a stage is a RemoteModule, but got a {type(each).__name__}: {each!r}")
    return replicas


def as_schedule(schedule: str | Path | Table | Schedule) -> Table | Schedule:
    """The schedule that a user means.

    Raises:
        TypeError: it is none.
        ValueError: there is none of that name.
    """
    if isinstance(schedule, Path) or (isinstance(schedule, str) and schedule.endswith(".csv")):
        return Table.read(schedule)
    if isinstance(schedule, str):
        if schedule not in SCHEDULES:
            raise ValueError(
                f"schedule={schedule!r} is none of {', '.join(map(repr, SCHEDULES))}, and no "
                "path of a .csv file"
            )
        return SCHEDULES[schedule]
    if not isinstance(schedule, Table) and not callable(schedule):
        raise TypeError(f"schedule={schedule!r} is a {type(schedule).__name__}, not a schedule")
    return schedule
