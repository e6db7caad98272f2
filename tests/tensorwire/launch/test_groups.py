"""Jobs whose workers are a group, or a process group: some are killed, and the others go on."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.free_ports import free_port
from tests.tensorwire.launch.jobs import FORKED, PROGRAMS, SECONDS, Job, is_running, job
from tests.waiting import eventually, until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("process_server"),
    pytest.mark.xdist_group("launch"),
    pytest.mark.timeout(300),
]


@pytest.fixture
def work(tmp_path: Path) -> Iterator[Job]:
    with job(tmp_path) as made:
        yield made


def progress(work: Job, name: str) -> dict[str, Any]:
    path = work.folder / f"{name}.progress"
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"steps": 0}
    return found


def works_on(work: Job, name: str, other_than: int = 0) -> dict[str, Any]:
    """Waits until a trainer, in another process than that, has done some more steps."""

    def done() -> int:
        now = progress(work, name)
        return int(now["steps"]) if now.get("pid", other_than) != other_than else -1

    before = max(0, done())
    assert eventually(lambda: done() >= before + 3, SECONDS, 0.05), (
        f"{name} makes no steps; its agents said:\n{work.said}"
    )
    return progress(work, name)


def test_only_what_died_starts_again_and_the_others_go_on(work: Job) -> None:
    meets = ("--rdzv-endpoint", f"localhost:{free_port()}", "--rdzv-id", "j", "--nnodes", "1:2")
    member = (str(PROGRAMS / "member.py"), str(work.folder))
    roles = ("--role", "ps:2,service,max_restarts=1", "--role", "trainer:2,max_restarts=1")
    agent = work.start(*meets, *roles, *FORKED, *member)
    first, second = works_on(work, "trainer:0"), works_on(work, "trainer:1")

    os.kill(first["pid"], signal.SIGKILL)
    again = works_on(work, "trainer:0", first["pid"])
    assert (again["id"], again["incarnation"]) == (first["id"], first["incarnation"] + 1)
    assert again["seen"] == first["seen"] == works_on(work, "trainer:1")["seen"]

    server = first["seen"]["ps:1"]
    os.kill(server, signal.SIGKILL)
    for name, trainer in [("trainer:0", again), ("trainer:1", second)]:
        until(lambda name=name: progress(work, name)["seen"]["ps:1"] != server, SECONDS, 0.05)
        now = works_on(work, name)
        assert (now["pid"], now["seen"]["ps:0"]) == (trainer["pid"], trainer["seen"]["ps:0"])

    os.kill(second["pid"], signal.SIGSTOP)  # in some seconds the group declares it lost
    joins = work.start(*meets, "--role", "trainer:1,max_restarts=1", *member)
    third = works_on(work, "trainer:2")
    joins.send(signal.SIGKILL)
    until(lambda: not is_running(third["pid"]), SECONDS)
    assert works_on(work, "trainer:0")["pid"] == again["pid"]

    assert works_on(work, "trainer:1", second["pid"])["incarnation"] > second["incarnation"]
    assert not is_running(second["pid"])
    assert works_on(work, "trainer:0")["pid"] == again["pid"]
    assert "trainer:1 is killed: its group declared it lost" in agent.said
    work.end()
    assert agent.wait() == 0


def sees_another(work: Job, name: str, server: str, former: int) -> bool:
    """True once a trainer's calls to that server arrive in another process."""
    return bool(progress(work, name)["seen"].get(server) != former)


@pytest.mark.kills
@pytest.mark.timeout(1200)
def test_a_worker_that_is_killed_at_any_moment_comes_back_and_the_others_go_on(
    work: Job, full_length: bool, record_property: Callable[[str, Any], None]
) -> None:
    kills, dice = 30 if full_length else 1, random.Random(1)
    trainers = ("trainer:0", "trainer:1")
    agent = work.start(
        *("--standalone", "--role", "ps:2,service,max_restarts=99"),
        *("--role", "trainer:2,max_restarts=99", *FORKED),
        *(str(PROGRAMS / "member.py"), str(work.folder)),
    )
    for _ in range(kills):
        now = {name: works_on(work, name) for name in trainers}
        lives = {**now["trainer:0"]["seen"], **{name: now[name]["pid"] for name in trainers}}
        victim = dice.choice(["ps:0", "ps:1", *trainers])
        time.sleep(dice.uniform(0, 0.3))  # no synchronisation: the moment is to be any
        os.kill(lives[victim], signal.SIGKILL)
        if victim in trainers:
            again = works_on(work, victim, lives[victim])
            assert again["incarnation"] == now[victim]["incarnation"] + 1
        for name in trainers:
            until(partial(sees_another, work, name, victim, lives[victim]), SECONDS, 0.05)
            assert name == victim or works_on(work, name)["pid"] == lives[name]
    work.end()
    assert agent.wait() == 0
    record_property("times", kills)


def test_a_process_group_is_formed_anew_after_a_death(work: Job) -> None:
    agent = work.start(
        *("--standalone", "--role", "ddp:2,pg,max_restarts=1"),
        *(*FORKED, str(PROGRAMS / "ddp.py"), str(work.folder)),
    )

    def averages(life: int) -> list[str]:
        paths = [work.folder / f"ddp:{rank}.{life}" for rank in range(2)]
        return [path.read_text() if path.exists() else "" for path in paths]

    for life in (0, 1):
        until(lambda life=life: all(a.endswith(" 2 0.5") for a in averages(life)), SECONDS, 0.05)
        if life == 0:
            os.kill(int(averages(0)[1].split()[0]), signal.SIGKILL)
    work.end()
    assert agent.wait() == 0


def test_a_killed_parameter_server_comes_back_and_trainers_are_not_restarted(work: Job) -> None:
    """With a backup nothing is lost; without, all return to one snapshot."""
    agent = work.start(
        *("--standalone", "--role", "ps:2,service=tensorwire.parameter_server,max_restarts=2"),
        *("--role", "trainer:2,max_restarts=0", *FORKED),
        *(str(PROGRAMS / "counts.py"), str(work.folder)),
        RPC_BACKEND="TENSORWIRE",
    )
    assert agent.wait() == 0, agent.said
    for trainer in range(2):
        seen = json.loads((work.folder / f"trainer:{trainer}.json").read_text())
        kept, alone = seen["kept"], seen["alone"]
        assert kept == {"rows": [12.0], "rolled_back": [], "lives": [1, 2]}
        assert alone["rows"] == [12.0]
        assert len(alone["rolled_back"]) == 1
        assert 4 <= alone["rolled_back"][0] < 8
        assert alone["lives"] == [1, 3]
