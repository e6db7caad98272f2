"""Trainers in processes that rpcrun has started, beside servers of their own."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from tests.processes import ready_made
from tests.tensorwire.integrations import script

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
    pytest.mark.timeout(300),
    pytest.mark.slow,
    pytest.mark.xdist_group("rpcrun"),
]

_SECONDS = 250.0
_SERVERS = "ps:2,service=tensorwire.parameter_server"
_JOBS = {  # folder: backend, role of the trainers, argument of the script
    "wire": ("TENSORWIRE", "trainer:1,max_restarts=1", "alone"),
    "pipe": ("TENSORPIPE", "trainer:1,max_restarts=1", "alone"),
    "ranks": ("TENSORWIRE", "trainer:2,pg", "ddp"),
}


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory, _process_server: None) -> Iterator[Path]:
    """Folders of jobs that have come to a good end. One process has imported all for them."""
    folder = tmp_path_factory.mktemp("jobs")
    log = folder / "log"
    log.touch()
    agent = ready_made().Process(target=_launch, args=(str(folder), str(log)))
    agent.start()
    try:
        agent.join(_SECONDS)
        assert agent.exitcode == 0, log.read_text()
        yield folder
    finally:
        agent.kill()
        agent.join()
        agent.close()


@pytest.fixture(scope="module")
def _process_server(process_server: None) -> None:
    pass


def _launch(folder: str, log: str) -> None:
    file = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    importlib.import_module("tensorwire.integrations.transformers")  # which workers then have
    fork = multiprocessing.get_context("fork")
    agents = [fork.Process(target=_run, args=(Path(folder) / name, *_JOBS[name])) for name in _JOBS]
    for agent in agents:
        agent.start()
    for agent in agents:
        agent.join()
    sys.exit(any(agent.exitcode for agent in agents))


def _run(folder: Path, backend: str, trainers: str, argument: str) -> None:
    folder.mkdir()
    os.environ["RPC_BACKEND"] = backend
    flags = ["--standalone", "--start-method", "fork", "--role", _SERVERS, "--role", trainers]
    line = [*flags, "--run-path", script.__file__, argument, str(folder)]
    importlib.import_module("tensorwire.launch.main").main(line)


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one["losses"] == other["losses"] and all(
        map(torch.equal, one["weights"], other["weights"])
    )


@pytest.mark.parametrize("job", ["wire", "pipe"])
def test_a_killed_trainer_resumes_beside_its_servers_with_the_bits_of_a_local_run(
    job: str, jobs: Path, tmp_path: Path
) -> None:
    whole = script.train(tmp_path, [])
    found = torch.load(jobs / job / "found")
    assert same(whole, found)
    assert found["lives"] == ["0", "0"]


def test_ranks_under_ddp_have_the_bits_of_a_run_without_servers(jobs: Path) -> None:
    ranks = [torch.load(jobs / "ranks" / f"found{rank}") for rank in range(2)]
    for rank in ranks:
        assert rank["local"]["losses"]
        assert same(rank["local"], rank["servers"])
    assert [rank["servers"]["saves"] for rank in ranks] == [True, False]
    assert [rank["steps"] for rank in ranks] == [5, None]
