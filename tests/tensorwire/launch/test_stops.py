"""Processes of a job with parameter servers that are stopped, or cut off, for a while, and go on.

Trainers' steps are numbered, and gradients the same in every run: rows are compared bit for bit.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch

from rpc.testing import local_group
from tests.machines import Machine, machines, require_machines
from tests.tensorwire.launch.jobs import FORKED, PROGRAMS, Agent, Job, job
from tests.tensorwire.launch.programs import steady
from tests.tensorwire.parameter_server.clusters import run
from tests.waiting import until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("process_server"),
    pytest.mark.xdist_group("launch"),
    pytest.mark.timeout(600),
]

_SECONDS = 200.0
_STEP = 10
"""The step at which a process is stopped, or a machine cut off."""

_PATIENCE = 5.0
"""Seconds for which servers may be out of reach, where that is not what it is by default."""

_STOPS = (4.0, 3.3, 5.0, 30.0, 1.0, 8.0, 3.0, 12.0)
"""Seconds. The first are the worst: who wakes then was taken out just before."""
_CUTS = (3.0, 4.0, 3.3, 5.0, 15.0, 2.0, 10.0, 1.0, 8.0, 2.5, 12.0)
"""Seconds. After the first both sides may declare lost whom they do not reach."""


@pytest.fixture
def work(tmp_path: Path) -> Iterator[Job]:
    with job(tmp_path) as made:
        yield made


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> torch.Tensor:
    """The rows of the same training in this process."""
    folder = tmp_path_factory.mktemp("undisturbed")
    (folder / "go").touch()
    with local_group(*steady.SERVERS, *steady.TRAINERS) as agents:
        functions = [lambda name=name: steady.train(folder, name) for name in steady.TRAINERS]
        return run(agents[len(steady.SERVERS) :], functions)[0]


def _processes(work: Job) -> dict[str, Any]:
    path = work.folder / "pids.json"
    return dict(json.loads(path.read_text())) if path.exists() else {}


def _steps(work: Job) -> int:
    path = work.folder / "trainer:0.step"
    return int(path.read_text()) if path.exists() else -1


def _find(work: Job, victim: str) -> int:
    if victim == "agent":
        return int(work.agents[0].process.pid or 0)
    found = _processes(work)[victim]
    return found if isinstance(found, int) else _listener(urlsplit(found).port or 0)


def _beside(worker: int) -> list[int]:
    """The process that gives signs of life for a worker's, if there is one."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError):
            words = (folder / "cmdline").read_bytes().split(b"\0")
            if words[-5] == b"%d" % worker and words[3].endswith(b"liveness_process.py"):
                found.append(int(folder.name))
    return found


def _listener(port: int) -> int:
    """The process that listens at a port of this machine."""
    tables = [Path(f"/proc/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
    rows = [line.split() for table in tables for line in table]
    inodes = {
        row[9] for row in rows if row[3] == "0A" and int(row[1].rpartition(":")[2], 16) == port
    }
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            if os.readlink(link).removeprefix("socket:[").rstrip("]") in inodes:
                return int(link.parts[2])
        except OSError:
            continue
    raise AssertionError(f"nobody listens at {port}")


def _all_train(work: Job) -> None:
    until(lambda: _steps(work) >= _STEP and bool(_processes(work)), _SECONDS)


def _alone(work: Job, *arguments: str, restarts: int = 2) -> Agent:
    """Starts a job of one agent, and waits until it trains."""
    agent = work.start(
        *("--standalone", "--role", "ps:3,service=tensorwire.parameter_server,max_restarts=3"),
        *("--role", f"trainer:2,max_restarts={restarts}", *FORKED),
        *(str(PROGRAMS / "steady.py"), str(work.folder), *arguments),
        RPC_BACKEND="TENSORWIRE",
    )
    _all_train(work)
    return agent


@contextlib.contextmanager
def _stopped(processes: Sequence[int]) -> Iterator[None]:
    """Stops some processes; at the end they go on."""
    for process in processes:
        os.kill(process, signal.SIGSTOP)
    try:
        yield
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):  # the launcher ended it, as it was lost
                os.kill(process, signal.SIGCONT)


def _stop_for_a_while(processes: Sequence[int], seed: int) -> None:
    with _stopped(processes):
        time.sleep(_STOPS[seed % len(_STOPS)])  # no synchronisation: so long is the stop


def _go_on(work: Job) -> None:
    time.sleep(1)  # no synchronisation: whoever woke has time to do what it should not
    (work.folder / "go").touch()


def _rows(work: Job) -> torch.Tensor:
    """Those that both trainers have read at the end."""
    one, other = (torch.load(work.folder / f"{name}.rows") for name in steady.TRAINERS)
    assert torch.equal(one, other)
    found: torch.Tensor = one
    return found


@pytest.mark.kills(20, usual=1)
def test_a_server_that_stops_for_a_while_disturbs_no_bit(
    work: Job, undisturbed: torch.Tensor, kill_seed: int
) -> None:
    victim = steady.SERVERS[(kill_seed + 1) % 3]
    agent = _alone(work)
    _stop_for_a_while([_find(work, victim)], kill_seed)
    _go_on(work)
    assert agent.wait(_SECONDS) == 0, agent.said
    assert torch.equal(_rows(work), undisturbed), work.said


@pytest.mark.kills(20, usual=0)
@pytest.mark.parametrize("victim", ["trainer:1", "agent", "store"])
def test_another_process_that_stops_for_a_while_disturbs_no_bit(
    work: Job, undisturbed: torch.Tensor, victim: str, kill_seed: int
) -> None:
    """A trainer that was lost begins its steps anew, and so sees other rows than before."""
    agent = _alone(work)
    _stop_for_a_while([_find(work, victim)], kill_seed)
    _go_on(work)
    assert agent.wait(_SECONDS) == 0, agent.said
    rows = _rows(work)
    assert victim == "trainer:1" or torch.equal(rows, undisturbed), work.said


@pytest.mark.kills(20, usual=1)
def test_two_servers_of_one_chain_that_stop_together_are_an_error_for_all_in_time(
    work: Job, kill_seed: int, record_property: Callable[[str, Any], None]
) -> None:
    """Any two of three are a chain; as nobody knows whether they are dead, they stay in it."""
    agent = _alone(work, str(_PATIENCE), restarts=0)
    spared = steady.SERVERS[kill_seed % 3]
    victims = [_find(work, name) for name in steady.SERVERS if name != spared]
    begun = time.time()
    errors = [work.folder / f"{name}.error" for name in steady.TRAINERS]
    with _stopped(victims):
        until(lambda: all(each.exists() for each in errors), _SECONDS)
    told = [json.loads(each.read_text()) for each in errors]
    record_property("seconds until the error", max(each["at"] for each in told) - begun)
    for each in told:
        assert each["kind"] == "UnreachableError", told
    assert agent.wait(_SECONDS) == 1, agent.said


# --- Two machines


@pytest.fixture
def hosts() -> Iterator[Sequence[Machine]]:
    require_machines()
    with machines("one", "two") as made:
        yield made


def _on_two(work: Job, hosts: Sequence[Machine]) -> list[Agent]:
    """Starts a job with one of three servers on the second machine; waits until it trains."""
    key = work.folder / "key"
    key.write_text("a secret of the group")
    key.chmod(0o600)
    meets = ("--rdzv-endpoint", "one:29400", "--rdzv-id", "j", "--nnodes", "1:2")
    program = (*FORKED, str(PROGRAMS / "steady.py"), str(work.folder))
    agents: list[Agent] = []
    for machine, servers, trainers in zip(hosts, (2, 1), (2, 1), strict=True):
        roles = (
            *("--role", f"ps:{servers},service=tensorwire.parameter_server,max_restarts=3"),
            *("--role", f"trainer:{trainers},max_restarts=3"),
        )
        key_file = ("--group-key-file", str(key))
        agents.append(
            work.start(
                *(*meets, *key_file, *roles, *program), machine=machine, RPC_BACKEND="TENSORWIRE"
            )
        )
        last = work.folder / f"trainer:{len(agents)}.here"  # two of the first, one of the second
        until(last.exists, _SECONDS)
    _all_train(work)
    return agents


@pytest.mark.kills(20, usual=0)
def test_a_machine_that_is_cut_off_for_a_while_disturbs_no_bit(
    hosts: Sequence[Machine], work: Job, undisturbed: torch.Tensor, kill_seed: int
) -> None:
    agents = _on_two(work, hosts)
    hosts[1].cut()
    time.sleep(_CUTS[kill_seed % len(_CUTS)])  # no synchronisation: so long is the cut
    hosts[1].mend()
    _go_on(work)
    assert [agent.wait(_SECONDS) for agent in agents] == [0, 0], work.said
    assert torch.equal(_rows(work), undisturbed), work.said


@pytest.mark.kills(20, usual=0)
def test_signs_of_life_that_stop_for_a_while_disturb_no_bit(
    hosts: Sequence[Machine], work: Job, undisturbed: torch.Tensor, kill_seed: int
) -> None:
    agents = _on_two(work, hosts)
    pid = _find(work, "ps:2")
    until(lambda: bool(_beside(pid)), _SECONDS)
    _stop_for_a_while(_beside(pid), kill_seed)
    _go_on(work)
    assert [agent.wait(_SECONDS) for agent in agents] == [0, 0], work.said
    assert torch.equal(_rows(work), undisturbed), work.said
