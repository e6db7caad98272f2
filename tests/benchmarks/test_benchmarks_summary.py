"""The arithmetic between what was measured and what the table says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import places
from benchmarks.commands import Answer, Birth, Column, Command, Place
from benchmarks.group import Slice
from benchmarks.report import remarks, table_line
from benchmarks.rounds import Measured
from benchmarks.summary import Spread, summarize
from benchmarks.workloads import ROWS


def _turn(microseconds: float, per_second: float = 1.0) -> Slice:
    return Slice((int(microseconds * 1000),) * 3, per_second)


def _measured(row: str, **columns: tuple[Slice, ...]) -> Measured:
    return Measured(ROWS[row], columns)


def test_a_column_that_needs_half_the_time_is_twice_as_good() -> None:
    line = summarize(_measured("empty", torch=(_turn(200),), ours=(_turn(100),)))
    assert line.cells["ours"].ratio == Spread(2.0, 2.0, 2.0)
    assert line.cells["ours"].microseconds == 100


def test_a_column_with_twice_the_rate_is_twice_as_good() -> None:
    line = summarize(_measured("async", torch=(_turn(1, 50.0),), ours=(_turn(1, 100.0),)))
    assert line.cells["ours"].ratio.median == 2.0


def test_ratios_are_taken_round_by_round() -> None:
    # The machine was ten times slower in the second round, for both.
    torch, ours = (_turn(100), _turn(1000)), (_turn(50), _turn(500))
    assert summarize(_measured("empty", torch=torch, ours=ours)).cells["ours"].ratio == Spread(
        2.0, 2.0, 2.0
    )


def test_the_first_column_is_as_good_as_itself() -> None:
    line = summarize(_measured("empty", torch=(_turn(100), _turn(300)), ours=(_turn(1), _turn(1))))
    assert line.cells["torch"].ratio == Spread(1.0, 1.0, 1.0)


def test_the_spread_is_the_quartiles() -> None:
    assert Spread.of([5.0, 1.0, 3.0, 2.0, 4.0]) == Spread(2.0, 3.0, 4.0)


def test_p99_is_near_the_worst_of_a_hundred() -> None:
    hundred = Slice(tuple(range(1000, 101_000, 1000)), 1.0)
    cell = summarize(_measured("empty", torch=(hundred,))).cells["torch"]
    assert cell.microseconds == 50.5
    assert cell.microseconds_p99 == pytest.approx(99.01)


def test_a_line_shows_both_values_and_the_ratio_with_its_spread() -> None:
    text = table_line(summarize(_measured("empty", torch=(_turn(2500),), ours=(_turn(100),))))
    for part in ("empty call", "2.5 ms", "100 µs", "25.00 [25.00-25.00]"):
        assert part in text


def test_remarks_relate_the_job_to_its_computing_time() -> None:
    # Two trainers together do 200 steps per second: 10 ms each, 4 ms of them computing.
    lines = [
        summarize(_measured("job", torch=(_turn(10_000, 200.0),))),
        summarize(_measured("alone", raw=(_turn(4_000),))),
    ]
    assert remarks(lines) == ["main job, torch: 40% of each trainer's time is computing"]


_COLUMN = Column("ours", "ours", "TENSORPIPE", {"num_worker_threads": 1}, {"A": "b"})


@pytest.mark.parametrize(
    "message",
    [
        Command("measure", "empty", 1, 0.5, 3),
        Answer(0.5, (1, 2, 3), core=1),
        Birth(Place(_COLUMN, 1, 2, "/a/file"), 3, 4, "/a/log"),
    ],
    ids=lambda message: type(message).__name__,
)
def test_messages_survive_the_way_to_a_member_and_back(message: Any) -> None:
    assert type(message).from_json(message.to_json()) == message
    assert "\n" not in message.to_json()


def test_every_row_has_its_own_key_and_title() -> None:
    assert all(row.key == key for key, row in ROWS.items())
    assert len({row.title for row in ROWS.values()}) == len(ROWS)


def test_the_remarks_say_how_often_both_processes_shared_a_core() -> None:
    turns = tuple(Slice((1000,), 1.0, shared) for shared in (True, False, True, None))
    line = summarize(_measured("empty", ours=turns))
    assert remarks([line]) == ["empty call, ours: both processes on one core in 2 of 3 rounds"]


def _thread(tasks: Path, name: str, ran: int, core: int) -> None:
    folder = tasks / name
    folder.mkdir(exist_ok=True)
    (folder / "schedstat").write_text(f"{ran} 5 7\n")
    (folder / "stat").write_text(f"{name} (a) b) S {' '.join(['0'] * 35)} {core} 0\n")


def test_a_process_is_where_its_thread_is_that_ran_most_lately(tmp_path: Path) -> None:
    _thread(tmp_path, "10", 1000, core=3)
    _thread(tmp_path, "11", 10, core=1)
    assert places.take(tmp_path) == 3
    _thread(tmp_path, "11", 500, core=2)
    assert places.take(tmp_path) == 2


def test_where_the_kernel_tells_no_core_there_is_none(tmp_path: Path) -> None:
    assert places.take(tmp_path / "absent") is None
