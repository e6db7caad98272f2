"""A job for rpcrun: trains a pipeline, loses a stage in the middle of a step, and goes on.

Started with a folder, in which it keeps checkpoints and leaves ``losses.json``: what it lost in
the steps after the loss, and what an undisturbed run from the same checkpoint loses in them.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import torch
from torch import nn

import rpc
from remote_module import RemoteModule
from tensorwire import checkpoint
from tensorwire.pipeline import Pipeline, PipelineOptimizer, StageFailedError
from tests.tensorwire.pipeline.reference import gradients

_STEPS, _SAVED, _KILLED, _MICROBATCHES, _MICROBATCH = 6, 3, 4, 4, 2


class _Stage(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(inputs, outputs), nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.dropout(torch.tanh(self.linear(x)))
        return output


class _Dies(_Stage):
    """In its first life, kills its worker in the middle of one step."""

    def __init__(self, inputs: int, outputs: int, mark: str) -> None:
        super().__init__(inputs, outputs)
        self.mark, self.calls = Path(mark), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.calls == _KILLED * _MICROBATCHES + _MICROBATCH and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        self.calls += 1
        return super().forward(x)


def _batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.rand(8, 3, generator=generator), torch.rand(8, 2, generator=generator)


def _step(pipe: Pipeline, optimizer: PipelineOptimizer, step: int) -> float:
    x, y = _batch(step)
    loss = pipe.train_step(x, target=y)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def _drive(folder: Path) -> None:
    stages = [
        RemoteModule("driver:0", _Stage, (3, 5)),
        RemoteModule("stage:0", _Dies, (5, 5, str(folder / "died"))),
        RemoteModule("driver:0", _Stage, (5, 2)),
    ]
    pipe = Pipeline(stages, "1f1b", _MICROBATCHES, nn.MSELoss(), seed=5)
    optimizer = pipe.optimizer(torch.optim.AdamW, lr=0.05)
    state = {"model": pipe, "optimizer": optimizer}
    error = _train(pipe, optimizer, state, folder)
    assert all(each is None for stage in (0, 2) for each in gradients(pipe.stages[stage]))

    pipe.recover()
    checkpoint.load(folder / "checkpoints" / str(_SAVED), state)
    after = [_step(pipe, optimizer, step) for step in range(_SAVED, _STEPS)]

    fresh = [RemoteModule("driver:0", _Stage, sizes) for sizes in [(3, 5), (5, 5), (5, 2)]]
    undisturbed = Pipeline(fresh, "1f1b", _MICROBATCHES, nn.MSELoss(), seed=5)
    state = {"model": undisturbed, "optimizer": undisturbed.optimizer(torch.optim.AdamW, lr=1.0)}
    checkpoint.load(folder / "checkpoints" / str(_SAVED), state)
    other = state["optimizer"]
    assert isinstance(other, PipelineOptimizer)
    expected = [_step(undisturbed, other, step) for step in range(_SAVED, _STEPS)]
    told = {"after": after, "expected": expected, "error": error}
    (folder / "losses.json").write_text(json.dumps(told))


def _train(
    pipe: Pipeline, optimizer: PipelineOptimizer, state: dict[str, object], folder: Path
) -> list[object]:
    """Trains until a stage is lost; returns which, where, and at which micro-batch."""
    for step in range(_STEPS):
        if step == _SAVED:
            checkpoint.save(folder / "checkpoints" / str(step), state)
        try:
            _step(pipe, optimizer, step)
        except StageFailedError as error:
            return [step, error.stage, error.worker, error.microbatch]
    raise AssertionError("no stage was lost")


if __name__ == "__main__":
    torch.set_num_threads(1)
    rpc.init_rpc(backend=rpc.BackendType.TENSORWIRE)
    if os.environ["ROLE_NAME"] == "driver":
        _drive(Path(sys.argv[1]))
        rpc.shutdown()
    else:
        rpc.serve()
