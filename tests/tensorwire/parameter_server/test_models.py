"""Models with tables on servers learn what they learn in one process, with fewer messages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from sklearn.datasets import load_digits
from torch import Tensor, nn

from rpc.testing import as_worker, local_group
from tensorwire import parameter_server as ps
from tensorwire.parameter_server.client.feedback import Feedback
from tensorwire.parameter_server.decisions.consistency import Consistency
from tensorwire.parameter_server.kernels import kernels
from tensorwire.parameter_server.rows.index import Index
from tensorwire.parameter_server.server.host import host
from tests.tensorwire.parameter_server.clusters import server_names, train

IDS, DIM, STEPS = 60, 8, 6
Batch = tuple[Tensor, Tensor, Tensor]


def batches(trainer: int = 0, steps: int = STEPS) -> Iterator[Batch]:
    r = torch.Generator().manual_seed(trainer)
    for _ in range(steps):
        ids = torch.randint(0, IDS, (2, 12, 5), generator=r)
        yield ids[0], ids[1], torch.randint(0, 2, (12,), generator=r).float()


class Clicks(nn.Module):
    """Two tables and a dense layer."""

    def __init__(self, users: nn.Module, items: nn.Module) -> None:
        super().__init__()
        self.users, self.items = users, items
        self.top = nn.Linear(2 * DIM, 1)
        r = torch.Generator().manual_seed(3)  # trainers are threads, which share torch's own
        for parameter in self.top.parameters():
            nn.init.uniform_(parameter, -0.25, 0.25, generator=r)

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        both = torch.cat((self.users(users).mean(1), self.items(items)), 1)
        return self.top(both).squeeze(1)


class CollectedClicks(Clicks):
    """The same, both tables in one collection."""

    def __init__(self, users: ps.Table, items: ps.Table) -> None:
        super().__init__(nn.Identity(), nn.Identity())
        self.both = ps.EmbeddingBagCollection({"users": ps.Feature(users, "mean"), "items": items})

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        found: Tensor = self.top(self.both({"users": users, "items": items}).values())
        return found.squeeze(1)


both = pytest.mark.parametrize("collected", [False, True], ids=["modules", "collection"])


def remote(
    cluster: ps.Cluster, collected: bool = False, **options: Any
) -> tuple[Clicks, list[ps.Table]]:
    tables = [
        cluster.table(name, DIM, ps.SGD(lr=0.5), init=ps.Uniform(0.1, seed), **options)
        for seed, name in enumerate(("users", "items"))
    ]
    if collected:
        return CollectedClicks(*tables), tables
    return Clicks(ps.Embedding(tables[0]), ps.EmbeddingBag(tables[1], "sum")), tables


def prefetched_for(model: Clicks, given: Iterable[Batch], ahead: int = 1) -> Iterable[Batch]:
    """The batches, prefetched for a model that is made of either."""
    ids = lambda batch: {"users": batch[0], "items": batch[1]}  # noqa: E731
    return ps.prefetch(given, model, ids=ids, ahead=ahead)


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    users, items, clicked = batch
    return nn.functional.binary_cross_entropy_with_logits(model(users, items), clicked)


def fit(model: nn.Module, optimizer: torch.optim.Optimizer, given: Iterable[Batch]) -> list[float]:
    losses = []
    for batch in given:
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def ids_of(batch: Batch) -> tuple[Tensor, Tensor]:
    return batch[0], batch[1]


def one_process(weights: list[Tensor]) -> tuple[list[float], list[Tensor]]:
    users, items = (nn.Embedding.from_pretrained(w.clone(), freeze=False) for w in weights)
    bag = nn.EmbeddingBag.from_pretrained(weights[1].clone(), freeze=False, mode="sum")
    del items
    model = Clicks(users, bag)
    rows = [users.weight, bag.weight]
    optimizer = torch.optim.SGD(
        [{"params": rows, "lr": 0.5}, {"params": model.top.parameters(), "lr": 0.1}], lr=0.1
    )
    return fit(model, optimizer, batches()), [*rows, *model.top.parameters()]


@both
@pytest.mark.parametrize("prefetched", [False, True], ids=["on demand", "prefetched"])
def test_a_model_on_servers_has_the_losses_and_weights_of_one_process(
    prefetched: bool, collected: bool
) -> None:
    def go() -> tuple[list[Tensor], list[float], list[Tensor], int]:
        cluster = ps.connect(server_names(2))
        model, tables = remote(cluster, collected)
        every = torch.arange(IDS)
        before = [table.pull(every) for table in tables]
        optimizer = ps.Optimizer(cluster, model, dense=torch.optim.SGD, lr=0.1)
        pulls = cluster.session.pulls
        given: Iterable[Batch] = batches()
        if prefetched:
            given = prefetched_for(model, given)
        losses = fit(model, optimizer, given)
        pulls = cluster.session.pulls - pulls
        after = [*(table.pull(every) for table in tables), *model.top.parameters()]
        return before, losses, after, pulls

    ((before, losses, after, pulls),) = train([go], servers=2)
    wanted, weights = one_process(before)
    assert losses == pytest.approx(wanted, rel=1e-6)
    for mine, theirs in zip(after, weights, strict=True):
        torch.testing.assert_close(mine, theirs)
    on_demand = 2 if collected else 3  # the dense parameters are pulled, too
    assert pulls == (STEPS + 1 if prefetched else on_demand * STEPS)


@both
@pytest.mark.parametrize("ahead", [1, 2, 4])
def test_prefetching_changes_no_bit_for_two_trainers_in_step(collected: bool, ahead: int) -> None:
    def go(trainer: int, prefetched: bool) -> Callable[[], list[Tensor]]:
        def run() -> list[Tensor]:
            cluster = ps.connect(server_names(2), trainers=2)
            model, tables = remote(cluster, collected)
            optimizer = ps.Optimizer(cluster, model, dense=torch.optim.Adam)
            given: Iterable[Batch] = batches(trainer)
            if prefetched:
                given = prefetched_for(model, given, ahead)
            fit(model, optimizer, given)
            rows = [table.pull(torch.arange(IDS)) for table in tables]
            cluster.finish()
            return [*rows, *(p.detach().clone() for p in model.parameters() if p.dim())]

        return run

    plain = train([go(0, False), go(1, False)], servers=2)
    ahead = train([go(0, True), go(1, True)], servers=2)
    for one, other in zip(plain[0][:2], ahead[1][:2], strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("consistency", [ps.BSP(), ps.SSP(1)], ids=str)
def test_ids_are_searched_for_once_where_they_are_prefetched(
    consistency: Consistency, monkeypatch: pytest.MonkeyPatch
) -> None:
    searched: list[int] = []
    looked_through: list[int] = []

    def upsert(index: Index, ids: Any) -> Any:
        searched.append(len(ids))
        return old_upsert(index, ids)

    def dedup(*arrays: Any) -> int:
        looked_through.append(1)
        return int(old_dedup(*arrays))

    def go() -> None:
        cluster = ps.connect(server_names(1), consistency=consistency)
        table = cluster.table("t", DIM, ps.SGD(lr=0.5))
        table.push(torch.arange(IDS), torch.ones(IDS, DIM))  # the rows that there are
        module = ps.Embedding(table)
        optimizer = ps.Optimizer(cluster, module)
        searched.clear()
        looked_through.clear()
        for users, _, _ in ps.prefetch(batches(), module, ids=lambda batch: batch[0]):
            module(users).sum().backward()
            optimizer.step()
        table.pull(torch.arange(IDS))
        cluster.finish()

    old_upsert, old_dedup = Index.upsert, kernels().dedup
    monkeypatch.setattr(Index, "upsert", upsert)
    monkeypatch.setattr(kernels(), "dedup", dedup)
    train([go])
    assert not searched
    assert len(looked_through) == STEPS + 1  # the last pull's, too


def test_rows_are_pulled_ahead_where_staleness_is_allowed() -> None:
    def go() -> list[float]:
        cluster = ps.connect(server_names(1), consistency=ps.SSP(1))
        model, _ = remote(cluster)
        optimizer = ps.Optimizer(cluster, model, dense=torch.optim.SGD, lr=0.1)
        given = [next(iter(batches()))] * 30
        return fit(model, optimizer, ps.prefetch(given, model.users, model.items, ids=ids_of))

    (losses,) = train([go])
    assert losses[-1] < losses[0] / 2


def test_a_stale_step_of_tables_does_not_wait_for_the_servers() -> None:
    with local_group("ps0", "trainer0") as agents:
        with as_worker(agents[0]):
            server = host()
        with as_worker(agents[1]):
            cluster = ps.connect(["ps0"], consistency=ps.Async())
            table = cluster.table("items", 2, ps.SGD(lr=1.0))
            words, ids = ps.Embedding(table), torch.arange(3)
            optimizer = ps.Optimizer(cluster, words)
            optimizer.skip()  # so that there is a shard
            (shard,) = server.node("default").shards.values()

            words(ids).sum().backward()
            with shard.lane.state_lock:
                optimizer.step()  # returns although nothing can be applied

            cluster.finish()
            assert torch.equal(table.pull(ids), torch.full((3, 2), -1.0))


@both
def test_a_cache_saves_pulls_of_hot_rows_and_evaluation_moves_no_clock(collected: bool) -> None:
    def go() -> tuple[int, int, int]:
        cluster = ps.connect(server_names(1))
        model, tables = remote(cluster, collected, cache=ps.Cache(rows=1000, staleness=2))
        optimizer = ps.Optimizer(cluster, model, dense=torch.optim.SGD, lr=0.1)
        fit(model, optimizer, [next(iter(batches()))] * STEPS)
        with torch.no_grad():
            loss_of(model, next(iter(batches())))
        assert tables[0].cache is not None
        return cluster.step, tables[0].cache.hits, tables[0].cache.misses

    ((step, hits, misses),) = train([go])
    different = len(next(iter(batches()))[0].unique())
    assert step == STEPS
    assert (hits, misses) == (4 * different, 3 * different)


def test_a_table_that_is_not_used_in_a_step_stays_as_it_is() -> None:
    def go() -> tuple[Tensor, Tensor]:
        cluster = ps.connect(server_names(2))
        model, tables = remote(cluster)
        optimizer = ps.Optimizer(cluster, model, dense=torch.optim.SGD, lr=0.1)
        before = tables[1].pull(torch.arange(IDS))
        model.users(torch.arange(5)).sum().backward()
        optimizer.step()
        return before, tables[1].pull(torch.arange(IDS))

    ((before, after),) = train([go], servers=2)
    assert torch.equal(before, after)


KINDS = [ps.BFloat16(), ps.Float16(), ps.Int8(), ps.TopK(0.25)]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_what_packing_leaves_out_is_sent_later(kind: Any) -> None:
    feedback = Feedback(kind, DIM)
    ids = torch.tensor([5, -9, 7])
    r = torch.Generator().manual_seed(1)
    given, arrived = torch.zeros(3, DIM), torch.zeros(3, DIM)
    for _ in range(200):
        grad = torch.randn(3, DIM, generator=r)
        given += grad
        arrived += kind.unpack(kind.pack(feedback.corrected(ids, grad)), DIM)

    assert (given - arrived).abs().max() < 20  # of one step, not of two hundred
    lossy = kind.unpack(kind.pack(grad), DIM)
    assert not torch.equal(lossy, grad)


@both
def test_packed_gradients_reach_the_loss_of_whole_ones_on_digits(collected: bool) -> None:
    scans = load_digits()
    labels = torch.from_numpy(scans.target).long()
    ids = torch.from_numpy(scans.data).long() // 4 + 5 * torch.arange(64)  # pixel and darkness

    def go(wire: Any) -> tuple[float, float]:
        cluster = ps.connect(server_names(2))
        table = cluster.table("pixels", 10, ps.SGD(lr=1.0), wire=wire)
        module = (
            ps.EmbeddingBagCollection({"p": table}) if collected else ps.EmbeddingBag(table, "sum")
        )

        def bag(some: Tensor) -> Tensor:
            found: Tensor = module({"p": some}).values() if collected else module(some)
            return found

        optimizer = ps.Optimizer(cluster, module)
        for step in range(60):
            part = torch.arange(step * 300, step * 300 + 300) % len(labels)
            optimizer.zero_grad()
            nn.functional.cross_entropy(bag(ids[part]), labels[part]).backward()
            optimizer.step()
        with torch.no_grad():
            found = bag(ids)
        right = (found.argmax(1) == labels).float().mean()
        return nn.functional.cross_entropy(found, labels).item(), right.item()

    wires = (ps.Float32(), ps.Int8(), ps.Wire(push=ps.TopK(0.25)))
    (plain, right), *others = (train([partial(go, wire)], servers=2)[0] for wire in wires)
    assert right > 0.96
    for loss, _ in others:
        assert loss <= plain * 1.01


def test_a_snapshot_is_read_without_a_cluster(tmp_path: Path) -> None:
    ids = torch.arange(-20, 20)

    def go() -> Tensor:
        cluster = ps.connect(server_names(2))
        table = cluster.table("items", DIM, ps.Adagrad(lr=0.1), init=ps.Uniform(0.1, 3))
        table.push(ids, torch.ones(len(ids), DIM))
        cluster.snapshot(tmp_path / "one").wait(30)
        return table.pull(ids)

    (rows,) = train([go], servers=2)
    found, weight = ps.read(tmp_path / "one", "items")
    assert torch.equal(found, ids)
    assert torch.equal(weight, rows)
    assert torch.equal(ps.read(tmp_path / "one", "items", "state.sum")[1], torch.ones(40, DIM))
    with pytest.raises(KeyError, match="no table 'users'"):
        ps.read(tmp_path / "one", "users")
    with pytest.raises(KeyError, match=r"not 'state\.mean'"):
        ps.read(tmp_path / "one", "items", "state.mean")

    parts: dict[str, dict[str, Any]] = {}
    for each in (tmp_path / "one").glob("*.safetensors"):
        parts.setdefault(each.name.rpartition("-")[0], {}).update(load_file(each))
    loose = [(c["table/items/0/ids"], c["table/items/0/weight"]) for c in parts.values()]
    keys, values = (np.concatenate(each) for each in zip(*loose, strict=True))
    assert np.array_equal(values[np.argsort(keys.reshape(-1))], rows)
    np.savez(tmp_path / "items.npz", ids=found, weight=weight)
    with np.load(tmp_path / "items.npz") as arrays:
        assert np.array_equal(arrays["weight"], rows)


def test_prefetching_wants_modules_and_as_many_tensors() -> None:
    with pytest.raises(ValueError, match="give the modules"):
        next(ps.prefetch([1], ids=lambda batch: batch))

    def go() -> None:
        model, _ = remote(ps.connect(server_names(1)))
        with pytest.raises(ValueError, match="1 tensors for 2 modules"):
            next(ps.prefetch(batches(), model.users, model.items, ids=lambda b: b[0]))
        with pytest.raises(
            ValueError, match="leaves out 'items'; the modules are 'users', 'items'"
        ):
            next(ps.prefetch(batches(), model, ids=lambda b: {"users": b[0]}))
        ids = {"users": 1, "items": 2, "more": 3}
        with pytest.raises(ValueError, match="has others"):
            next(ps.prefetch(batches(), model, ids=lambda b: ids))
        with pytest.raises(TypeError, match="a Tensor, not a dict by module name"):
            next(ps.prefetch(batches(), model, ids=lambda b: b[0]))
        with pytest.raises(ValueError, match="the model has no module that looks rows up"):
            next(ps.prefetch(batches(), model.top, ids=lambda b: b[0]))

    train([go])
