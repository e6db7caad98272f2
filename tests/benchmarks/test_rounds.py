"""The order of things: who is started when, and whose turn it is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from benchmarks import rounds
from benchmarks.commands import Column
from benchmarks.group import Launch, Slice
from benchmarks.rounds import Plan, measure
from benchmarks.workloads import ROWS, Row

COLUMNS = [Column(name, name, "", {}, {}) for name in ("torch", "ours")]


class FakeGroup:
    """A column's processes that only count how often their like were started.

    Its turns last as many nanoseconds as that.
    """

    log: list[str]

    def __init__(self, column: Column, size: int, launch: Launch, *, modules: list[str]) -> None:
        self.column = column
        self.log.append(f"{column.name} of {size} starts")
        self._number = sum(each == self.log[-1] for each in self.log)

    def __enter__(self) -> FakeGroup:
        return self

    def __exit__(self, *_: object) -> None:
        self.log.append(f"{self.column.name} ends")

    @contextmanager
    def awake(self) -> Iterator[None]:
        yield

    def prepare(self, row: Row) -> None: ...

    def measure(self, row: Row, seconds: float, least: int) -> Slice:
        self.log.append(f"{self.column.name} {row.key}")
        return Slice((self._number,), 1.0)

    def forget(self, row: Row) -> None: ...


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    FakeGroup.log = []
    monkeypatch.setattr(rounds, "Group", FakeGroup)
    return FakeGroup.log


@pytest.mark.parametrize(("count", "starts"), [(12, 4), (7, 3), (1, 1), (5, 5)])
def test_rounds_are_dealt_out_evenly_over_the_starts(count: int, starts: int) -> None:
    plan = Plan(count, starts, 0.25, 3)
    dealt = [plan.rounds_of(start) for start in range(starts)]
    assert [number for each in dealt for number in each] == list(range(count))
    assert max(map(len, dealt)) - min(map(len, dealt)) <= 1


def test_each_start_has_processes_of_its_own(log: list[str]) -> None:
    rows = [ROWS["empty"], ROWS["small"]]
    done = list(measure(rows, COLUMNS, Plan(3, 2, 0.25, 3)))
    assert [measured.row for measured in done] == rows
    for measured in done:  # one round with the first processes, two with the next
        for turns in measured.slices.values():
            assert [turn.nanoseconds for turn in turns] == [(1,), (2,), (2,)]
    starts = [index for index, each in enumerate(log) if each.endswith("of 2 starts")]
    ends = [index for index, each in enumerate(log) if each.endswith("ends")]
    assert len(starts) == len(ends) == 4
    assert ends[1] < starts[2]


def test_turns_go_back_and_forth_over_the_starts(log: list[str]) -> None:
    told = []
    plan = Plan(3, 3, 0.25, 3)
    list(measure([ROWS["empty"]], COLUMNS, plan, lambda: told.append(len(log))))
    turns = [each.split()[0] for each in log if each.endswith("empty")]
    assert turns == ["torch", "ours", "ours", "torch", "torch", "ours"]
    assert len(told) == 3
