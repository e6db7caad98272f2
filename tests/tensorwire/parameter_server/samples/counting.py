"""Trainers in one process whose table counts how often each sample was trained."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from tensorwire import parameter_server as ps

SUM = ps.BSP(reduce=ps.Reduce.SUM)


class Counting:
    """A trainer whose table counts how often each sample was trained."""

    def __init__(self, length: int, **connect: Any) -> None:
        options = {"servers": ["ps0"], "consistency": SUM, **connect}
        self.cluster = ps.connect(**options)
        self.table = self.cluster.table("counts", 1, ps.SGD(lr=1.0))
        self.length = length
        self.batches: list[list[int]] = []

    def loader(self, data: ps.Samples, **how: Any) -> DataLoader[tuple[Tensor, ...]]:
        dataset = TensorDataset(torch.arange(self.length))
        return DataLoader(dataset, batch_sampler=data, **how)

    def push(self, ids: Tensor) -> None:
        self.table.push(ids, -torch.ones(len(ids), 1))
        self.batches.append(ids.tolist())

    def train(self, data: ps.Samples, before: Callable[[int], object] = lambda _: None) -> Counting:
        """Trains all; ``before`` is told how many steps were made."""
        for (ids,) in data.track(self.loader(data)):
            before(len(self.batches))
            self.push(ids)
        return self

    @property
    def counts(self) -> list[float]:
        return self.table.pull(torch.arange(self.length)).flatten().tolist()
