"""The order of things: for each row, round after round, every column has its turn.

A group of processes keeps the mood it started in, such as which of its threads share a
core: four turns of one pair agreed within a tenth, and those of the next pair were a third
off. So the rounds are dealt out over several starts of all processes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from benchmarks.commands import Column
from benchmarks.group import Group, Launch, Slice
from benchmarks.workloads import Row

RAW = Column("raw", "raw", "", {}, {})


@dataclass(frozen=True, slots=True)
class Plan:
    """The amount to measure.

    Args:
        rounds: how many turns each column gets per row.
        starts: over how many starts of its processes; at most ``rounds``.
        seconds: how long a turn lasts.
        least: how many operations a turn has at least.
        launch: how the processes of a column are started.
    """

    rounds: int
    starts: int
    seconds: float
    least: int
    launch: Launch = Launch.APART

    def rounds_of(self, start: int) -> range:
        """The rounds that one of the starts measures."""
        bounds = [number * self.rounds // self.starts for number in (start, start + 1)]
        return range(*bounds)


@dataclass(frozen=True, slots=True)
class Measured:
    """All turns of one row: for each column's name its slices, one per round."""

    row: Row
    slices: dict[str, tuple[Slice, ...]]


Slices = dict[str, list[Slice]]
"""For each column's name its turns."""


def measure(
    rows: Sequence[Row],
    columns: Sequence[Column],
    plan: Plan,
    measured: Callable[[], object] = lambda: None,
) -> Iterator[Measured]:
    """Measure the rows in order; rows that need equally many processes share them.

    Args:
        rows: what is measured.
        columns: what is compared.
        plan: how much.
        measured: called after all turns of a round.
    """
    for (size, raw), sharing in itertools.groupby(rows, lambda row: (row.group_size, row.raw)):
        chosen = [RAW] if raw else list(columns)
        slices: dict[Row, Slices] = {row: {column.name: [] for column in chosen} for row in sharing}
        modules = {module: None for row in slices for module in row.modules}
        for start in range(plan.starts):
            with ExitStack() as running:
                groups = [
                    _start(running, column, size, plan.launch, list(modules)) for column in chosen
                ]
                for row, turns in slices.items():
                    _measure_row(row, groups, plan, start, turns, measured)
        for row, turns in slices.items():
            yield Measured(row, {name: tuple(each) for name, each in turns.items()})


def _start(
    running: ExitStack, column: Column, size: int, launch: Launch, modules: Sequence[str]
) -> Group:
    group = running.enter_context(Group(column, size, launch, modules=modules))
    with group.awake():
        return group  # asleep from here on


def _measure_row(
    row: Row,
    groups: Sequence[Group],
    plan: Plan,
    start: int,
    turns: Slices,
    measured: Callable[[], object],
) -> None:
    for group in groups:
        with group.awake():
            group.prepare(row)
    for number in plan.rounds_of(start):
        # Back and forth, so that no column always follows the same one.
        for group in groups if number % 2 == 0 else reversed(groups):
            with group.awake():
                turns[group.column.name].append(group.measure(row, plan.seconds, plan.least))
        measured()
    for group in groups:
        with group.awake():
            group.forget(row)
