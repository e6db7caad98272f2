"""Checks that a table of actions can be carried out, and says how much memory it takes.

A table is right if each stage runs each micro-batch's passes once and on one worker, a
pass that needs another's result comes after it, and no two workers wait for each other.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable

from tensorwire.pipeline.actions import Action, Kind, Table
from tensorwire.pipeline.errors import ScheduleError
from tensorwire.pipeline.wiring import Wiring

_BACKWARD = (Kind.BACKWARD, Kind.INPUT)


class Dependencies:
    """Tells which actions of a table must be done before another may begin.

    Args:
        table: the actions.
        wiring: how the stages are connected.
    """

    def __init__(self, table: Table, wiring: Wiring) -> None:
        self._consumers = [wiring.consumers(stage) for stage in range(wiring.stages)]
        self._producers = [wiring.producers(stage) for stage in range(wiring.stages)]
        self._backward = {
            (action.stage, action.microbatch): action
            for action in table
            if action.kind in _BACKWARD
        }

    def of(self, action: Action) -> list[Action]:
        """The actions whose results ``action`` needs."""
        stage, microbatch = action.stage, action.microbatch
        match action.kind:
            case Kind.FORWARD:
                return [Action(each, Kind.FORWARD, microbatch) for each in self._producers[stage]]
            case Kind.WEIGHT:
                return [Action(stage, Kind.INPUT, microbatch)]
        gradients = [
            # A missing one is found missing elsewhere; here it stands for itself.
            self._backward.get((each, microbatch), Action(each, Kind.BACKWARD, microbatch))
            for each in self._consumers[stage]
        ]
        return [Action(stage, Kind.FORWARD, microbatch), *gradients]


def validate(table: Table, wiring: Wiring, most_held: int | None = None) -> None:
    """Checks a table for a pipeline that is connected in some way.

    Args:
        table: the actions.
        wiring: how the stages are connected.
        most_held: how many micro-batches' activations a stage may hold at once; None: any number.

    Raises:
        ScheduleError: something is missing, done twice, or can never begin; or too much is held.
    """
    _require_complete(table, wiring)
    _require_no_deadlock(table, wiring)
    if most_held is not None:
        for stage, held in held_microbatches(table).items():
            if held > most_held:
                raise ScheduleError(
                    f"stage {stage} holds the activations of {held} micro-batches at once, "
                    f"more than most_held={most_held}"
                )


def held_microbatches(table: Table) -> dict[int, int]:
    """Returns the most micro-batches of which each stage keeps activations at the same time.

    Args:
        table: what the stages do.
    """
    most: dict[int, int] = dict.fromkeys(range(table.stages), 0)
    if not table.trains:
        return most
    for row in table.rows:
        held: Counter[int] = Counter()
        for action in row:
            if action.kind is Kind.FORWARD:
                held[action.stage] += 1
                most[action.stage] = max(most[action.stage], held[action.stage])
            elif action.kind is not Kind.INPUT:
                held[action.stage] -= 1
    return most


def _require_complete(table: Table, wiring: Wiring) -> None:
    if table.stages != wiring.stages:
        raise ScheduleError(f"the table has {table.stages} stages, the pipeline {wiring.stages}")
    places: dict[Action, list[int]] = defaultdict(list)
    for worker, row in enumerate(table.rows):
        for action in row:
            places[action].append(worker)
    for action, workers in places.items():
        if len(workers) > 1:
            raise ScheduleError(f"{action} is there more than once, on workers {workers}")
    for stage in range(table.stages):
        for microbatch in range(table.microbatches):
            _require_passes(stage, microbatch, places, table.trains)


def _require_passes(
    stage: int, microbatch: int, places: dict[Action, list[int]], trains: bool
) -> None:
    planned = {kind for kind in Kind if Action(stage, kind, microbatch) in places}
    wanted: Iterable[set[Kind]] = [{Kind.FORWARD}]
    if trains:
        wanted = [{Kind.FORWARD, Kind.BACKWARD}, {Kind.FORWARD, Kind.INPUT, Kind.WEIGHT}]
    if planned not in wanted:
        kinds = " or ".join(
            "+".join(kind.value for kind in Kind if kind in each) for each in wanted
        )
        has = "+".join(kind.value for kind in Kind if kind in planned) or "nothing"
        raise ScheduleError(
            f"stage {stage} needs {kinds} of micro-batch {microbatch}, but has {has}"
        )
    workers = {places[Action(stage, kind, microbatch)][0] for kind in planned}
    if len(workers) > 1:
        raise ScheduleError(
            f"stage {stage} has its passes of micro-batch {microbatch} on workers {sorted(workers)}"
        )


def _require_no_deadlock(table: Table, wiring: Wiring) -> None:
    """Plays the table; where no worker can go on, names what each waits for."""
    dependencies = Dependencies(table, wiring)
    done: set[Action] = set()
    at = [0] * len(table.rows)
    moved = True
    while moved:
        moved = False
        for worker, row in enumerate(table.rows):
            while at[worker] < len(row) and done.issuperset(dependencies.of(row[at[worker]])):
                done.add(row[at[worker]])
                at[worker] += 1
                moved = True
    stuck = [
        _describe_wait(worker, row[at[worker]], dependencies, done)
        for worker, row in enumerate(table.rows)
        if at[worker] < len(row)
    ]
    if stuck:
        raise ScheduleError("the table comes to a halt: " + "; ".join(stuck))


def _describe_wait(
    worker: int, action: Action, dependencies: Dependencies, done: set[Action]
) -> str:
    missing = ", ".join(str(each) for each in dependencies.of(action) if each not in done)
    return f"worker {worker} waits with {action} for {missing}"
