"""The order of things: for each row, round after round, every column has its turn."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from benchmarks.commands import Column
from benchmarks.group import Group, Slice
from benchmarks.workloads import Row

RAW = Column("raw", "raw", "", {}, {})


@dataclass(frozen=True, slots=True)
class Plan:
    """How much to measure.

    Args:
        rounds: how many turns each column gets per row.
        seconds: how long a turn lasts.
        least: how many operations a turn has at least.
    """

    rounds: int
    seconds: float
    least: int


@dataclass(frozen=True, slots=True)
class Measured:
    """All turns of one row: for each column's name its slices, one per round."""

    row: Row
    slices: dict[str, tuple[Slice, ...]]


def measure(rows: Sequence[Row], columns: Sequence[Column], plan: Plan) -> Iterator[Measured]:
    """Measure the rows in order; rows that need equally many processes share them."""
    for (size, raw), sharing in itertools.groupby(rows, lambda row: (row.group_size, row.raw)):
        with ExitStack() as running:
            chosen = [RAW] if raw else list(columns)
            groups = [_start(running, column, size) for column in chosen]
            for row in sharing:
                yield _measure_row(row, groups, plan)


def _start(running: ExitStack, column: Column, size: int) -> Group:
    group = running.enter_context(Group(column, size))
    with group.awake():
        return group  # asleep from here on


def _measure_row(row: Row, groups: Sequence[Group], plan: Plan) -> Measured:
    for group in groups:
        with group.awake():
            group.prepare(row)
    slices: dict[str, list[Slice]] = {group.column.name: [] for group in groups}
    for number in range(plan.rounds):
        # Back and forth, so that no column always follows the same one.
        for group in groups if number % 2 == 0 else reversed(groups):
            with group.awake():
                slices[group.column.name].append(group.measure(row, plan.seconds, plan.least))
    for group in groups:
        with group.awake():
            group.forget(row)
    return Measured(row, {name: tuple(turns) for name, turns in slices.items()})
