"""Programs on ``tensorwire.parameter_server``, and the sum of what none of them can do without."""

from __future__ import annotations

import enum
import itertools
from collections.abc import Iterator
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.parameter_server.case import EPS, LR, Case, Program, join
from benchmarks.stepping import Step
from tensorwire import parameter_server as ps
from tensorwire.parameter_server.client.distinct import distinct
from tensorwire.parameter_server.declarations.spec import TableSpec
from tensorwire.parameter_server.declarations.wire import Wire
from tensorwire.parameter_server.kernels import kernels
from tensorwire.parameter_server.storage.table import Part, TableShard

_PIECE = 1 << 18


class Fetching(enum.Enum):
    """The ways in which a trainer fetches rows."""

    ON_DEMAND = enum.auto()
    AHEAD = enum.auto()
    STALE = enum.auto()


def rows(
    fetching: Fetching, servers: int, backups: int, case: Case, rank: int, meeting: str
) -> Step | None:
    """A table as large as the others', and a module on it."""
    join(rank, meeting, 1 + servers)
    if rank:
        return None
    consistency = ps.SSP(1) if fetching is Fetching.STALE else ps.BSP()
    names = ["server", "server2"][:servers]
    cluster = ps.connect(names, backups=backups, consistency=consistency)
    table = cluster.table("items", case.dim, ps.RowwiseAdagrad(LR, EPS))
    for some in torch.split(torch.arange(case.rows), _PIECE):
        table.push(some, torch.zeros(len(some), case.dim))
    module = ps.Embedding(table)
    optimizer = ps.Optimizer(cluster, module)
    batches: Iterator[Tensor] = itertools.cycle(case.batches())
    gradient = case.gradient()
    if fetching is not Fetching.ON_DEMAND:
        batches = iter(ps.prefetch(batches, module, ids=lambda batch: batch))

    def step() -> None:
        torch.autograd.backward(module(next(batches)), gradient)
        optimizer.step()

    return step


def numbers(case: Case, rank: int, meeting: str) -> Step | None:
    """Dense parameters: a step pushes their gradients and pulls their values."""
    join(rank, meeting)
    if rank:
        return None
    cluster = ps.connect(["server"])
    model = nn.Linear(1, case.numbers, bias=False)
    optimizer = ps.Optimizer(cluster, model, dense=torch.optim.SGD, lr=LR)
    model.weight.grad = torch.ones_like(model.weight)
    return optimizer.step


def floors(case: Case, rank: int, meeting: str) -> Step | None:
    """De-duplicate, gather, copy, expand, reduce, copy, update: one after the other, nothing else.

    All buffers are kept, and nothing travels between processes.
    """
    if rank:
        return None
    k = kernels()
    rule = ps.RowwiseAdagrad(LR, EPS)
    table = TableShard(
        TableSpec("items", case.dim, rule, ps.Constant(), None, None, ps.Precision.FLOAT32, Wire()),
        k,
    )
    for some in np.array_split(np.arange(case.rows), max(1, case.rows // _PIECE)):
        table.apply([Part(some, np.zeros((len(some), case.dim), np.float32))], 1)
    batches, gradient = itertools.cycle(case.batches()), case.gradient().numpy()
    buffers = [np.empty((case.ids, case.dim), np.float32) for _ in range(4)]
    seen = np.zeros(case.ids, np.uint8)

    def step() -> None:
        unique, places = (each.numpy() for each in distinct(next(batches)))
        n = len(unique)
        pulled, here, reduced, there = (each[:n] for each in buffers)
        found = table.pull(unique, pulled, 1)
        here[:] = pulled
        torch.index_select(torch.from_numpy(here), 0, torch.from_numpy(places), out=spread)
        seen[:] = 0
        k.segment_sum(gradient, places, seen, reduced)
        there[:] = reduced
        table.apply([Part(unique, there, found)], 1)

    spread = torch.empty(case.ids, case.dim)
    return step


def _one(fetching: Fetching) -> Program:
    return partial(rows, fetching, 1, 0)


AHEAD = "ours, ahead"
PROGRAMS: dict[str, Program] = {
    "ours, on demand": _one(Fetching.ON_DEMAND),
    AHEAD: _one(Fetching.AHEAD),
    "ours, stale": _one(Fetching.STALE),
    "sum of floors": floors,
}
BACKED: dict[str, Program] = {
    "two servers": partial(rows, Fetching.AHEAD, 2, 0),
    "each the other's backup": partial(rows, Fetching.AHEAD, 2, 1),
}
