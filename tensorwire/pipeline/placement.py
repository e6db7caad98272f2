"""Fits a table to where the stages are: which worker runs which action, in which order.

Schedules think of rows; users place stages. Where both agree, a worker gets a row as it
is. Where a worker has the stages of several rows, these are merged in the order in which
they would run on a virtual clock, which respects every dependency. A stage with replicas
has its micro-batches dealt out to them in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tensorwire.pipeline.actions import Action, Table
from tensorwire.pipeline.errors import ScheduleError
from tensorwire.pipeline.schedules import Schedule
from tensorwire.pipeline.timing import Costs, play
from tensorwire.pipeline.wiring import Wiring

Owners = Sequence[Sequence[str]]
"""The workers of each stage: one, or its replicas."""


def owner_of(owners: Owners, stage: int, microbatch: int) -> str:
    """The worker that runs a stage's passes of a micro-batch."""
    replicas = owners[stage]
    return replicas[microbatch % len(replicas)]


def workers_of(owners: Owners) -> list[str]:
    """All workers, in the order of their first stages."""
    return list(dict.fromkeys(worker for replicas in owners for worker in replicas))


def choose_table(schedule: Schedule, owners: Owners, microbatches: int) -> Table:
    """The schedule's table for as many workers as have stages, or else one row per stage.

    Raises:
        ScheduleError: the schedule cannot serve these stages.
    """
    stages = len(owners)
    workers = len({replicas[0] for replicas in owners})
    refusals = []
    for rows in dict.fromkeys([workers, stages]):
        try:
            table = schedule(stages, rows, microbatches)
        except ScheduleError as refusal:
            refusals.append(str(refusal))
            continue
        if rows == stages or _agrees(table, owners):
            return table
    if not refusals:
        refusals.append("it does not have these stages on the same worker")
    raise ScheduleError(f"this schedule does not fit the stages on {list(owners)}: {refusals[0]}")


def fit(table: Table, owners: Owners, wiring: Wiring) -> dict[str, tuple[Action, ...]]:
    """The actions of each worker, in order.

    Args:
        table: with any rows.
        owners: where the stages are.
        wiring: how the stages are connected.

    Raises:
        ScheduleError: the table comes to a halt.
    """
    begins = play(table, wiring, Costs().of).spans
    rows: dict[str, list[Action]] = {worker: [] for worker in workers_of(owners)}
    order: Callable[[Action], float] = lambda action: begins[action][0]  # noqa: E731
    for action in sorted(table, key=order):
        rows[owner_of(owners, action.stage, action.microbatch)].append(action)
    return {worker: tuple(row) for worker, row in rows.items()}


def _agrees(table: Table, owners: Owners) -> bool:
    """Says whether the stages of each row are on one worker, and of other rows on others."""
    firsts = [
        {owners[stage][0] for stage in table.stages_of(row)} for row in range(len(table.rows))
    ]
    return all(len(each) == 1 for each in firsts) and len(set().union(*firsts)) == len(firsts)
