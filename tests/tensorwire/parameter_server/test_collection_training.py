"""A model with a collection is trained as one of torch's modules is, to the bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler as schedulers

from tensorwire import parameter_server as ps
from tests.tensorwire.parameter_server.clusters import server_names, train

IDS = {"user": torch.tensor([[1], [2], [1]]), "item": torch.tensor([[5], [5], [0]])}
ROWS, DIM, STEPS = 8, 4, 5
Change = Callable[[nn.Module, torch.optim.Optimizer], object]


class Local(nn.Module):
    """The collection's part in torch's own modules."""

    def __init__(self, weights: list[Tensor]) -> None:
        super().__init__()
        self.bags = nn.ModuleList(
            nn.EmbeddingBag.from_pretrained(each, freeze=False, mode="sum") for each in weights
        )

    def forward(self, ids: dict[str, Tensor]) -> Tensor:
        return torch.cat([bag(ids[name]) for bag, name in zip(self.bags, IDS, strict=True)], 1)


class Model(nn.Module):
    """Rows of two tables, side by side, and a layer."""

    def __init__(self, rows: nn.Module) -> None:
        super().__init__()
        self.rows = rows
        self.top = nn.Linear(2 * DIM, 1)
        with torch.no_grad():
            self.top.weight.copy_(torch.linspace(-1, 1, 2 * DIM).view(1, -1))
            self.top.bias.zero_()

    def forward(self, ids: dict[str, Tensor]) -> Tensor:
        rows = self.rows(ids)
        output: Tensor = self.top(rows.values() if isinstance(rows, ps.KeyedTensor) else rows)
        return output


def collected(cluster: ps.Cluster) -> tuple[Model, list[ps.Table]]:
    tables = [
        cluster.table(name, DIM, ps.SGD(lr=0.1, momentum=0.9), init=ps.Uniform(0.5, seed))
        for seed, name in enumerate(IDS)
    ]
    features = dict(zip(IDS, tables, strict=True))
    return Model(ps.EmbeddingBagCollection(features)), tables


def rows_of(tables: list[ps.Table]) -> list[Tensor]:
    return [table.pull(torch.arange(ROWS)) for table in tables]


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(IDS).square().sum().backward()
    optimizer.step()


def scheduled(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """A rate for each table, and one for the layer."""
    rates = [lambda step: 0.9**step, lambda step: 1 / (1 + step), lambda step: 0.5**step]
    schedule = schedulers.LambdaLR(optimizer, rates)
    for _ in range(STEPS):
        step(model, optimizer)
        schedule.step()


def clipped(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for turn in range(STEPS):
        optimizer.zero_grad()
        model(IDS).square().sum().backward()
        if turn % 2:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        else:
            nn.utils.clip_grad_value_(model.parameters(), 0.2)
        optimizer.step()


def scaled(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Gradients are infinite in one step, which the scaler leaves out."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for turn in range(STEPS):
        optimizer.zero_grad()
        scaler.scale(model(IDS).square().sum() * (float("inf") if turn == 2 else 1.0)).backward()
        if turn % 2:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()


def accumulated(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(STEPS):
        optimizer.zero_grad()
        for begin in (0, 1):
            (model({n: ids[begin:] for n, ids in IDS.items()}).square().sum() / 2).backward()
        optimizer.step()


@pytest.mark.parametrize("way", [scheduled, clipped, scaled, accumulated])
def test_a_collection_is_trained_as_modules_of_torch_are(way: Change) -> None:
    def go() -> None:
        cluster = ps.connect(server_names(1))
        model, tables = collected(cluster)
        local = Model(Local(rows_of(tables)))
        groups: list[dict[str, Any]] = [{"params": local.top.parameters()}]
        groups += [{"params": bag.parameters()} for bag in local.rows.bags]
        way(local, torch.optim.SGD(groups, lr=0.1, momentum=0.9))
        way(model, ps.Optimizer(cluster, model, torch.optim.SGD, lr=0.1, momentum=0.9))
        for mine, bag in zip(rows_of(tables), local.rows.bags, strict=True):
            assert torch.equal(mine, bag.weight)
        assert torch.equal(model.top.weight, local.top.weight)

    train([go])


def test_a_collection_goes_on_from_a_snapshot_on_other_servers(tmp_path: Path) -> None:
    def go(servers: int, restore: Path | None) -> list[Tensor]:
        cluster = ps.connect(server_names(servers), restore=restore)
        model, tables = collected(cluster)
        optimizer = ps.Optimizer(cluster, model, torch.optim.SGD, lr=0.1)
        for turn in range(cluster.step, 2 * STEPS):
            if turn == STEPS and restore is None:
                cluster.snapshot(tmp_path / "one").wait(30)
            step(model, optimizer)
        return [*rows_of(tables), model.top.weight.detach().clone()]

    (whole,) = train([lambda: go(1, None)])
    (resumed,) = train([lambda: go(2, tmp_path / "one")], servers=2)
    assert all(torch.equal(a, b) for a, b in zip(whole, resumed, strict=True))
