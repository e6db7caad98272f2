"""Jobs whose store lies in etcd: each machine of one dies, and a member of etcd, and it goes on."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.etcd import ETCD, EtcdCluster, etcd_cluster
from tests.machines import Machine, machines, require_machines
from tests.tensorwire.launch.jobs import FORKED, PROGRAMS, SECONDS, Agent, Job, job, works_on
from tests.waiting import until

pytest.importorskip("etcd3gw", reason="needs tensorwire[etcd]")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("process_server"),
    pytest.mark.xdist_group("launch"),
    pytest.mark.timeout(300),
    pytest.mark.skipif(ETCD is None, reason="needs etcd (Debian's etcd-server)"),
]

STRUCK_OUT = "gives no sign of life; it is struck out"


@pytest.fixture
def work(tmp_path: Path) -> Iterator[Job]:
    with job(tmp_path) as made:
        key = tmp_path / "key"
        key.write_text("a secret of the group")
        key.chmod(0o600)
        yield made


@pytest.fixture
def hosts() -> Iterator[Sequence[Machine]]:
    require_machines()
    with machines("one", "two", "three") as made:
        yield made


def start(work: Job, machine: Machine, cluster: EtcdCluster) -> Agent:
    """An agent with one server and one trainer."""
    meets = ("--rdzv-backend", "tensorwire-etcd", "--rdzv-endpoint", cluster.endpoint)
    flags = (*meets, "--rdzv-id", "j", "--nnodes", "1:2", "--monitor-interval", "0.05")
    key = ("--group-key-file", str(work.folder / "key"))
    roles = ("--role", "ps:1,service,max_restarts=3", "--role", "trainer:1,max_restarts=3")
    program = (str(PROGRAMS / "member.py"), str(work.folder), "ps:0")
    return work.start(*flags, *key, *roles, *FORKED, *program, machine=machine)


def strikes_out(agent: Agent, times: int) -> None:
    until(lambda: agent.said.count(STRUCK_OUT) >= times, SECONDS, 0.05)


@pytest.mark.kills(20, usual=1)
def test_a_member_of_etcd_and_each_machine_die_in_turn_and_the_job_goes_on(
    work: Job, hosts: Sequence[Machine], kill_seed: int, full_length: bool
) -> None:
    """The machine on which the job began is the first to die; etcd is on none of the job's."""
    draw = random.Random(kill_seed)
    folder = work.folder / "etcd"
    folder.mkdir()
    trainers = {"one": "trainer:0", "two": "trainer:1"}
    with etcd_cluster(folder, hosts[2]) as cluster:
        agents: dict[str, Agent] = {}
        for machine in hosts[:2]:
            agents[machine.name] = start(work, machine, cluster)
            works_on(work, trainers[machine.name])
        cluster.kill(0)
        for dying, staying in [hosts[:2], *([hosts[1::-1], hosts[:2], hosts[1::-1]] * full_length)]:
            former = works_on(work, trainers[dying.name])
            other = works_on(work, trainers[staying.name])
            told = agents[staying.name].said.count(STRUCK_OUT)
            time.sleep(draw.uniform(0, 1))  # the moment is to be any
            dying.power_off()
            strikes_out(agents[staying.name], told + 1)
            assert works_on(work, trainers[staying.name])["pid"] == other["pid"]
            dying.mend()
            agents[dying.name] = start(work, dying, cluster)
            works_on(work, trainers[dying.name], former)
        work.end()
        assert [each.wait(2 * SECONDS) for each in agents.values()] == [0, 0], work.said
        until(lambda: cluster.keys() == 0, 2 * SECONDS, 0.5)


def test_a_cluster_that_does_not_answer_ends_with_one_sentence(work: Job) -> None:
    meets = ("--rdzv-backend", "tensorwire-etcd", "--rdzv-endpoint", "127.0.0.1:9")
    conf = ("--rdzv-conf", "read_timeout=1", "--rdzv-id", "j", "--role", "worker:1")
    agent = work.start(*meets, *conf, *FORKED, str(PROGRAMS / "light.py"), str(work.folder))
    assert agent.wait() == 1
    assert "no member of etcd at 127.0.0.1:9 answered within 1 s" in agent.said
    assert "Traceback" not in agent.said
