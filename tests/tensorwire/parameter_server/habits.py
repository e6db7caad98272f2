"""A model with a table and dense parameters, on servers and without."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.utils.prune
import torch.utils.checkpoint
from torch import Tensor, nn

from tensorwire import parameter_server as ps
from tests.tensorwire.parameter_server.clusters import server_names, train

IDS = torch.tensor([1, 2, 1])


class Model(nn.Module):
    """A table and a layer, or the same in torch's own modules."""

    def __init__(self, rows: nn.Module) -> None:
        super().__init__()
        self.rows = rows
        self.top = nn.Linear(4, 1)
        with torch.no_grad():
            self.top.weight.copy_(torch.arange(1.0, 5).view(1, 4))
            self.top.bias.zero_()

    def forward(self, ids: Tensor) -> Tensor:
        output: Tensor = self.top(self.rows(ids))
        return output


def on_servers(rule: ps.Rule | None = None, **options: Any) -> tuple[ps.Cluster, Model]:
    cluster = ps.connect(server_names(1), **options)
    init = ps.Uniform(0.5, seed=3)
    return cluster, Model(ps.Embedding(cluster.table("rows", 4, rule or ps.SGD(lr=1.0), init=init)))


def local_like(model: Model) -> Model:
    """The same model without servers."""
    rows = nn.Embedding(8, 4)
    rows.weight.data.copy_(model.rows.table.pull(torch.arange(8)))
    made = Model(rows)
    made.top.load_state_dict(model.top.state_dict())
    return made


def same_rows(model: Model, local: Model) -> bool:
    return torch.equal(model.rows.table.pull(torch.arange(8)), local.rows.weight)


def in_a_cluster(test: Callable[..., None]) -> Callable[[], None]:
    """Runs a test as the one trainer of a server."""

    def run() -> None:
        train([test])

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run
