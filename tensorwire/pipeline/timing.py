"""Plays a table on a virtual clock: how long it takes, who is idle when.

The time of each action is given, or measured and then given; the result is exact. The
closed forms that the literature has for some schedules stand beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tensorwire.pipeline.actions import Action, Kind, Table
from tensorwire.pipeline.errors import ScheduleError
from tensorwire.pipeline.validation import Dependencies
from tensorwire.pipeline.wiring import Wiring


@dataclass(frozen=True, slots=True)
class Costs:
    """The cost of each kind of action to a stage, in any unit of time.

    Args:
        forward: of a forward pass.
        input: of the gradients of its inputs.
        weight: of the gradients of its weights; a whole backward pass costs both.
        transfer: from the end of an action until its result is at another worker.
    """

    forward: float = 1.0
    input: float = 1.0
    weight: float = 1.0
    transfer: float = 0.0

    def of(self, action: Action) -> float:
        """The cost of one action."""
        match action.kind:
            case Kind.FORWARD:
                return self.forward
            case Kind.INPUT:
                return self.input
            case Kind.WEIGHT:
                return self.weight
            case Kind.BACKWARD:
                return self.input + self.weight


@dataclass(frozen=True, slots=True)
class Timeline:
    """The times when each action of a table begins and ends, from 0 on.

    Args:
        spans: beginning and end, in the table's order.
        workers: how many there are.
    """

    spans: Mapping[Action, tuple[float, float]]
    workers: int

    @property
    def length(self) -> float:
        """From the beginning of the first action until the end of the last."""
        return max((end for _, end in self.spans.values()), default=0.0)

    @property
    def idle(self) -> float:
        """The share of all workers' time, 0 to 1, in which they do nothing: the bubble."""
        busy = sum(end - begin for begin, end in self.spans.values())
        return 1.0 - busy / (self.length * self.workers) if self.length else 0.0


def play(
    table: Table,
    wiring: Wiring,
    cost: Callable[[Action], float],
    transfer: float = 0.0,
) -> Timeline:
    """Plays a table: every worker does its actions in order, each as early as it can.

    Args:
        table: the actions.
        wiring: how the stages are connected.
        cost: how long an action takes.
        transfer: how long a result takes to another worker.

    Raises:
        ScheduleError: the table comes to a halt.
    """
    dependencies = Dependencies(table, wiring)
    worker_of = {action: worker for worker, row in enumerate(table.rows) for action in row}
    spans: dict[Action, tuple[float, float]] = {}
    at = [0] * len(table.rows)
    free = [0.0] * len(table.rows)
    while any(at[worker] < len(row) for worker, row in enumerate(table.rows)):
        before = len(spans)
        for worker, row in enumerate(table.rows):
            while at[worker] < len(row):
                action = row[at[worker]]
                needed = dependencies.of(action)
                if any(each not in spans for each in needed):
                    break
                arrivals = (
                    spans[each][1] + (transfer if worker_of[each] != worker else 0.0)
                    for each in needed
                )
                begin = max(free[worker], *arrivals, 0.0)
                free[worker] = begin + cost(action)
                spans[action] = (begin, free[worker])
                at[worker] += 1
        if len(spans) == before:
            raise ScheduleError("the table comes to a halt; validate() says where")
    return Timeline(spans, len(table.rows))


def theory(schedule: str, stages: int, workers: int, microbatches: int, costs: Costs) -> float:
    """The length of a step that the literature gives for a schedule without transfer times.

    Args:
        schedule: the name of one that has a closed form.
        stages: how many there are, all of the same ``costs``.
        workers: how many there are.
        microbatches: how many there are; for "interleaved" a multiple of ``workers``, for
            "zbv" and "zb-h1" at least as many as fill the pipeline.
        costs: of each stage.

    Raises:
        ValueError: there is no closed form for this schedule.
    """
    f, b, w = costs.forward, costs.input, costs.weight
    rounds = stages // workers
    match schedule:
        case "forward":
            return (microbatches * rounds + workers - 1) * f
        case "gpipe" | "1f1b" | "interleaved" | "looped_bfs":
            return (microbatches * rounds + workers - 1) * (f + b + w)
        case "zb-h1" if rounds == 1:
            return microbatches * (f + b + w) + (workers - 1) * (f + b - w)
        case "zbv" if f == b == w:
            return 6 * f * microbatches + (workers - 1) * f
    raise ValueError(f"there is no closed form for the length of {schedule!r} with {costs}")
