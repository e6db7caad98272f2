"""A job for rpcrun: its driver dies in the middle of a step, and its next life goes on by name.

Started with a folder, in which it leaves ``losses.txt``, a line a step, and ``quiet.txt``, the same
of a pipeline that nobody disturbs.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

import torch
from torch import nn

import rpc
from remote_module import RemoteModule
from tensorwire.pipeline import GradScaler, Pipeline

_STEPS, _KILLED = 12, 7


def _train(name: str, lines: Path, mark: Path | None) -> None:
    stages = [RemoteModule(f"stage:{n}", nn.Linear, (4, 4), seed=n) for n in range(2)]
    pipe = Pipeline(stages, "1f1b", 2, nn.MSELoss(), seed=5, backups=1, name=name)
    optimizer = pipe.optimizer(torch.optim.AdamW, lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9)
    scaler = GradScaler(pipe, 3.0, 1.5, growth_interval=3)  # which rounds, so its state shows
    generator = torch.Generator().manual_seed(1)
    data = [tuple(torch.rand(2, 8, 4, generator=generator)) for _ in range(_STEPS)]
    with lines.open("a") as file:
        for batch in pipe.batches(data, state={"scheduler": scheduler}):
            if mark is not None and pipe.steps == _KILLED and not mark.exists():
                mark.touch()
                threading.Timer(0.002, os.kill, (os.getpid(), signal.SIGKILL)).start()
            step, scale = pipe.steps, scaler.get_scale()
            loss = pipe.train_step(batch.x, target=batch.y, scale=scale).item()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scheduler.step()
            print(step, f"{loss}/{scale}/{scheduler.get_last_lr()}", file=file, flush=True)
    pipe.close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    rpc.init_rpc(backend=rpc.BackendType.TENSORWIRE)
    if os.environ["ROLE_NAME"] == "driver":
        for worker in ("stage:0", "stage:1"):
            rpc.get_worker_info(worker, wait_for_return=60)
        folder = Path(sys.argv[1])
        _train("disturbed", folder / "losses.txt", folder / "died")
        _train("quiet", folder / "quiet.txt", None)
        rpc.shutdown()
    else:
        rpc.serve()
