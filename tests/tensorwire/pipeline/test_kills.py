"""Stages in processes that are killed or stopped: losses and weights stay those of a quiet run.

All tests of a backend share one group of processes; who was killed is started again.
"""

from __future__ import annotations

import itertools
import random
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import rpc
from remote_module import RemoteModule
from tensorwire.pipeline import Pipeline, PipelineOptimizer
from tests.rpc.worker_processes import ProcessGroup, join
from tests.waiting import eventually

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.usefixtures("process_server"),
    pytest.mark.xdist_group("pipeline"),
]

Record = Callable[[str, Any], None]

_STEPS = 30
_STAGES = ("a", "b", "c")


class _Group(ProcessGroup):
    """A driver and stages, each a process."""

    def __init__(self, folder: Path, backend: str) -> None:
        super().__init__(folder, backend, _join)
        self.start("driver", *_STAGES)
        self.quiet = self.workers["driver"].do(_train, 1)


@dataclass(frozen=True)
class _Trained:
    losses: list[float]
    state: dict[str, list[Any]]
    seconds: list[float]


def _join(backend: str, url: str, name: str, rank: int) -> None:
    torch.set_num_threads(1)
    join(backend, url, name, rank)


def _layers(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, outputs))


def _train(seed: int, progress: str = "") -> _Trained:
    """Trains from weights that a seed gives, and notes each step in a file."""
    for worker in _STAGES:
        rpc.get_worker_info(worker, wait_for_return=60)
    stages = _stages(seed)
    generator = torch.Generator().manual_seed(seed)
    losses, seconds = [], []
    with Pipeline(stages, "1f1b", 4, nn.MSELoss(), seed=seed, backups=1) as pipe:
        optimizer = pipe.optimizer(torch.optim.AdamW, lr=0.01)
        for step in range(_STEPS):
            began = time.monotonic()
            x, y = torch.rand(16, 8, generator=generator), torch.rand(16, 4, generator=generator)
            losses.append(pipe.train_step(x, target=y).item())
            pipe.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            seconds.append(time.monotonic() - began)
            if progress:
                Path(progress).write_text(str(step))
        state = {name: each.tolist() for name, each in pipe.state_dict().items()}
    return _Trained(losses, state, seconds)


def _train_by_name(name: str, losses: str) -> dict[str, list[Any]]:
    """Trains a pipeline that is found by its name, and adds a line with each loss to a file."""
    for worker in _STAGES:
        rpc.get_worker_info(worker, wait_for_return=60)
    stages = _stages(7)
    generator = torch.Generator().manual_seed(7)
    data = [
        (torch.rand(16, 8, generator=generator), torch.rand(16, 4, generator=generator))
        for _ in range(_STEPS // 2)
    ]
    loss, options = nn.MSELoss(), {"seed": 7, "backups": 1, "name": name, "keep_for": 60}
    with Pipeline(stages, "1f1b", 4, loss, **options) as pipe, open(losses, "a") as file:
        optimizer = pipe.optimizer(torch.optim.AdamW, lr=0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9)
        for _ in range(2):
            for batch in pipe.batches(data, state={"scheduler": scheduler}):
                step, value = pipe.steps, pipe.train_step(batch.x, target=batch.y).item()
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
                print(step, value, file=file, flush=True)
        return {name: each.tolist() for name, each in pipe.state_dict().items()}


def _stages(seed: int) -> list[RemoteModule]:
    sizes = [(8, 16), (16, 16), (16, 4)]
    return [
        RemoteModule(worker, _layers, each, seed=seed)
        for worker, each in zip(_STAGES, sizes, strict=True)
    ]


def _steps(pipe: Pipeline, optimizer: PipelineOptimizer) -> Iterator[float]:
    """The losses of steps without end."""
    generator = torch.Generator().manual_seed(0)
    while True:
        x, y = torch.rand(16, 8, generator=generator), torch.rand(16, 4, generator=generator)
        yield pipe.train_step(x, target=y).item()
        optimizer.step()
        optimizer.zero_grad()


def _train_until_it_is_back(progress: str) -> tuple[list[float], list[float], list[list[str]]]:
    """Trains until a lost worker has its stage again; returns losses, and what they should be."""
    for worker in _STAGES:
        rpc.get_worker_info(worker, wait_for_return=60)
    pipe = Pipeline(_stages(2), "1f1b", 4, nn.MSELoss(), seed=2, backups=1)
    losses, places = [], [pipe.workers]
    for loss in _steps(pipe, pipe.optimizer(torch.optim.AdamW)):
        losses.append(loss)
        places += [] if pipe.workers == places[-1] else [pipe.workers]
        Path(progress).write_text(str(len(losses)))
        if len(places) > 2:
            break
    pipe.close()
    quiet = Pipeline(_stages(2), "1f1b", 4, nn.MSELoss(), seed=2)
    steps = _steps(quiet, quiet.optimizer(torch.optim.AdamW))
    return losses, list(itertools.islice(steps, len(losses))), places


@pytest.fixture(scope="module", params=["TENSORWIRE", "TENSORPIPE"])
def stages(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    nothing_is_left_by_module: None,
) -> Iterator[_Group]:
    made = _Group(tmp_path_factory.mktemp("group"), request.param)
    yield made
    made.end()


@pytest.mark.kills(20)
@pytest.mark.parametrize("role", _STAGES)
def test_a_killed_stage_disturbs_no_bit(
    stages: _Group, tmp_path: Path, role: str, kill_seed: int, record_property: Record
) -> None:
    dice = random.Random(f"{role}{kill_seed}")
    progress = tmp_path / "progress"
    driver = stages.workers["driver"]
    driver.begin(_train, 1, str(progress))
    wanted = dice.randrange(_STEPS // 2)
    assert eventually(lambda: progress.exists() and int(progress.read_text() or 0) >= wanted, 60)
    time.sleep(dice.random() * 0.02)  # at any moment of a step
    stages.kill(role)
    found = driver.result()
    stages.start(role)
    record_property("longest step, s", max(found.seconds))
    assert found.losses == stages.quiet.losses
    assert found.state == stages.quiet.state


@pytest.mark.kills(20)
def test_a_killed_driver_comes_back_to_its_pipeline_by_name_and_disturbs_no_bit(
    stages: _Group, tmp_path: Path, kill_seed: int
) -> None:
    quiet, killed = tmp_path / "quiet", tmp_path / "killed"
    wanted = stages.workers["driver"].do(_train_by_name, "quiet", str(quiet))
    stages.workers["driver"].begin(_train_by_name, "killed", str(killed))
    dice = random.Random(kill_seed)
    lines = dice.randrange(1, _STEPS - 5)
    assert eventually(lambda: killed.exists() and killed.read_text().count("\n") >= lines, 60)
    time.sleep(dice.random() * 0.02)  # at any moment of a step
    stages.kill("driver")
    stages.start("driver")
    assert stages.workers["driver"].do(_train_by_name, "killed", str(killed)) == wanted
    losses = [dict(map(str.split, each.read_text().splitlines())) for each in (quiet, killed)]
    assert losses[0] == losses[1]
    assert killed.read_text().count("\n") <= _STEPS + 1  # one step is done again at most


def test_a_stage_goes_home_when_its_worker_is_back(stages: _Group, tmp_path: Path) -> None:
    progress = tmp_path / "progress"
    driver = stages.workers["driver"]
    driver.begin(_train_until_it_is_back, str(progress))
    assert eventually(lambda: progress.exists() and int(progress.read_text() or 0) >= 3, 60)
    stages.kill("b")
    stages.start("b")
    losses, wanted, places = driver.result()
    assert losses == wanted
    assert places == [["a", "b", "c"], ["a", "c"], ["a", "b", "c"]]


def test_a_stopped_stage_disturbs_no_bit_also_when_it_wakes(stages: _Group, tmp_path: Path) -> None:
    progress = tmp_path / "progress"
    driver = stages.workers["driver"]
    driver.begin(_train, 1, str(progress))
    assert eventually(lambda: progress.exists() and int(progress.read_text() or 0) >= 3, 60)
    stages.workers["b"].send_signal(signal.SIGSTOP)
    at = int(progress.read_text())
    assert eventually(lambda: int(progress.read_text() or 0) > at + 3, 60)
    stages.workers["b"].send_signal(signal.SIGCONT)
    found = driver.result()
    stages.kill("b")
    stages.start("b")
    assert found.losses == stages.quiet.losses
    assert found.state == stages.quiet.state
