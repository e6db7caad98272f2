"""Real jobs: standstills are named right, a stopped process is told, and commands show the job."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tensorwire.watching import terminal
from tensorwire.watching.jobs import running_jobs
from tests.tensorwire.launch.jobs import FORKED, SECONDS, Job, job
from tests.waiting import until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("process_server"),
    pytest.mark.xdist_group("launch"),
    pytest.mark.timeout(300),
]
STALLS = str(Path(__file__).parent / "stalls.py")


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # short enough for a socket
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        monkeypatch.setenv("COLUMNS", "200")
        with job(tmp_path) as made:
            yield made


def ask(work: Job, *arguments: str) -> str:
    """The output of ``rpcrun top``, ``status`` or ``stacks``."""
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(shown):
        code = terminal.run(arguments)
    assert code == 0, shown.getvalue() + work.said
    return shown.getvalue()


def workers(work: Job) -> dict[str, Any]:
    view = json.loads(ask(work, "status", "--json"))
    return {worker["name"]: worker for worker in view["workers"]}


def test_each_kind_of_standstill_is_named_and_slow_phases_are_not(work: Job) -> None:
    roles = ["serves:1", "sleeps:1", "locks:1", "ring:3", "loads:1", "evaluates:1", "moves:1"]
    flags = [text for role in roles for text in ("--role", role)]
    runtime = os.environ["XDG_RUNTIME_DIR"]
    work.start("--standalone", "--stall-timeout", "6", *flags, *FORKED, STALLS, str(work.folder),
               XDG_RUNTIME_DIR=runtime)  # fmt: skip
    wanted = [
        "sleeps:0 waits for serves:0, which has been running",
        "ring:0 waits for ring:1 waits for ring:2 waits for ring:0: a cycle",
        "loads:0 waits for its data loader",
        "take_the_lock",
    ]
    until(lambda: all(text in work.said for text in wanted), 150, 0.2)
    assert "stacks of loads:0" in work.said
    told = [line for line in work.said.splitlines() if "no progress for" in line]
    assert not [line for line in told if "evaluates:0" in line or "moves:0" in line]

    seen = workers(work)
    assert seen["evaluates:0"]["facts"]["progress"]["phase"] == "evaluation"
    assert seen["moves:0"]["facts"]["progress"]["steps"] > 5
    assert "sleep_in_a_handler" in ask(work, "stacks", "serves:0")
    table = ask(work, "top", "--once")
    assert "evaluation" in table
    assert "! no progress for" in table
    work.end()


def test_a_stopped_worker_is_told_as_such_and_starts_again_if_asked(work: Job) -> None:
    runtime = os.environ["XDG_RUNTIME_DIR"]
    options = ("--stall-timeout", "3", "--restart-stalled", "--rdzv-id", "stopped")
    work.start("--standalone", *options, "--role", "moves:2,max_restarts=1", *FORKED, STALLS,
               str(work.folder), XDG_RUNTIME_DIR=runtime)  # fmt: skip

    until(lambda: bool(running_jobs()), SECONDS, 0.1)

    def steps() -> int:
        facts = workers(work).get("moves:0", {}).get("facts")
        return int(facts["progress"]["steps"]) if facts else 0

    until(lambda: steps() > 8, SECONDS, 0.2)
    os.kill(workers(work)["moves:0"]["process"]["pid"], signal.SIGSTOP)
    until(lambda: "moves:0 starts again, as life 2" in work.said, SECONDS, 0.1)
    work.end()
