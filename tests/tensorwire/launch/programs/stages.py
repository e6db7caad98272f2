"""A pipeline over two machines: a stage on each, and its driver beside the first.

    stages.py FOLDER

The driver trains until there is a file ``FOLDER/end``, and writes after each step how far it is to
``FOLDER/driver:0.progress``. At the end it trains a copy of the model by itself with the same
batches, and writes by how much the weights differ to ``FOLDER/difference``.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
from torch import nn

import rpc
from remote_module import RemoteModule
from tensorwire.pipeline import Pipeline

STAGES = ("stage:0", "stage:1")
SIZES = ((4, 8), (8, 2))


def layer(inputs: int, outputs: int) -> nn.Module:
    torch.manual_seed(inputs)
    return nn.Sequential(nn.Linear(inputs, outputs), nn.Tanh())


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.rand(8, 4, generator=generator), torch.rand(8, 2, generator=generator)


def drive(folder: Path) -> None:
    note(folder, 0, [])
    for name in STAGES:
        rpc.get_worker_info(name, wait_for_return=60)
    stages = [RemoteModule(*each) for each in zip(STAGES, [layer] * 2, SIZES, strict=True)]
    with Pipeline(stages, "1f1b", 4, nn.MSELoss(), seed=1, backups=1) as pipe:
        optimizer = pipe.optimizer(torch.optim.SGD, lr=0.01)
        while not (folder / "end").exists():
            x, y = batch(pipe.steps)
            pipe.train_step(x, target=y)
            optimizer.step()
            optimizer.zero_grad()
            note(folder, pipe.steps, pipe.workers)
            time.sleep(0.02)
        steps, weights = pipe.steps, pipe.state_dict()
    (folder / "difference").write_text(str(difference(steps, [*weights.values()])))


def note(folder: Path, steps: int, workers: list[str]) -> None:
    incarnation = rpc.extend.life_of("driver:0").incarnation
    progress = {"pid": os.getpid(), "steps": steps, "incarnation": incarnation, "workers": workers}
    draft = folder / "driver:0.draft"
    draft.write_text(json.dumps(progress))
    draft.rename(folder / "driver:0.progress")


def difference(steps: int, weights: list[torch.Tensor]) -> float:
    """The largest one to weights that one process trained with plain PyTorch."""
    model = nn.Sequential(*(layer(*each) for each in SIZES))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(steps):
        x, y = batch(step)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    pairs = zip(weights, model.parameters(), strict=True)
    return max(float((each - other.detach()).abs().max()) for each, other in pairs)


def main() -> None:
    torch.set_num_threads(1)
    rpc.init_rpc(rpc_backend_options=rpc.TensorWireRpcBackendOptions(liveness_timeout=8))
    if os.environ["ROLE_NAME"] == "stage":
        rpc.serve()
        return
    drive(Path(sys.argv[1]))
    rpc.shutdown()


if __name__ == "__main__":
    main()
