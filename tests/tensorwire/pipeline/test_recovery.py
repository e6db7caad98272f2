"""A stage that dies in the middle of a step comes back, and training goes on as if it had not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from remote_module import RemoteModule
from tensorwire.pipeline import Pipeline
from tests.tensorwire.launch.jobs import FORKED, job
from tests.tensorwire.pipeline.reference import given, group, place

_JOB = Path(__file__).with_name("lose_a_stage.py")


def test_a_stage_can_move_to_another_worker_between_steps() -> None:
    x, y = torch.rand(8, 3), torch.rand(8, 2)
    modules = [nn.Linear(3, 4), nn.Linear(4, 2)]
    with group("a", "b", "c"):
        pipe = Pipeline(place(modules, "ab"), "1f1b", 4, nn.MSELoss())
        optimizer = pipe.optimizer(torch.optim.SGD, lr=0.1)
        wanted = pipe.train_step(x, target=y)
        optimizer.zero_grad()
        pipe.replace(1, RemoteModule("c", given, (modules[1],)))
        assert pipe.workers == ["a", "c"]
        assert torch.equal(pipe.train_step(x, target=y), wanted)
        optimizer.step()
        assert pipe.train_step(x, target=y) < wanted


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("process_server")
def test_a_killed_stage_returns_under_rpcrun_and_losses_are_those_from_the_checkpoint(
    tmp_path: Path,
) -> None:
    roles = ["--role", "stage:1,service,max_restarts=1", "--role", "driver:1"]
    with job(tmp_path) as work:
        agent = work.start("--standalone", *roles, *FORKED, str(_JOB), str(tmp_path))
        assert agent.wait(280) == 0, agent.said
    told = json.loads((tmp_path / "losses.json").read_text())
    assert told["error"] == [4, 1, "stage:0", 2]  # the step, the stage, its worker, the micro-batch
    assert told["after"] == told["expected"]
    assert len(told["after"]) == 3


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("process_server")
def test_a_killed_driver_returns_under_rpcrun_and_finds_its_pipeline_by_name(
    tmp_path: Path,
) -> None:
    program = _JOB.with_name("lose_the_driver.py")
    roles = ["--role", "stage:2,service", "--role", "driver:1,max_restarts=1"]
    with job(tmp_path) as work:
        agent = work.start("--standalone", *roles, *FORKED, str(program), str(tmp_path))
        assert agent.wait(280) == 0, agent.said
    assert (tmp_path / "died").exists()
    lines = (tmp_path / "losses.txt").read_text().splitlines()
    quiet = (tmp_path / "quiet.txt").read_text().splitlines()
    assert list(dict.fromkeys(lines)) == quiet  # one step may have been done again, with its loss
    assert len(quiet) == 12
