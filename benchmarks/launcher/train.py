"""The README's parameter-server program, which notes when its worker begins and has done a step.

train.py FOLDER SERVERS STEPS: without steps it trains until the file ``end`` is in the folder.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from pathlib import Path

import torch

import rpc
from tensorwire import parameter_server as ps


class Model(torch.nn.Module):
    """A bag of words and a linear layer."""

    def __init__(self, cluster: ps.Cluster) -> None:
        super().__init__()
        words = cluster.table("words", dim=8, optimizer=ps.Adagrad(lr=0.1), init=ps.Normal(std=0.1))
        self.words = ps.EmbeddingBag(words)
        self.score = torch.nn.Linear(8, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.score(self.words(ids))
        return scores.squeeze(1)


def note(folder: Path, kind: str, text: str) -> None:
    """Writes down a fact about this life of the worker, all at once."""
    life = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    draft = folder / f"{os.getpid()}.draft"
    draft.write_text(text)
    draft.rename(folder / f"{os.environ['RPC_WORKER_NAME']}.{life}.{kind}")


def main(folder: Path, servers: int, steps: int) -> None:
    """Trains."""
    note(folder, "pid", str(os.getpid()))
    rpc.init_rpc()
    cluster = ps.connect([f"ps:{number}" for number in range(servers)], backups=min(1, servers - 1))
    torch.manual_seed(0)
    model = Model(cluster)
    optimizer = ps.Optimizer(cluster, model, dense=torch.optim.Adam, lr=0.01)
    random = torch.Generator().manual_seed(int(os.environ["ROLE_RANK"]))
    for step in itertools.count():
        ids = torch.randint(2**40, 2**40 + 500, (64, 3), generator=random)
        target = (ids % 7 == 0).any(1).float()
        loss = torch.nn.functional.binary_cross_entropy_with_logits(model(ids), target)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if step == 0:
            note(folder, "stepped", str(time.time()))
        if step == steps or (folder / "end").exists():
            break
    cluster.finish()
    rpc.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
