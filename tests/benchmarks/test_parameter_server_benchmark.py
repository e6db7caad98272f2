"""The benchmark of the parameter server runs, and its tables say what was measured."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.parameter_server.__main__ import Column, best, table
from benchmarks.parameter_server.ahead import compare
from benchmarks.parameter_server.case import Case
from benchmarks.parameter_server.many import Many
from benchmarks.parameter_server.ours import AHEAD
from benchmarks.parameter_server.pairs import medians

_ROOT = Path(__file__).parents[2]


def _column(name: str, threads: int) -> Column:
    return Column(name, lambda case, rank, meeting: None, Case(1, 1, 1, threads, 0.0))


def test_each_program_is_compared_in_its_better_setting() -> None:
    found = {
        _column("ours", 1): [4.0, 2.0, 2.0],
        _column("ours", 2): [9.0, 9.0, 9.0],
        _column("theirs", 1): [50.0, 50.0, 50.0],
        _column("theirs", 2): [8.0, 6.0, 8.0],
    }
    assert {name: column.case.threads for name, column in best(found).items()} == {
        "ours": 1,
        "theirs": 2,
    }
    ours, theirs = table(found, "ours", "threads").splitlines()[1:]
    assert ours.split() == [
        "ours",
        "2.0",
        "(2.0",
        "to",
        "4.0)",
        "9.0",
        "(9.0",
        "to",
        "9.0)",
        "1.00",
    ]
    assert theirs.split()[-5:] == ["8.0", "(6.0", "to", "8.0)", "3.00"]


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.xdist_group("benchmarks")
@pytest.mark.skipif(sys.platform != "linux", reason="stops and continues processes")
def test_the_smallest_comparison_runs() -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "benchmarks.parameter_server",
            "--quick",
            "dense",
            "samples",
            "--tables",
            "3",
            "--most",
            "2",
            "--only",
            "by hand, our RPC",
            "modules, one process",
        ],
        cwd=_ROOT,
        env=os.environ | {"PYTHONPATH": str(_ROOT)},
        capture_output=True,
        text=True,
        timeout=380,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "0.25 MB dense, pushed and pulled" in done.stdout
    assert "the same, each sample once" in done.stdout
    assert "3 tables of 16, batch 32, 1 to 2 ids, 1 servers" in done.stdout
    assert "collection, ahead" in done.stdout


def test_the_settings_of_another_checkout_are_read_from_what_it_tells() -> None:
    told = table({_column(AHEAD, n): [4.0 / n, 2.0, 6.0] for n in (1, 2)}, AHEAD, "threads")
    assert medians(told) == [4.0, 2.0]


@pytest.mark.slow
@pytest.mark.xdist_group("benchmarks")
@pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0 or not os.access("/dev/net/tun", os.W_OK),
    reason="makes networks, which needs root",
)
def test_batches_ahead_are_compared_over_a_relay_that_takes_its_time() -> None:
    case = Many(100, 8, 4, 1, 0.0, tables=2)
    told = compare(case, delays=[1.0], known=[2], megabits=100.0, rounds=2, steps=3)
    _, line = told.splitlines()
    delay, _, ahead, milliseconds, *_ = line.split()
    assert (delay, ahead) == ("1", "2")
    assert float(milliseconds) >= 2.0  # there and back
