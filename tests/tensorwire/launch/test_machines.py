"""Jobs on several machines, each a network namespace: they meet, grow, lose machines and cables."""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tensorwire import parameter_server as ps
from tests.machines import Machine, machines, require_machines
from tests.tensorwire.launch.jobs import (
    FORKED,
    LIGHT,
    PROGRAMS,
    SECONDS,
    Agent,
    Job,
    is_running,
    job,
    progress,
    works_on,
)
from tests.tensorwire.parameter_server.samples import counted
from tests.waiting import until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("process_server"),
    pytest.mark.xdist_group("launch"),
    pytest.mark.timeout(300),
]
PORT = 29400
BSP, ASYNC, CALLS = "bsp", "async", "calls"
TROUBLE = ("Traceback", "Exception raised", "could not answer")
"""Words that no log may have if all went as expected."""


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
    """Names like Debian's; the second agent comes first, and says for whom it waits."""
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


# --- Jobs that grow, and lose machines and cables


def start(work: Job, machine: Machine, kind: str, restarts: int = 3, nodes: str = "1:2") -> Agent:
    """An agent with one server and one trainer: of tables under BSP or async, or of calls."""
    command = (str(PROGRAMS / "elastic.py"), str(work.folder), kind, "1")
    if kind == CALLS:
        command = (str(PROGRAMS / "member.py"), str(work.folder), "ps:0")
    role = f"max_restarts={restarts}"
    roles = ("--role", f"ps:1,service,{role}", "--role", f"trainer:1,{role}")
    return work.start(*flags(work, "one", nodes), *FORKED, *roles, *command, machine=machine)


def troubles(
    one: Machine, two: Machine
) -> Mapping[str, tuple[Callable[[], None], Callable[[], None]]]:
    """The ways in which the first machine loses the second: how they begin, and are mended."""
    return {
        "killed": (two.power_off, two.mend),
        "both": (two.cut, two.mend),
        "to the first": (lambda: two.loses(one), lambda: two.reaches(one)),
        "from the first": (lambda: one.loses(two), lambda: one.reaches(two)),
    }


def is_calm(agent: Agent) -> bool:
    return not any(trouble in agent.said for trouble in TROUBLE)


def says(agent: Agent, text: str) -> None:
    until(lambda: text in agent.said, SECONDS, 0.05)


def end(work: Job, *agents: Agent) -> None:
    work.end()
    assert [agent.wait() for agent in agents] == [0] * len(agents)


STRUCK_OUT = "agent 1 gives no sign of life; it is struck out"
RETURNED = (  # which of its workers still run when it hears of that is not the same each time
    "rpcrun: no sign of life of this agent reached the others, who have struck it out: ",
    "rpcrun: this agent is back in the job\n",
    "rpcrun: ps:1, trainer:1 start again, as lives 2, 2\n",
)


@pytest.mark.kills(40, usual=1)
def test_a_machine_joins_dies_and_is_replaced_while_the_others_go_on(
    work: Job, hosts: Sequence[Machine], kill_seed: int
) -> None:
    kind = [BSP, CALLS][kill_seed % 2]
    one, two = hosts
    first = start(work, one, kind)
    alone = works_on(work, "trainer:0")
    start(work, two, kind)
    joined = works_on(work, "trainer:1")
    time.sleep(random.Random(kill_seed).uniform(0, 1))  # the moment is to be any
    two.power_off()
    says(first, STRUCK_OUT)
    works_on(work, "trainer:0")
    two.mend()
    third = start(work, two, kind)
    again = works_on(work, "trainer:1", joined)
    assert works_on(work, "trainer:0")["pid"] == alone["pid"]
    assert again["pid"] != joined["pid"]
    if kind != CALLS:
        require_snapshots(work)
    end(work, first, third)
    assert is_calm(first), first.said


@pytest.mark.kills(20, usual=1)
def test_a_machine_dies_as_two_come_at_once_and_the_cluster_is_resized_between_snapshots(
    work: Job, kill_seed: int
) -> None:
    require_machines()
    draw, kind = random.Random(kill_seed), [ASYNC, BSP][kill_seed % 2]
    with machines("one", "two", "three") as (one, *others):
        first = start(work, one, kind, nodes="1:3")
        alone = works_on(work, "trainer:0")
        agents = {machine: start(work, machine, kind, nodes="1:3") for machine in others}
        dies = draw.choice(others)
        time.sleep(draw.uniform(0, 5))  # the moment is to be any: as it starts, joins, is resized
        dies.power_off()
        works_on(work, "trainer:0")
        dies.mend()
        agents[dies] = start(work, dies, kind, nodes="1:3")
        until(lambda: len(living(work, 3)) == 3, 2 * SECONDS, 0.1)
        assert works_on(work, "trainer:0")["pid"] == alone["pid"]
        require_snapshots(work, torn=int(kind == ASYNC))
        end(work, first, *agents.values())


def living(work: Job, trainers: int) -> set[int]:
    """The processes of trainers that have noted a step and run."""
    noted = [progress(work, f"trainer:{number}").get("pid") for number in range(trainers)]
    return {each for each in noted if each is not None and is_running(each)}


def require_snapshots(work: Job, torn: int = 0) -> None:
    """One more is written, and each is of one point in everybody's pushes: all rows are alike.

    But for so many pushes of trainers that were killed, which under async one server may have had
    and another not.
    """
    path = work.folder / "saved"

    def names() -> list[str]:
        return path.read_text().splitlines() if path.exists() else []

    before = len(names())
    until(lambda: len(names()) > before, SECONDS, 0.05)
    for name in names()[-3:]:
        ids, rows = ps.read(name, "counts")
        assert len(ids) == 100
        assert rows.max() - rows.min() <= torn


@pytest.mark.kills(20, usual=1)
@pytest.mark.parametrize(
    ("cut", "kind"), [("both", ASYNC), ("to the first", BSP), ("from the first", CALLS)]
)
def test_a_machine_whose_cable_is_mended_is_back_with_its_workers(
    work: Job,
    hosts: Sequence[Machine],
    cut: str,
    kind: str,
    kill_seed: int,
    full_length: bool,
    record_property: Callable[[str, Any], None],
) -> None:
    one, two = hosts
    first = start(work, one, kind, restarts=0)
    alone = works_on(work, "trainer:0")
    second = start(work, two, kind, restarts=0)
    before = works_on(work, "trainer:1")
    begin, mend = troubles(one, two)[cut]
    begin()
    says(first, STRUCK_OUT)
    time.sleep(random.Random(kill_seed).uniform(0, 8 if full_length else 1))  # any moment
    mend()
    mended = time.monotonic()
    works_on(work, "trainer:1", before)
    record_property("seconds", time.monotonic() - mended)
    assert works_on(work, "trainer:0")["pid"] == alone["pid"]
    assert [second.said.count(line) for line in RETURNED] == [1, 1, 1]
    end(work, first, second)
    assert is_calm(first), first.said


@pytest.mark.kills(20, usual=1)
def test_a_pipeline_goes_on_without_a_machine_and_its_stage_goes_home_when_it_is_back(
    work: Job, hosts: Sequence[Machine], kill_seed: int, full_length: bool
) -> None:
    """Its weights at the end are those that one process trains with plain PyTorch."""
    one, two = hosts
    draw = random.Random(kill_seed)
    ways = troubles(one, two)
    chosen = draw.sample([*ways], 4) if full_length else ["to the first"]

    def begin(machine: Machine) -> Agent:
        roles = ("--role", "driver:1/job", "--role", "stage:1,service,max_restarts=3")
        program = (str(PROGRAMS / "stages.py"), str(work.folder))
        return work.start(*flags(work, "one", "1:2"), *FORKED, *roles, *program, machine=machine)

    def is_spread_over(*workers: str) -> bool:
        return bool(progress(work, "driver:0").get("workers") == [*workers])

    first = begin(one)
    until(lambda: is_spread_over(), SECONDS, 0.05)
    second = begin(two)
    until(lambda: is_spread_over("stage:0", "stage:1"), SECONDS, 0.05)
    driver = works_on(work, "driver:0")
    for trouble in chosen:
        time.sleep(draw.uniform(0, 1))  # the moment is to be any
        begin_trouble, mend = ways[trouble]
        begin_trouble()
        until(lambda: is_spread_over("stage:0"), SECONDS, 0.05)
        works_on(work, "driver:0")
        mend()
        if trouble == "killed":
            second = begin(two)
        until(lambda: is_spread_over("stage:0", "stage:1"), SECONDS, 0.05)
    assert works_on(work, "driver:0")["pid"] == driver["pid"]
    end(work, first, second)
    assert float((work.folder / "difference").read_text()) < 1e-4
    assert is_calm(first), first.said


WAYS = [*itertools.product(("machine", "ps", "trainer"), (ASYNC, BSP), ("files", "batches"))]
"""Victims, with the consistency of the cluster, and with what of a data set is given out."""


@pytest.mark.kills(50, usual=0)
def test_every_sample_counts_once_though_a_server_a_trainer_or_their_machine_dies(
    work: Job, hosts: Sequence[Machine], kill_seed: int
) -> None:
    """All processes of a machine die at once; in half of the cases it comes back."""
    one, two = hosts
    draw, (victim, *how) = random.Random(kill_seed), WAYS[kill_seed % len(WAYS)]

    def begin(machine: Machine) -> Agent:
        roles = ("--role", "ps:1,service,max_restarts=3", "--role", "trainer:1,max_restarts=3")
        program = (str(PROGRAMS / "samples.py"), str(work.folder), *how)
        return work.start(*flags(work, "one", "1:2"), *FORKED, *roles, *program, machine=machine)

    agents = [begin(one), begin(two)]
    for number in range(2):
        works_on(work, f"trainer:{number}")
    time.sleep(draw.uniform(0, 1))  # the moment is to be any
    if victim == "machine":
        two.power_off()
        says(agents[0], "gives no sign of life; it is struck out")  # either may have come first
        two.mend()
        agents[1:] = [begin(two)] if draw.random() < 0.5 else []
    else:
        os.kill(progress(work, f"{victim}:{draw.randrange(2)}")["pid"], signal.SIGKILL)
    assert [agent.wait() for agent in agents] == [0] * len(agents)
    counts = [json.loads(path.read_text()) for path in work.folder.glob("*.counts")]
    assert counts
    assert all(set(each) == {float(counted.EPOCHS)} for each in counts)


def test_a_cut_that_is_shorter_than_the_patience_is_a_pause(
    work: Job, hosts: Sequence[Machine]
) -> None:
    agents, before = [], []
    for number, machine in enumerate(hosts):
        agents.append(start(work, machine, CALLS, restarts=0))
        before.append(works_on(work, f"trainer:{number}"))
    hosts[1].cut()
    time.sleep(1)  # no synchronisation: so long is the cut
    hosts[1].mend()
    after = [works_on(work, f"trainer:{number}") for number in range(2)]
    assert [each["pid"] for each in after] == [each["pid"] for each in before]
    end(work, *agents)


def test_without_the_machine_that_hosts_the_store_a_job_ends_with_one_sentence(
    work: Job, hosts: Sequence[Machine]
) -> None:
    one, two = hosts
    patience = ("--rdzv-conf", "read_timeout=3")
    program = (*patience, "--role", "trainer:1", LIGHT, str(work.folder))
    work.start(*flags(work, "one", "2"), *program, machine=one)
    second = work.start(*flags(work, "one", "2"), *program, machine=two)
    for number in range(2):
        work.life(f"trainer:{number}")
    one.power_off()
    assert second.wait() == 1
    assert "the store of the rendezvous at one:29400 was lost, and with it the job" in second.said
    assert is_calm(second), second.said


def test_a_process_group_is_formed_anew_without_a_machine_that_died(
    work: Job, hosts: Sequence[Machine]
) -> None:
    ddp = ("--role", "ddp:1,pg,max_restarts=3", str(PROGRAMS / "ddp.py"), str(work.folder))
    first, _ = (
        work.start(*flags(work, "one", "1:2"), *FORKED, *ddp, machine=machine) for machine in hosts
    )

    def averages(size: int) -> bool:
        """Some life of some member has averaged, over a group of that size, each rank's number."""
        result = [str(size), str((size - 1) / 2)]
        return any(path.read_text().split()[1:] == result for path in work.folder.glob("ddp:*.*"))

    until(lambda: averages(2), SECONDS, 0.05)
    for path in work.folder.glob("ddp:*.*"):
        path.unlink()
    hosts[1].power_off()
    until(lambda: averages(1), SECONDS, 0.05)
    end(work, first)


@pytest.mark.kills(20, usual=1)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_trainer_of_transformers_goes_on_from_its_checkpoint_as_machines_come_and_go(
    work: Job, hosts: Sequence[Machine], kill_seed: int, full_length: bool
) -> None:
    """One rank of DistributedDataParallel on each machine, and the server beside the first."""
    pytest.importorskip("transformers")
    if not full_length:
        pytest.skip("each life imports transformers, half a minute in all: make kills runs it")
    one, two = hosts
    server = ("--role", "ps:1/job,service=tensorwire.parameter_server")
    ranks = ("--role", "trainer:1,pg,max_restarts=3")
    program = (str(PROGRAMS / "language_model.py"), str(work.folder))

    def begin(machine: Machine) -> Agent:
        roles = (*FORKED, *server, *ranks)
        return work.start(*flags(work, "one", "1:2"), *roles, *program, machine=machine)

    def trains(ranks: int) -> bool:
        """So many ranks train, and a checkpoint was written."""
        now = progress(work, "trainer:0")
        return bool(now.get("ranks") == ranks and now["steps"] > 5)

    first = begin(one)
    until(lambda: trains(1), 4 * SECONDS, 0.05)
    second = begin(two)
    until(lambda: trains(2), 4 * SECONDS, 0.05)
    ways = troubles(one, two)
    trouble = [*ways][kill_seed % len(ways)]
    begin_trouble, mend = ways[trouble]
    time.sleep(random.Random(kill_seed).uniform(0, 1))  # the moment is to be any
    begin_trouble()
    until(lambda: trains(1), 4 * SECONDS, 0.05)
    mend()
    if trouble == "killed":
        end(work, first)
        return
    until(lambda: trains(2), 4 * SECONDS, 0.05)
    end(work, first, second)
