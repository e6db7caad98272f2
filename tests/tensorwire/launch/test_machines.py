"""Jobs on several machines, each a network namespace: they meet, grow, lose machines and cables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.machines import Machine, machines, require_machines
from tests.tensorwire.launch.jobs import LIGHT, SECONDS, Job, job
from tests.waiting import until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("process_server"),
    pytest.mark.xdist_group("launch"),
]
PORT = 29400


@pytest.fixture
def hosts() -> Iterator[Sequence[Machine]]:
    require_machines()
    with machines("one", "two") as made:
        yield made


@pytest.fixture
def work(tmp_path: Path, hosts: Sequence[Machine]) -> Iterator[Job]:
    with job(tmp_path) as made:
        key = tmp_path / "key"
        key.write_text("a secret of the group")
        key.chmod(0o600)
        yield made


def flags(work: Job, endpoint: str, nodes: str) -> tuple[str, ...]:
    return (
        *("--rdzv-endpoint", f"{endpoint}:{PORT}", "--rdzv-id", "j", "--nnodes", nodes),
        *("--monitor-interval", "0.05", "--group-key-file", str(work.folder / "key")),
    )


# --- Meeting


@pytest.mark.parametrize("endpoint", ["10.231.78.1", "one"])
def test_agents_meet_where_the_hosts_own_name_stands_for_its_loopback_interface(
    work: Job, hosts: Sequence[Machine], endpoint: str
) -> None:
    """As Debian has it; the second agent comes first, and says for whom it waits."""
    one, two = hosts
    Path(one.hosts).write_text(f"127.0.0.1 localhost\n127.0.1.1 one\n{two.address} two\n")
    command = (*flags(work, endpoint, "2"), "--role", "trainer:1", LIGHT, str(work.folder))
    second = work.start(*command, machine=two)
    waits = f"rpcrun: nobody hosts the store at {endpoint}:{PORT} yet (Connection refused); "
    until(lambda: waits in second.said, SECONDS, 0.05)
    assert f"this host's addresses are {two.address} (eth0); gives up in" in second.said
    first = work.start(*command, machine=one)
    seen = [work.life(f"trainer:{number}").environment for number in range(2)]
    assert {each["RPC_INIT_METHOD"] for each in seen} == {
        f"tcp://{host}:{PORT}?job=j" for host in (endpoint, one.address)
    }
    work.end()
    assert [first.wait(), second.wait()] == [0, 0]


def test_a_wait_for_others_is_told_and_ends_with_one_sentence(
    work: Job, hosts: Sequence[Machine]
) -> None:
    """First nobody hosts the store; then somebody does, but too few come."""
    two = hosts[1]
    ends = ("--rdzv-conf", "join_timeout=2", "--role", "trainer:1", LIGHT, str(work.folder))
    alone = [
        work.start(*flags(work, "one", "2"), *ends, machine=two),
        work.start(*flags(work, "two", "2"), *ends, machine=two),
    ]
    assert [each.wait() for each in alone] == [1, 1]
    where = f"{two.address} (eth0)"
    assert alone[0].said.splitlines()[-1] == (
        f"rpcrun: nobody hosts the store at one:{PORT} yet (Connection refused); this host's "
        f"addresses are {where}; waited 2 s"
    )
    waits = f"1 of 2 agents are there; the others are to come to two:{PORT}, on this host ({where})"
    assert waits in alone[1].said
    assert alone[1].said.splitlines()[-1] == (
        "rpcrun: 1 of the 2 agents that --nnodes asks for came within 2 s"
    )
    assert "Exception raised" not in work.said
    assert "Traceback" not in work.said


def test_an_address_that_every_machine_has_is_refused(work: Job, hosts: Sequence[Machine]) -> None:
    program = ("--role", "trainer:1", LIGHT, str(work.folder))
    agent = work.start(*flags(work, "127.0.0.1", "2"), *program, machine=hosts[0])
    assert agent.wait() == 2
    assert agent.said.startswith(
        "rpcrun: --rdzv-endpoint=127.0.0.1 is an address that every machine has (lo), so each of "
        "the 2 agents that --nnodes asks for would wait on its own machine; give an address by "
        f"which the others reach this one ({hosts[0].address} (eth0)), or say"
    )
