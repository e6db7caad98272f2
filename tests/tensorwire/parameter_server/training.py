"""Trainers and tables for several test files."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tensorwire import parameter_server as ps

IDS = 200


def batches_of(trainer: int, steps: int = 12) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(trainer)
    return [
        (
            torch.randint(0, IDS, (30,), generator=generator),
            torch.randn(30, 8, generator=generator),
        )
        for _ in range(steps)
    ]


def shards_of(cluster: ps.Cluster) -> list[dict[str, Any]]:
    servers = cluster.stats()["servers"].values()
    return [shard for server in servers for shard in server["shards"].values()]
