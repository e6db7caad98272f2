"""The ways all tutorials share: how they start, and how they end when something goes wrong."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.tutorials.jobs import ROOT, SECONDS_TO_NOTICE, assert_all_gone, tutorial
from tutorials import taking_part

_CARTPOLE = ("getting_started.cartpole", "agent:1 observer:2,service")
_FOREVER = ("--rounds", "100000", "--steps", "16")
_JOB = taking_part.Job(lambda options, names: None, fewest=2, most=300)
_SEAT = {"RPC_WORKER_NAME": "agent:0", "RPC_WORKER_ID": "0", "WORLD_SIZE": "3"}


def _parsed(folder: Path, given: Iterable[str] = ()) -> argparse.Namespace:
    parser = taking_part.parser("A tutorial.", "main:1 stage:2,service", output="of_no_tutorial")
    parser.add_argument("--rounds", type=taking_part.positive)
    return parser.parse_args(["--output", str(folder / "output"), *given])


@pytest.mark.parametrize(
    ("seat", "given", "complaint"),
    [
        ({}, "", "rpcrun starts this: rpcrun --standalone --role main:1 --role stage:2,service"),
        ({**_SEAT, "WORLD_SIZE": "1"}, "", "this takes at least 2 workers: rpcrun --standalone"),
        ({**_SEAT, "WORLD_SIZE": "301"}, "", "this takes at most 300 workers: rpcrun"),
        (_SEAT, "--output /dev/null", "argument --output: cannot write /dev/null: Not a directory"),
        (_SEAT, "--output /proc/x", "argument --output: cannot write /proc/x: No such file"),
    ],
    ids=["no-launcher", "too-few", "too-many", "output", "no-folder"],
)
def test_a_tutorial_says_in_a_sentence_what_is_wrong_with_its_start(
    seat: dict[str, str],
    given: str,
    complaint: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    for name in _SEAT:
        monkeypatch.delenv(name, raising=False)
    for name, value in seat.items():
        monkeypatch.setenv(name, value)
    assert taking_part.run(_parsed(tmp_path, given.split()), _JOB) == 2
    assert capfd.readouterr().err.startswith(complaint)


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ("--backend CARRIER_PIGEON", "there is no backend 'CARRIER_PIGEON'; there are "),
        ("--seed x", "invalid int value: 'x'"),
        ("--rounds x", "must be a whole number of at least 1, not 'x'"),
        ("--rounds 0", "must be a whole number of at least 1, not '0'"),
    ],
)
def test_an_option_of_all_tutorials_names_itself(
    given: str, complaint: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        _parsed(tmp_path, given.split())
    assert complaint in capfd.readouterr().err.rpartition("error: argument")[2]


def test_the_pages_start_tutorials_with_roles_as_their_help_does() -> None:
    """Each command of a page names the roles that the tutorial asks for, in their order."""
    commands = []
    for page in sorted((ROOT / "tutorials").rglob("README.md")):
        commands += re.findall(r"rpcrun (--standalone .*) -m (tutorials\.[\w.]+)", page.read_text())
    assert len(commands) >= 8
    for flags, module in commands:
        source = (ROOT / f"{module.replace('.', '/')}.py").read_text()
        (asked,) = re.findall(r'"(\w+:\d+ \w+:\d+,service[^"]*|--role \w+:\d+,[^"]*)"', source)
        assert [*map(_role, re.findall(r"--role (\S+)", flags))] == [
            *map(_role, asked.replace("--role ", "").split())
        ]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_make_passes_a_name_with_a_space_in_one_piece(tmp_path: Path) -> None:
    (tmp_path / ".tensorwire-ready").touch()
    train = ["make", "--dry-run", "train", f"VENV={tmp_path}", "OUTPUT=my curves.png"]
    # Of what a make above this one hands down (its flags, level and variables) nothing is meant.
    alone = {"PATH": os.environ["PATH"]}
    printed = subprocess.run(
        train, cwd=ROOT, env=alone, capture_output=True, text=True, check=True
    ).stdout
    assert shlex.split(printed)[-2:] == ["--output", "my curves.png"]


def _role(text: str) -> tuple[str, bool]:
    name, _, options = text.partition(":")
    return name, "service" in options


@pytest.mark.slow
@pytest.mark.xdist_group("tutorial_launch")
@pytest.mark.usefixtures("process_server")
@pytest.mark.skipif(sys.platform != "linux", reason="looks at processes through /proc")
def test_a_killed_worker_ends_the_tutorial_with_an_error_that_names_it(tmp_path: Path) -> None:
    with tutorial(tmp_path, *_CARTPOLE, *_FOREVER) as job:
        job.wait_for_output("round 5:")
        workers = job.workers()
        os.kill(workers[2], signal.SIGKILL)
        assert job.wait(SECONDS_TO_NOTICE) == 1
        assert "the job failed: observer:1 (id 2" in job.output()
        assert "failed first, with signal SIGKILL" in job.output()
        assert_all_gone(workers)


@pytest.mark.slow
@pytest.mark.xdist_group("tutorial_launch")
@pytest.mark.usefixtures("process_server")
@pytest.mark.skipif(sys.platform != "linux", reason="looks at processes through /proc")
def test_ctrl_c_ends_all_processes_of_a_tutorial(tmp_path: Path) -> None:
    with tutorial(tmp_path, *_CARTPOLE, *_FOREVER) as job:
        job.wait_for_output("round 5:")
        workers = job.workers()
        assert job.agent.pid is not None
        os.kill(job.agent.pid, signal.SIGINT)
        assert job.wait(SECONDS_TO_NOTICE) == 128 + signal.SIGINT
        assert job.output().endswith("rpcrun: left the job on SIGINT\n")
        assert_all_gone(workers)
