"""From slices to the numbers of the table. Pure arithmetic."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.group import Slice
from benchmarks.rounds import Measured
from benchmarks.workloads import Measure

_NANOSECONDS_PER_MICROSECOND = 1000


@dataclass(frozen=True, slots=True)
class Spread:
    """A median and the quartiles on both sides of it."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Return the spread of one or more values."""
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(low, median, high)


@dataclass(frozen=True, slots=True)
class Cell:
    """One column's result in one row.

    Args:
        microseconds: median duration of an operation.
        microseconds_p99: the duration that one operation in a hundred exceeds.
        per_second: median over the rounds of units done per second.
        ratio: how many times better than the first column, round by round;
            above 1 is better, for times and for rates.
        shared_core: the rounds in which a caller was on the core of the one it calls, of those
            of which it is known.
        known_core: the number of those.
    """

    microseconds: float
    microseconds_p99: float
    per_second: float
    ratio: Spread
    shared_core: int = 0
    known_core: int = 0


@dataclass(frozen=True, slots=True)
class Line:
    """One row's results: for each column's name its cell, in the order of the columns."""

    key: str
    title: str
    measure: Measure
    cells: dict[str, Cell]


def summarize(measured: Measured) -> Line:
    """Reduce all turns of a row to a line of the table."""
    row = measured.row
    first = next(iter(measured.slices.values()))
    return Line(
        row.key,
        row.title,
        row.measure,
        {name: _cell(row.measure, turns, first) for name, turns in measured.slices.items()},
    )


def _cell(measure: Measure, turns: Sequence[Slice], first: Sequence[Slice]) -> Cell:
    durations = [duration for turn in turns for duration in turn.nanoseconds]
    return Cell(
        statistics.median(durations) / _NANOSECONDS_PER_MICROSECOND,
        _percentile_99(durations) / _NANOSECONDS_PER_MICROSECOND,
        statistics.median(turn.per_second for turn in turns),
        Spread.of(
            [_times_better(measure, turn, base) for turn, base in zip(turns, first, strict=True)]
        ),
        sum(turn.shared_core is True for turn in turns),
        sum(turn.shared_core is not None for turn in turns),
    )


def _times_better(measure: Measure, turn: Slice, base: Slice) -> float:
    if measure is Measure.RATE:
        return turn.per_second / base.per_second
    return statistics.median(base.nanoseconds) / statistics.median(turn.nanoseconds)


def _percentile_99(values: Sequence[int]) -> float:
    if len(values) == 1:
        return values[0]
    return statistics.quantiles(values, n=100, method="inclusive")[98]
