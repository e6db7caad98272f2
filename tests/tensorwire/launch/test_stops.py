"""Processes of a job with parameter servers that are stopped for a while, and go on."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch

from rpc.testing import local_group
from tests.tensorwire.launch.jobs import FORKED, PROGRAMS, Job, job
from tests.tensorwire.launch.programs import steady
from tests.tensorwire.parameter_server.clusters import run
from tests.waiting import until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("process_server"),
    pytest.mark.xdist_group("launch"),
    pytest.mark.timeout(300),
]

_SECONDS = 120.0
_STEP = 10
"""The step at which a process is stopped."""

_WORST = [("ps:1", 4.0), ("ps:0", 3.3), ("ps:0", 5.0)]
"""A server, and that which coordinates, wake shortly after the others have taken them out."""
_VICTIMS = ("ps:1", "ps:0", "trainer:1", "agent", "store")
_OTHERS = product(_VICTIMS, (1.0, 3.0, 3.3, 4.0, 5.0, 8.0, 12.0, 30.0))
_STOPS = [*_WORST, *(each for each in _OTHERS if each not in _WORST)]


@pytest.fixture
def work(tmp_path: Path) -> Iterator[Job]:
    with job(tmp_path) as made:
        yield made


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> torch.Tensor:
    """The rows of the same training in this process."""
    folder = tmp_path_factory.mktemp("undisturbed")
    (folder / "go").touch()
    trainers = ["trainer:0", "trainer:1"]
    with local_group(*steady.SERVERS, *trainers) as agents:
        functions = [lambda name=name: steady.train(folder, name) for name in trainers]
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


@pytest.mark.kills(len(_STOPS))
def test_a_process_that_stops_for_a_while_disturbs_no_bit(
    work: Job, undisturbed: torch.Tensor, kill_seed: int
) -> None:
    victim, seconds = _STOPS[kill_seed]
    agent = work.start(
        *("--standalone", "--role", "ps:3,service=tensorwire.parameter_server,max_restarts=3"),
        *("--role", "trainer:2,max_restarts=2", *FORKED),
        *(str(PROGRAMS / "steady.py"), str(work.folder)),
        RPC_BACKEND="TENSORWIRE",
    )
    until(lambda: _steps(work) >= _STEP and bool(_processes(work)), _SECONDS)
    process = _find(work, victim)
    os.kill(process, signal.SIGSTOP)
    time.sleep(seconds)  # no synchronisation: so long is the stop
    with contextlib.suppress(ProcessLookupError):  # the launcher ended it, as it was lost
        os.kill(process, signal.SIGCONT)
    time.sleep(1)  # no synchronisation: whoever woke has time to do what it should not
    (work.folder / "go").touch()
    assert agent.wait(_SECONDS) == 0, agent.said
    rows = [torch.load(work.folder / f"trainer:{n}.rows") for n in range(2)]
    assert torch.equal(rows[0], rows[1])
    if not victim.startswith("trainer"):
        assert torch.equal(rows[0], undisturbed)
