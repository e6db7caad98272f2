"""A click model's sparse side: many tables, one or a few ids each, and a small net behind them.

Sizes of tables fall by a quarter from one to the next, as in Criteo's data set, and ids are skewed.
"""

from __future__ import annotations

import enum
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, Sampler

from benchmarks.parameter_server.case import BATCHES, EPS, LR, Case, Program, join, join_torch
from benchmarks.stepping import Step
from tensorwire import parameter_server as ps

_NAMES = ("server", "server2")
_BATCHES_OF_AN_EPOCH = 1000
_MANY_EPOCHS = 1_000_000


@dataclass(frozen=True, slots=True)
class Many(Case):
    """The size of what is trained; ``ids`` are the examples of a batch.

    Args:
        tables: how many features there are, each with a table of its own.
        most: ids of an example for a feature; if more than one, from 1 to so many, jagged.
        servers: how many there are.
        torchrec: where TorchRec and what it needs are installed; empty for here.
    """

    tables: int = 26
    most: int = 1
    servers: int = 1
    torchrec: str = ""

    def bags(self) -> list[list[tuple[Tensor, Tensor]]]:
        """Batches: for each feature, ids and the number of ids of each example."""
        draw = torch.Generator().manual_seed(0)
        sizes = [max(10, int(self.rows * 0.75**place)) for place in range(self.tables)]

        def feature(size: int) -> tuple[Tensor, Tensor]:
            lengths = torch.randint(1, self.most + 1, (self.ids,), generator=draw)
            drawn = torch.rand(int(lengths.sum()), generator=draw).pow(4)
            return (drawn * size).long(), lengths

        return [[feature(size) for size in sizes] for _ in range(BATCHES)]

    def net(self) -> nn.Module:
        """The net behind the tables."""
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(self.tables * self.dim, 64), nn.ReLU(), nn.Linear(64, 1))


def _loss(net: nn.Module, vectors: Tensor) -> Tensor:
    found: Tensor = net(vectors)
    return (found - 1).square().mean()


def _nested(ids: Tensor, lengths: Tensor, most: int) -> Tensor:
    if most == 1:
        return ids.unsqueeze(1)
    offsets = torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)))
    return torch.nested.nested_tensor_from_jagged(ids, offsets)


class Way(enum.Enum):
    """The modules that look up."""

    COLLECTION = enum.auto()
    MODULES = enum.auto()


Batch = dict[str, Tensor]
Read = Callable[[ps.Cluster, Many, Sequence[Batch]], Iterable[Batch]]
"""Gives batches again and again."""


def _cycled(_cluster: ps.Cluster, _case: Many, batches: Sequence[Batch]) -> Iterator[Batch]:
    return itertools.cycle(batches)


def ours(
    way: Way, ahead: int, case: Case, rank: int, meeting: str, read: Read = _cycled
) -> Step | None:
    """A collection, or a module for each table."""
    assert isinstance(case, Many)
    join(rank, meeting, 1 + case.servers)
    return None if rank else training(way, ahead, case, read)[1]


def training(way: Way, ahead: int, case: Many, read: Read = _cycled) -> tuple[ps.Cluster, Step]:
    """The trainer of :func:`ours`, which has joined.

    Args:
        way: the modules.
        ahead: batches that are known before they train; 0 to fetch rows on demand.
        case: what is trained.
        read: gives the batches, again and again.
    """
    cluster = ps.connect(list(_NAMES[: case.servers]))
    names = [f"f{place}" for place in range(case.tables)]
    rule = ps.RowwiseAdagrad(LR, EPS)
    tables = {n: cluster.table(n, case.dim, rule, init=ps.Uniform(0.05)) for n in names}
    net = case.net()
    lookup: nn.Module = (
        ps.EmbeddingBagCollection(tables)
        if way is Way.COLLECTION
        else nn.ModuleDict({n: ps.EmbeddingBag(table, "sum") for n, table in tables.items()})
    )
    model = nn.ModuleDict({"bags": lookup, "net": net})
    optimizer = ps.Optimizer(cluster, model, dense=torch.optim.SGD, lr=0.01)
    made = [
        {n: _nested(*bag, case.most) for n, bag in zip(names, bags, strict=True)}
        for bags in case.bags()
    ]
    source = read(cluster, case, made)
    if ahead:
        by_name: Callable[[Batch], Batch] = (
            (lambda batch: batch)
            if way is Way.COLLECTION
            else (lambda batch: {f"bags.{n}": each for n, each in batch.items()})
        )
        source = ps.prefetch(source, model, ids=by_name, ahead=ahead)
    batches = iter(source)

    def vectors(batch: dict[str, Tensor]) -> Tensor:
        if isinstance(lookup, nn.ModuleDict):
            return torch.cat([lookup[n](batch[n]) for n in names], 1)
        found: Tensor = lookup(batch).values()
        return found

    def step() -> None:
        optimizer.zero_grad()
        torch.autograd.backward(_loss(net, vectors(next(batches))))
        optimizer.step()

    return cluster, step


class _Examples(Dataset[Batch]):
    """Examples whose batches are made already, so that only their order costs anything."""

    def __init__(self, case: Many, batches: Sequence[Batch]) -> None:
        self._batches = batches
        self._size = case.ids
        self.length = case.ids * _BATCHES_OF_AN_EPOCH

    def __getitems__(self, indices: list[int]) -> Batch:
        return self._batches[indices[0] // self._size % len(self._batches)]


def _loader(examples: _Examples, sampler: Sampler[list[int]]) -> DataLoader[Batch]:
    return DataLoader(examples, batch_sampler=sampler, collate_fn=lambda batch: batch)


def _sampled(_cluster: ps.Cluster, case: Many, batches: Sequence[Batch]) -> Iterator[Batch]:
    """Read in an order that torch's sampler draws for each epoch."""
    examples = _Examples(case, batches)
    order = RandomSampler(range(examples.length))
    loader = _loader(examples, BatchSampler(order, case.ids, drop_last=False))
    while True:
        yield from loader


def _counted(cluster: ps.Cluster, case: Many, batches: Sequence[Batch]) -> Iterable[Batch]:
    """Read in an order of the servers' account, which counts each batch with its push."""
    examples = _Examples(case, batches)
    data = cluster.samples(
        examples.length, batch_size=case.ids, shuffle=True, seed=0, epochs=_MANY_EPOCHS
    )
    return data.track(_loader(examples, data))


# --- by hand, one message to each server and way


class _Server:
    """The tables of a server process."""

    tables: list[tuple[Tensor, Tensor]]


def _begin(case: Many) -> None:
    torch.set_num_threads(case.threads)
    rows = case.rows // case.servers + 1
    _Server.tables = [
        (torch.zeros(rows, case.dim).uniform_(-0.05, 0.05), torch.zeros(rows))
        for _ in range(case.tables)
    ]


def _pull(ids: list[Tensor]) -> list[Tensor]:
    return [table[0][each] for table, each in zip(_Server.tables, ids, strict=True)]


def _push(ids: list[Tensor], grads: list[Tensor]) -> None:
    for (weight, sums), each, grad in zip(_Server.tables, ids, grads, strict=True):
        sums[each] += grad.square().mean(1)
        weight.index_add_(0, each, grad / (sums[each].sqrt() + EPS)[:, None], alpha=-LR)


def _by_hand(rpc: Any, case: Many) -> Step:
    servers = _NAMES[: case.servers]
    for name in servers:
        rpc.rpc_sync(name, _begin, args=(case,))
    net = case.net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    batches = itertools.cycle(case.bags())

    def of_all(function: Any, *parts: list[list[Tensor]]) -> list[Any]:
        calls = [
            rpc.rpc_async(name, function, args=tuple(part[s] for part in parts))
            for s, name in enumerate(servers)
        ]
        return [call.wait() for call in calls]

    def step() -> None:
        bags = next(batches)
        found = [torch.unique(ids, return_inverse=True) for ids, _ in bags]
        masks = [[unique % len(servers) == s for unique, _ in found] for s in range(len(servers))]
        parts = [
            [unique[mask] // len(servers) for (unique, _), mask in zip(found, own, strict=True)]
            for own in masks
        ]
        pulled, rows = of_all(_pull, parts), []
        for t, (unique, _) in enumerate(found):
            each = torch.empty(len(unique), case.dim)
            for s in range(len(servers)):
                each[masks[s][t]] = pulled[s][t]
            rows.append(each.requires_grad_())
        vectors = [
            nn.functional.embedding_bag(places, each, lengths.cumsum(0) - lengths, mode="sum")
            for each, (_, places), (_, lengths) in zip(rows, found, bags, strict=True)
        ]
        optimizer.zero_grad()
        torch.autograd.backward(_loss(net, torch.cat(vectors, 1)))
        optimizer.step()
        grads = [
            [each.grad[mask] for each, mask in zip(rows, own, strict=True) if each.grad is not None]
            for own in masks
        ]
        of_all(_push, parts, grads)

    return step


def by_hand_over_torch(case: Case, rank: int, meeting: str) -> Step | None:
    """Pull and push on torch's RPC."""
    assert isinstance(case, Many)
    rpc = join_torch(rank, meeting, 1 + case.servers)
    return None if rank else _by_hand(rpc, case)


def by_hand_over_ours(case: Case, rank: int, meeting: str) -> Step | None:
    """The same on this library's RPC."""
    assert isinstance(case, Many)
    rpc = join(rank, meeting, 1 + case.servers)
    return None if rank else _by_hand(rpc, case)


# --- in one process


def _here(case: Many, vectors: Callable[[int], Tensor], sparse: Any) -> Step:
    net = case.net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    turns = itertools.cycle(range(BATCHES))

    def step() -> None:
        optimizer.zero_grad()
        if sparse is not None:
            sparse.zero_grad()
        torch.autograd.backward(_loss(net, vectors(next(turns))))
        optimizer.step()
        if sparse is not None:
            sparse.step()

    return step


def modules_here(case: Case, rank: int, meeting: str) -> Step | None:
    """``nn.EmbeddingBag`` for each table, and sparse Adagrad, in one process."""
    assert isinstance(case, Many)
    if rank:
        return None
    bags = [nn.EmbeddingBag(case.rows, case.dim, mode="sum", sparse=True)
            for _ in range(case.tables)]  # fmt: skip
    sparse = torch.optim.Adagrad([bag.weight for bag in bags], lr=LR)
    batches = case.bags()

    def vectors(turn: int) -> Tensor:
        given = zip(bags, batches[turn], strict=True)
        return torch.cat([bag(ids, n.cumsum(0) - n) for bag, (ids, n) in given], 1)

    return _here(case, vectors, sparse)


def torchrec_here(case: Case, rank: int, meeting: str) -> Step | None:
    """TorchRec's fused ``EmbeddingBagCollection`` with Adagrad, in one process."""
    assert isinstance(case, Many)
    if rank:
        return None
    if case.torchrec:
        sys.path.append(case.torchrec)
    import torchrec  # type: ignore[import-not-found,unused-ignore]
    from torchrec.modules import (  # type: ignore[import-not-found,unused-ignore]
        fused_embedding_modules as fused,
    )

    keys = [f"f{place}" for place in range(case.tables)]
    bags = fused.FusedEmbeddingBagCollection(
        [
            torchrec.EmbeddingBagConfig(
                name=f"t{key}", embedding_dim=case.dim, num_embeddings=case.rows,
                feature_names=[key],
            )
            for key in keys
        ],
        torch.optim.Adagrad, {"lr": LR}, device=torch.device("cpu"),
    )  # fmt: skip
    batches = [
        torchrec.KeyedJaggedTensor(
            keys, torch.cat([ids for ids, _ in each]), lengths=torch.cat([n for _, n in each])
        )
        for each in case.bags()
    ]
    return _here(case, lambda turn: bags(batches[turn]).values(), None)


BASE = "collection, ahead"
SAMPLED = "a DataLoader, torch's order"
READING: dict[str, Program] = {
    SAMPLED: partial(ours, Way.COLLECTION, 1, read=_sampled),
    "the same, each sample once": partial(ours, Way.COLLECTION, 1, read=_counted),
}
"""Programs that read through a ``DataLoader``: with torch's sampler, and with the servers'."""
PROGRAMS: dict[str, Program] = {
    BASE: partial(ours, Way.COLLECTION, 1),
    "collection, on demand": partial(ours, Way.COLLECTION, 0),
    "modules, ahead": partial(ours, Way.MODULES, 1),
    "modules, on demand": partial(ours, Way.MODULES, 0),
    "by hand, torch RPC": by_hand_over_torch,
    "by hand, our RPC": by_hand_over_ours,
    "modules, one process": modules_here,
}
