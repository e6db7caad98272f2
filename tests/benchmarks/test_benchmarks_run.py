"""The benchmarks as they are run, with the smallest possible plan."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from tqdm import tqdm

from benchmarks import __main__, soak, trainer
from benchmarks.commands import Column
from benchmarks.group import Group, Launch
from benchmarks.rounds import RAW
from benchmarks.workloads import ROWS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("benchmarks"),
    pytest.mark.skipif(sys.platform != "linux", reason="stops and continues processes"),
]

_ROOT = Path(__file__).parents[2]
_SMALLEST_PLAN = ["--rounds", "2", "--starts", "1", "--seconds", "0.01", "--least", "1"]
_SMALLEST_PLAN += ["--launch", Launch.FORKED.value]  # of whose processes only one imports torch


@dataclass(frozen=True, slots=True)
class _Done:
    """A run of the benchmarks: its exit status, and what it printed."""

    status: int
    out: str
    err: str


@pytest.fixture
def run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., _Done]:
    """Runs the benchmarks with the smallest plan in this process, and draws nothing."""
    for draw in ("save_plot", "save_curve"):  # which would keep fonts open
        monkeypatch.setattr(__main__, draw, lambda lines, path: False)
    monkeypatch.setattr(tqdm, "monitor_interval", 0)  # no thread that outlives the bar

    def run(*given: str) -> _Done:
        monkeypatch.setattr(sys, "argv", ["benchmarks", *_SMALLEST_PLAN, *given])
        status = __main__.main()
        return _Done(status, *capsys.readouterr())

    return run


@pytest.mark.timeout(400)
def test_every_row_of_one_caller_runs_against_both_libraries(tmp_path: Path) -> None:
    rows = ["empty", "small", "echo64k", "async", "remote", "autograd"]
    rows += ["optimizer", "fused", "unix", "tcp"]
    rows.append("metrics")
    command = [sys.executable, "-m", "benchmarks", *_SMALLEST_PLAN, "--rows", *rows]
    done = subprocess.run(
        [*command, "--output", str(tmp_path / "numbers")],
        cwd=_ROOT, capture_output=True, text=True, timeout=380, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    saved = json.loads((tmp_path / "numbers.json").read_text())
    assert [row["key"] for row in saved["rows"]] == rows
    assert all(cell["microseconds"] > 0 for row in saved["rows"] for cell in row["cells"].values())
    assert set(saved["rows"][0]["cells"]) == {"torch", "ours"}
    assert "raw round trips" in done.stdout
    assert "of its time is counting for rpc.metrics()" in done.stdout
    assert (tmp_path / "numbers.png").stat().st_size > 0


def _children(process: int, thread: int) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{process}/task/{thread}/children").read_text().split()]


@contextmanager
def _running(
    column: Column, launch: Launch = Launch.APART
) -> Iterator[tuple[Group, list[list[int]]]]:
    """Two workers that are awake, with their process ids by the parent that they have."""
    before = _children(os.getpid(), threading.get_native_id())
    with Group(column, 2, launch) as group, group.awake():
        ours = _children(os.getpid(), threading.get_native_id())
        yield group, [_children(pid, pid) for pid in ours if pid not in before]


@pytest.mark.parametrize("launch", Launch)
def test_processes_have_the_sessions_and_parents_that_were_asked_for(
    launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lasting = tmp_path / "python"  # what a process runs does not matter here
    lasting.write_text("#!/bin/sh\nexec sleep 1000\n")
    lasting.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(lasting))
    before = _children(os.getpid(), threading.get_native_id())
    group = Group(RAW, 2, launch)
    ours = _children(os.getpid(), threading.get_native_id())
    sessions = [os.getsid(pid) for pid in ours if pid not in before]
    group.__exit__(KeyboardInterrupt, None, None)
    assert len(sessions) == (1 if launch is Launch.FORKED else 2)
    assert len(set(sessions)) == (2 if launch is Launch.APART else 1)
    assert (os.getsid(0) in sessions) == (launch is Launch.TOGETHER)


@pytest.fixture
def refusal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """Runs the benchmarks in this process with arguments that they must refuse."""

    def run(*given: str) -> str:
        monkeypatch.setattr(sys, "argv", ["benchmarks", *_SMALLEST_PLAN, *given])
        with pytest.raises(SystemExit, match="2"):
            __main__.main()
        return capsys.readouterr().err

    return run


def test_more_starts_than_rounds_are_refused(refusal: Callable[..., str]) -> None:
    said = refusal("--rows", "empty", "--starts", "3")
    assert "--starts 3 is not from 1 to --rounds 2" in said


@pytest.mark.parametrize(
    ("parse", "about"),
    [
        (__main__.parse, "Compares TensorWire with torch.distributed.rpc on one machine, "),
        (soak.parse, "Does memory stay flat? Calls one worker very often, and watches "),
    ],
)
def test_help_says_what_is_measured(
    parse: Callable[[], object],
    about: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(sys, "argv", ["benchmarks", "--help"])
    with pytest.raises(SystemExit, match="0"):
        parse()
    printed = capsys.readouterr().out
    assert printed.split("\n\n")[1].startswith(about)
    assert "``" not in printed


def test_only_what_is_said_to_go_over_tcp_does() -> None:
    options = argparse.Namespace(options={}, backend="TENSORWIRE")
    assert _unix_sockets(__main__.column("ours", options))
    assert not _unix_sockets(__main__.column("ours-tcp", options))


def _unix_sockets(column: Column) -> set[str]:
    """The inodes of the connected ones of two workers that have exchanged large tensors."""
    with _running(column, Launch.FORKED) as (group, families):
        group.prepare(ROWS["echo1m"])
        pids = [pid for family in families for pid in family]
        assert len(pids) == 2
        held = {os.readlink(end) for pid in pids for end in Path(f"/proc/{pid}/fd").iterdir()}
        rows = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
        return {row[6] for row in rows if row[5] == "03" and f"socket:[{row[6]}]" in held}


@pytest.mark.parametrize(
    ("column", "backend", "needed"),
    [
        ("ours-busy-poll", "TENSORPIPE", "TENSORWIRE"),
        ("ours-tcp", "FAULTY_TENSORWIRE", "TENSORPIPE or TENSORWIRE"),
    ],
)
def test_a_column_that_says_nothing_of_the_backend_is_refused(
    column: str, backend: str, needed: str, refusal: Callable[..., str]
) -> None:
    said = refusal("--rows", "empty", "--columns", "torch", column, "--backend", backend)
    assert f"--columns {column} needs --backend {needed}" in said


def test_the_main_job_runs_beside_one_process(run: Callable[..., _Done], tmp_path: Path) -> None:
    rows = ["--rows", "job", "alone", "--columns", "ours", "--backend", "TENSORWIRE"]
    done = run(*rows, "--output", str(tmp_path / "numbers"))
    assert done.status == 0, done.err
    assert "of each trainer's time is computing" in done.out


def test_a_member_that_fails_is_named_with_the_end_of_its_log(run: Callable[..., _Done]) -> None:
    done = run("--rows", "empty", "--columns", "ours", "--backend", "CARRIER_PIGEON")
    assert done.status == 1
    assert "ours, rank 0 ended unexpectedly" in done.err
    assert "CARRIER_PIGEON" in done.err


def test_starts_of_groups_are_measured_beside_torchs() -> None:
    columns = ["--columns", "torch", "TENSORWIRE"]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.start", "--workers", "2", "--rounds", "1", *columns],
        cwd=_ROOT,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"[0-9.]+ s \([0-9.]+ to [0-9.]+\), cpu +[0-9]+ ms", done.stdout)) == 2


@pytest.mark.timeout(300)
def test_a_trainer_is_measured_alone_with_servers_and_with_torchs_rpc() -> None:
    pytest.importorskip("transformers")
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.trainer", "--quick", "--rounds", "2", "--steps", "1"],
        cwd=_ROOT, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert all(f"\n  {column:<15}" in done.stdout for column in trainer.COLUMNS)
