"""Real jobs: standstills are named right, a stopped process is told, and commands show the job.

``TENSORWIRE_SCREENSHOTS=FOLDER`` keeps a picture of ``rpcrun top``.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import signal
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tensorwire.watching import terminal
from tensorwire.watching.hub import Viewer
from tensorwire.watching.jobs import running_jobs
from tensorwire.watching.rates import rates
from tensorwire.watching.views import JobView
from tests.tensorwire.launch.jobs import FORKED, SECONDS, Job, job
from tests.waiting import until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("process_server"),
    pytest.mark.xdist_group("launch"),
    pytest.mark.timeout(500),
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


ROLES = [
    "serves:1", "sleeps:1", "locks:1", "ring:3", "loads:1", "collects:1", "holds:1", "hangs:1",
    "stops:1", "ranks:2,pg", "servers:1,service", "trainers:2",
]  # fmt: skip
QUIET = ["evaluates:1", "first:1", "moves:1"]
WANTED = [
    "sleeps:0 waits for serves:0, which has been running sleep_in_a_handler for sleeps:0",
    "running take_the_lock for locks:0",
    "ring:0 waits for ring:1 waits for ring:2 waits for ring:0: a cycle",
    "loads:0 waits for its data loader",
    "collects:0 has been collecting garbage for",
    "holds:0 has not answered for",
    "hangs:0 waits in the kernel (state D)",
    "stops:0 is stopped (kernel state T",
    "ranks:0 waits in all_reduce of a process group; missing from it: ranks:1 is in wait_for",
    "and has neither pushed nor called cluster.finish()",
]


def flags(roles: Sequence[str]) -> list[str]:
    return [text for role in roles for text in ("--role", role)]


def test_each_kind_of_standstill_is_named_and_slow_phases_are_not(work: Job) -> None:
    os.mkfifo(work.folder / "fifo")
    runtime = os.environ["XDG_RUNTIME_DIR"]
    work.start("--standalone", "--stall-timeout", "5", *flags(ROLES + QUIET), *FORKED, STALLS,
               str(work.folder), XDG_RUNTIME_DIR=runtime)  # fmt: skip
    let_go_on(work, 17)
    until(lambda: all(text in work.said for text in WANTED), 200, 0.2)
    until(lambda: "stacks of loads:0" in work.said, SECONDS, 0.1)
    keep_picture(work)
    told = [line for line in work.said.splitlines() if "no progress for" in line]
    assert any("trainers:1" in line and "cluster.finish()" in line for line in told)
    assert not [line for line in told if any(role[:-2] in line for role in QUIET)]

    seen = workers(work)
    assert seen["evaluates:0"]["facts"]["progress"]["phase"] == "evaluation"
    assert seen["first:0"]["facts"]["progress"]["steps"] == 0
    assert seen["moves:0"]["facts"]["progress"]["steps"] > 5
    assert "sleep_in_a_handler" in ask(work, "stacks", "serves:0")
    table = ask(work, "top", "--once")
    assert "evaluation" in table
    assert "! no progress for" in table
    let_go(work, seen)


def let_go_on(work: Job, count: int) -> None:
    """Has workers stand still, once their agent has seen that so many have made a step."""
    until(lambda: bool(running_jobs()), 150, 0.1)

    def moved() -> int:
        facts = [worker["facts"] for worker in workers(work).values() if worker["facts"]]
        return sum(each["progress"]["steps"] > 0 for each in facts)

    until(lambda: moved() >= count, 150, 0.2)
    (work.folder / "go").touch()


def keep_picture(work: Job) -> None:
    """Keeps a picture of ``rpcrun top``, if there is a folder for it; without the web's fonts."""
    folder = os.environ.get("TENSORWIRE_SCREENSHOTS")
    if not folder:
        return
    with Viewer(running_jobs()[0].path) as viewer:
        asked = [json.dumps(viewer.ask({"ask": "job"})).encode() for _ in range(2)]
    before, after = map(JobView.decode, asked)
    console = Console(record=True, width=130, file=io.StringIO())
    console.print(terminal.table(after, rates(before, after)))
    drawn = console.export_svg(title="rpcrun top", unique_id="top")
    Path(folder, "top.svg").write_text(re.sub(r"@font-face \{.*?\}", "", drawn, flags=re.DOTALL))


def let_go(work: Job, seen: Mapping[str, Any]) -> None:
    """Ends the job: wakes those that could not see that the test is over."""
    work.end()
    for name, number in (("stops:0", signal.SIGCONT), ("holds:0", signal.SIGUSR1)):
        os.kill(seen[name]["process"]["pid"], number)
    with contextlib.suppress(OSError):  # it has been read and closed meanwhile
        os.close(os.open(work.folder / "fifo", os.O_WRONLY | os.O_NONBLOCK))


def test_a_worker_that_stands_still_starts_again_if_asked(work: Job) -> None:
    options = ("--stall-timeout", "2", "--restart-stalled", "--rdzv-id", "stopped")
    work.start("--standalone", *options, *flags(["stops:1,max_restarts=1"]), *FORKED, STALLS,
               str(work.folder), XDG_RUNTIME_DIR=os.environ["XDG_RUNTIME_DIR"])  # fmt: skip
    let_go_on(work, 1)
    until(lambda: "stops:0 starts again, as life 2" in work.said, SECONDS, 0.1)
    work.end()
