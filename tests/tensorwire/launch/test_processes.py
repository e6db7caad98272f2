"""Agents and their workers as real processes; the workers need no torch, so they start at once."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tensorwire import dropin
from tests.free_ports import free_port
from tests.tensorwire.launch.jobs import LIGHT, SECONDS, Job, job
from tests.waiting import until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("process_server"),
    pytest.mark.xdist_group("launch"),
]


@pytest.fixture
def work(tmp_path: Path) -> Iterator[Job]:
    with job(tmp_path) as made:
        yield made


def logs_of(work: Job) -> dict[str, str]:
    """The files that workers wrote, by their paths below the job's folder."""
    (run,) = (work.folder / "logs").iterdir()
    return {str(path.relative_to(run)): path.read_text() for path in sorted(run.rglob("*.log"))}


def test_workers_of_roles_have_names_ids_and_logs_of_their_own(work: Job) -> None:
    agent = work.start(
        *("--standalone", "--role", "ps:1,service", "--role", "trainer:12,max_restarts=1"),
        *("--log-dir", str(work.folder / "logs"), "--redirects", "3", "--tee", "trainer:1"),
        *("--monitor-interval", "0.02", LIGHT, str(work.folder)),
        *("trainer=done", "trainer:11#1=fail"),
    )
    assert agent.wait() == 0
    names = [f"trainer:{number}#1" for number in range(12)]
    assert work.names == sorted([*names, "ps:0#1", "trainer:11#2"])
    seen = work.life("trainer:11", 2).environment
    wanted = {
        "RANK": "12",
        "WORLD_SIZE": "13",
        "LOCAL_RANK": "11",
        "LOCAL_WORLD_SIZE": "12",
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_NAME": "trainer",
        "ROLE_RANK": "11",
        "ROLE_WORLD_SIZE": "12",
        "MASTER_ADDR": "127.0.0.1",
        "TORCHELASTIC_RESTART_COUNT": "1",
        "TORCHELASTIC_MAX_RESTARTS": "1",
        "RPC_WORKER_NAME": "trainer:11",
        "RPC_WORKER_ID": "12",
        "RPC_SERVICE": "0",
    }
    assert {name: seen.get(name) for name in wanted} == wanted
    assert work.life("ps:0").environment["RPC_SERVICE"] == "1"
    assert {each.environment["RPC_WORKER_ID"] for each in work.starts} == set(map(str, range(13)))
    assert [each.name for each in work.starts if each.lives] == []
    logs = logs_of(work)
    assert logs["trainer/11/attempt_0/stdout.log"] == "trainer:11 speaks, life 1\n"
    assert logs["trainer/11/attempt_1/stdout.log"] == "trainer:11 speaks, life 2\n"
    assert logs["trainer/3/attempt_0/stdout.log"] == "trainer:3 speaks, life 1\n"
    assert logs["ps/0/attempt_0/stderr.log"] == "ps:0 complains\n"
    assert "[trainer:11]:trainer:11 speaks, life 2" in agent.said
    assert "ps:0 speaks" not in agent.said


def test_a_worker_that_fails_again_and_again_ends_the_job_whose_report_names_it(work: Job) -> None:
    """Also one that is killed while it tells of its failure, or that ends without a word.

    It is forked, so its traceback is there without torch's decorator.
    """
    agent = work.start(
        *("--standalone", "--role", "ps:1,service", "--role", "trainer:3,max_restarts=3"),
        *("--monitor-interval", "0.02", "--run-path", "--start-method", "fork"),
        *(LIGHT, str(work.folder), "trainer:1#1=torn", "trainer:1#2=fail", "trainer:1=raise"),
        "trainer:2=vanish",
    )
    assert agent.wait() == 1
    names = ["ps:0#1", "trainer:0#1", *(f"trainer:1#{life}" for life in range(1, 5)), "trainer:2#1"]
    assert work.names == names
    assert "trainer:1 (id 2, process " in agent.said
    assert "failed first, with exit code 1 after 3 restarts" in agent.said
    assert "ArithmeticError: trainer:1 cannot count" in agent.said
    assert [each.name for each in work.starts if each.lives] == []


def test_a_signal_to_the_agent_ends_its_workers_and_those_that_do_not_hear_are_killed(
    work: Job,
) -> None:
    agent = work.start(
        *("--standalone", "--role", "trainer:2", "--monitor-interval", "0.02"),
        *("--shutdown-timeout", "1", "--signals-to-handle", "SIGTERM,SIGUSR1"),
        *(LIGHT, str(work.folder), "trainer:1=deaf"),
    )
    workers = [work.life(f"trainer:{number}") for number in range(2)]
    agent.send(signal.SIGUSR1)
    assert agent.wait() == 128 + signal.SIGUSR1
    assert [each.name for each in workers if each.lives] == []
    obeyed, deaf = (f"trainer:{n} (process {each.pid})" for n, each in enumerate(workers))
    assert f"{obeyed} was stopped" in agent.said
    assert "trainer:1 did not end within 0.5 s; it is sent SIGUSR1 once more" in agent.said
    assert f"{deaf} ended with signal SIGKILL" in agent.said


def test_agents_come_and_go_and_a_spare_seat_takes_over_from_one_that_was_killed(
    work: Job,
) -> None:
    port = free_port()
    meets = ("--rdzv-endpoint", f"localhost:{port}", "--rdzv-id", "j", "--nnodes", "1:3")
    meets += ("--monitor-interval", "0.02", "--rdzv-conf", "keep_alive_interval=0.2")
    meets += ("--role", "trainer:1,max_restarts=0")
    program = (LIGHT, str(work.folder), "trainer:2#1=deaf")
    first = work.start(*meets, "--spare", "1", *program)
    work.life("trainer:0")
    second = work.start(*meets, *program)
    leaves = work.life("trainer:1")
    assert leaves.environment["GROUP_RANK"] == "1"

    third = work.start(*meets, *program)
    former = work.life("trainer:2")
    third.send(signal.SIGKILL)
    killed = time.monotonic()
    until(lambda: not former.lives, SECONDS, 0.01)
    seconds = time.monotonic() - killed
    assert seconds < 2, f"a worker of a killed agent ended after {seconds:.1f} s"
    taken = work.life("trainer:2", 2)  # by the first, which has a spare seat
    assert taken.environment["GROUP_RANK"] == "0"
    assert "agent 2 gives no sign of life; it is struck out" in work.said

    second.send(signal.SIGTERM)
    assert second.wait() == 128 + signal.SIGTERM
    assert not leaves.lives
    fourth = work.start(*meets, *program)
    place = work.life("trainer:1", 2).environment
    assert (place["GROUP_RANK"], place["GROUP_WORLD_SIZE"]) == ("1", "2")
    assert work.life("trainer:0").lives
    assert taken.lives
    work.end()
    assert [first.wait(), fourth.wait()] == [0, 0]
    over = max(work.ended_at(f"trainer:{n}", life) for n, life in [(0, 1), (1, 2), (2, 2)])
    seconds = max(first.ended_at, fourth.ended_at) - over
    assert seconds < 10, f"the last agent ended {seconds:.1f} s after the job"
    assert work.names == [
        f"trainer:{n}#{life}" for n, life in [(0, 1), (1, 1), (1, 2), (2, 1), (2, 2)]
    ]


def test_a_newcomer_whose_worker_fails_leaves_the_others_alone(work: Job) -> None:
    meets = ("--rdzv-endpoint", f"localhost:{free_port()}", "--rdzv-id", "j", "--nnodes", "1:2")
    meets += ("--monitor-interval", "0.02", "--role", "ps:1,service")
    meets += ("--role", "trainer:1,max_restarts=1", LIGHT, str(work.folder))
    first = work.start(*meets, "trainer:1#1=fail", "trainer:1#2=raise")
    healthy = [work.life("trainer:0"), work.life("ps:0")]
    second = work.start(*meets, "trainer:1#1=fail", "trainer:1#2=raise")
    assert second.wait() == 1
    assert "this agent is out of the job, which goes on without it: trainer:1 (id " in second.said
    assert "failed first, with exit code 1 after 1 restart" in second.said
    assert "ArithmeticError: trainer:1 cannot count" in second.said
    assert not work.life("ps:1").lives
    until(lambda: "is taken out of the job, which goes on: trainer:1 failed" in first.said, SECONDS)
    third = work.start(*meets, "trainer:1#1=fail", "trainer:1#2=raise")
    assert work.life("trainer:1", 3).lives
    assert all(each.lives for each in healthy)
    work.end()
    assert [first.wait(), third.wait()] == [0, 0]


_JOB_FILE = """
standalone: true
monitor_interval: 0.02
max_restarts: 1
program: {light}
args: [{folder}]
roles:
  ps: {{count: 1, service: server_module, args: [{folder}]}}
  ddp: {{count: 2, pg: true}}
  reader: {{count: 1, restart: job}}
"""


def test_a_process_group_and_a_job_start_again_as_a_whole(work: Job) -> None:
    shutil.copy(LIGHT, work.folder / "server_module.py")
    (work.folder / "job.yaml").write_text(_JOB_FILE.format(light=LIGHT, folder=work.folder))
    agent = work.start("--job", "job.yaml")
    first = [work.life(name) for name in ("ddp:0", "ddp:1", "ps:0", "reader:0")]
    os.kill(first[1].pid, signal.SIGKILL)
    again = [work.life(name, 2).environment for name in ("ddp:0", "ddp:1")]
    assert [(each["RANK"], each["WORLD_SIZE"]) for each in again] == [("0", "2"), ("1", "2")]
    assert again[0]["MASTER_PORT"] == again[1]["MASTER_PORT"]
    assert again[0]["MASTER_PORT"] != first[0].environment["MASTER_PORT"]
    assert first[2].lives
    assert first[3].lives

    os.kill(first[3].pid, signal.SIGKILL)
    for name, life in [("ps:0", 2), ("reader:0", 2), ("ddp:0", 3), ("ddp:1", 3)]:
        work.life(name, life)
    assert not first[2].lives
    work.end()
    assert agent.wait() == 0


def test_without_roles_all_is_as_torchrun_does_it_and_torchrun_has_our_rendezvous(
    work: Job,
) -> None:
    port = free_port()
    program = (LIGHT, str(work.folder), "trainer:0#1=fail")
    flags = ("--nproc-per-node", "2", "--role", "trainer", "--max-restarts", "1")
    flags += ("--monitor-interval", "0.02", "--rdzv-endpoint", f"localhost:{port}", "--rdzv-id")
    ours = work.start(*flags, "ours", "--rdzv-backend", "c10d", *program)
    assert work.life("trainer:1", 2).lives  # torchrun starts all of them again
    work.end()
    assert ours.wait() == 0
    (work.folder / "end").unlink()
    theirs = work.start(*flags, "theirs", "--rdzv-backend", "tensorwire", *program, main="torchrun")
    # A first life may be ended before it has noted anything.
    until(lambda: len([each for each in work.starts if each.life == 2]) == 4, SECONDS)
    work.end()
    assert theirs.wait() == 0
    again = [each for each in work.starts if each.life == 2]
    assert sorted(each.name for each in again) == 2 * ["trainer:0"] + 2 * ["trainer:1"]
    one, other = (each.environment for each in again if each.name == "trainer:0")
    assert set(one) - {"RPC_GROUP_KEY_FILE"} == set(other)


def test_a_launcher_of_ones_own_has_its_rendezvous_events_and_metrics(work: Job) -> None:
    agent = work.start(str(work.folder), main="tests.tensorwire.launch.programs.own_launcher")
    assert agent.wait() == 0, agent.said
    seen = json.loads((work.folder / "seen.json").read_text())
    assert (seen["failed"], seen["values"]) == (False, {"0": 0, "1": 1, "2": 4})
    assert seen["metrics"].count("workers.trainer.start") == 3
    assert seen["metrics"].count("workers.trainer.restart") == 1
    assert seen["events"].count(["WORKER", "START"]) == 3
    assert seen["events"].count(["WORKER", "RESTART"]) == 1
    assert seen["events"].count(["WORKER", "SUCCEEDED"]) == 3


def test_flags_of_torchrun_and_dropin_have_their_effects_on_workers_with_roles(work: Job) -> None:
    port = free_port()
    agent = work.start(
        *("--nnodes", "1", "--node-rank", "0", "--master-addr", "localhost"),
        *("--master-port", str(port), "--role", "trainer:2", "--monitor-interval", "0.02"),
        *("--tee", "3", "--local-ranks-filter", "1", "--duplicate-stdout-filters", "speaks"),
        *("--virtual-local-rank", "--dropin", "--no-python"),
        *(sys.executable, LIGHT, str(work.folder), "trainer=done"),
        PET_LOG_DIR=str(work.folder / "logs"),
        TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE="<${role_name} ${local_rank}> ",
    )
    assert agent.wait() == 0, agent.said
    seen = [work.life(f"trainer:{number}").environment for number in range(2)]
    assert {each["MASTER_PORT"] for each in seen} == {str(port)}
    assert [each["CUDA_VISIBLE_DEVICES"] for each in seen] == ["0", "1"]
    assert [each["LOCAL_RANK"] for each in seen] == ["0", "0"]
    assert [dropin.environment(each) for each in seen] == seen  # nothing is left to add
    assert "<trainer 1> trainer:1 speaks, life 1" in agent.said
    assert "trainer:0 speaks" not in agent.said
    (filtered,) = (work.folder / "logs").glob("*/filtered_stdout.log")
    assert len(filtered.read_text().splitlines()) == 2
