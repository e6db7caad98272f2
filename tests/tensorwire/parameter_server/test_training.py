"""Whole clusters in one process: what trainers push is what servers keep, to the bit."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from rpc import extend
from rpc.testing import MemoryHub, local_group
from tensorwire import parameter_server as ps
from tensorwire.parameter_server import kernels
from tensorwire.parameter_server.client import splitting
from tensorwire.parameter_server.client.exchange import Gradients, PullRequest
from tensorwire.parameter_server.client.splitting import WholeDense
from tensorwire.parameter_server.decisions import tasks
from tensorwire.parameter_server.declarations.spec import TableSpec
from tensorwire.parameter_server.server import writing
from tensorwire.parameter_server.storage.table import Part, Table
from tests import waiting
from tests.tensorwire.parameter_server.clusters import run, server_names, train

IDS = 200


def _batches(trainer: int, steps: int = 12) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(trainer)
    return [
        (
            torch.randint(0, IDS, (30,), generator=generator),
            torch.randn(30, 8, generator=generator),
        )
        for _ in range(steps)
    ]


RULES = {
    "momentum": ps.SGD(lr=0.1, momentum=0.9),
    "adagrad": ps.Adagrad(lr=0.1),
    "rowwise": ps.RowwiseAdagrad(lr=0.1),
    "adam": ps.Adam(lr=0.1),
    "ftrl": ps.FTRL(lr=0.1, l1=0.01),
}
INIT = ps.Uniform(0.1, seed=3)


def _columns_in_one_process(rule: ps.Rule) -> dict[str, Tensor]:
    """The rows and their state after both trainers' batches, without servers or messages."""
    table = Table(TableSpec("items", 8, rule, INIT), kernels.kernels())
    steps = zip(_batches(0), _batches(1), strict=True)
    for time, batches in enumerate(steps, 1):
        parts = []
        for ids, grad in batches:
            unique, places = ids.unique(return_inverse=True)
            sums = torch.zeros(len(unique), 8).index_add_(0, places, grad)
            parts.append(Part(unique.numpy(), sums.numpy()))
        table.apply(parts, time, share=2)  # the mean, as under BSP
    order = torch.argsort(table.all()[0])
    found = table.taken(np.arange(len(table))).columns
    return {name: torch.from_numpy(rows)[order] for name, rows in found.items()}


def test_rows_and_state_of_any_number_of_servers_are_those_of_one_process(tmp_path: Path) -> None:
    def pushing(trainer: int) -> Callable[..., None]:
        def go(servers: int) -> None:
            cluster = ps.connect(server_names(servers), trainers=2)
            tables = [cluster.table(n, 8, rule, init=INIT) for n, rule in RULES.items()]
            for ids, grad in _batches(trainer):
                cluster.push(dict.fromkeys(tables, (ids, grad)))
            cluster.finish()
            if trainer == 0:
                waiting.until(lambda: not cluster.stats()["trainers"])
                cluster.snapshot(tmp_path / str(servers)).wait(30)

        return go

    expected = {name: _columns_in_one_process(rule) for name, rule in RULES.items()}
    for servers in (1, 2, 3):
        train([pushing(0), pushing(1)], servers, servers=servers)
        for name, columns in expected.items():
            for column, rows in columns.items():
                found = ps.read(tmp_path / str(servers), name, column)[1]
                assert torch.equal(found, rows), (servers, name, column)


TORCHS: dict[str, tuple[ps.Rule, Callable[..., torch.optim.Optimizer]]] = {
    "sgd": (ps.SGD(lr=0.1), partial(torch.optim.SGD, lr=0.1)),
    "adagrad": (ps.Adagrad(lr=0.1), partial(torch.optim.Adagrad, lr=0.1)),
    "adam": (ps.Adam(lr=0.1), partial(torch.optim.SparseAdam, lr=0.1)),
}


def test_tables_are_embeddings_under_torch_s_optimizers_to_the_bit() -> None:
    every, batches = torch.arange(IDS), _batches(0, steps=200)

    def go() -> dict[str, tuple[Tensor, Tensor]]:
        cluster = ps.connect(server_names(2))
        tables = {n: cluster.table(n, 8, rule, init=INIT) for n, (rule, _) in TORCHS.items()}
        before = {name: table.pull(every) for name, table in tables.items()}
        for ids, grad in batches:
            cluster.push(dict.fromkeys(tables.values(), (ids, grad)))
        return {name: (before[name], table.pull(every)) for name, table in tables.items()}

    (found,) = train([go], servers=2)
    for name, (before, after) in found.items():
        embedding = nn.Embedding.from_pretrained(before, freeze=False)
        optimizer = TORCHS[name][1](embedding.parameters())
        for ids, grad in batches:
            optimizer.zero_grad()
            embedding(ids).backward(grad)
            if name == "adam":  # which takes nothing but sparse gradients
                slope, rows = embedding.weight.grad, ids.unique()
                assert slope is not None
                embedding.weight.grad = torch.sparse_coo_tensor(
                    rows.unsqueeze(0), slope[rows], slope.shape
                )
            optimizer.step()
        assert torch.equal(embedding.weight.data, after), name


def test_rows_begin_alike_on_any_number_of_servers_in_any_order_and_again_after_eviction() -> None:
    every = torch.arange(-100, 100)

    def go(servers: int) -> tuple[Tensor, Tensor]:
        cluster = ps.connect(server_names(servers))
        table = cluster.table("items", 8, ps.SGD(lr=1.0), init=INIT, evict=ps.UnusedFor(steps=2))
        first = table.pull(every)
        order = torch.randperm(200, generator=torch.Generator().manual_seed(servers))
        assert torch.equal(table.pull(every[order]), first[order])
        table.push(every, torch.ones(200, 8))
        assert torch.equal(table.pull(every), first - 1)
        kept = _rows_and_bytes(cluster)
        table.pull(torch.arange(1000, 2000))  # creates nothing
        assert _rows_and_bytes(cluster) == kept
        for _ in range(3):
            table.push(torch.tensor([5000]), torch.ones(1, 8))
        again = table.pull(every)
        table.push(every, torch.ones(200, 8))
        assert torch.equal(table.pull(every), first - 1)
        return first, again

    first, again = train([go], 1, servers=1)[0]
    for servers in (2, 7):
        for rows in train([go], servers, servers=servers)[0]:
            assert torch.equal(rows, first)
    assert torch.equal(again, first)


def _rows_and_bytes(cluster: ps.Cluster) -> list[tuple[int, int]]:
    tables = [shard["tables"]["items"] for shard in _shards(cluster)]
    return [(each["rows"], each["bytes"]) for each in tables]


def _shards(cluster: ps.Cluster) -> list[dict[str, Any]]:
    servers = cluster.stats()["servers"].values()
    return [shard for server in servers for shard in server["shards"].values()]


# --- dense parameters


def _mlp() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(300, 200), nn.ReLU(), nn.Linear(200, 3))


def _fit(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    generator = torch.Generator().manual_seed(9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    for _ in range(8):
        x = torch.randn(16, 300, generator=generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), torch.arange(16) % 3).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        schedule.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.SGD, torch.optim.Adafactor])
def test_dense_parameters_on_three_servers_are_those_of_the_local_optimizer(kind: Any) -> None:
    hyper = {"lr": 0.05, "momentum": 0.9} if kind is torch.optim.SGD else {"lr": 0.05}

    def remote() -> list[Tensor]:
        model = _mlp()
        cluster = ps.connect(server_names(3))
        return _fit(model, ps.Optimizer(cluster, model, dense=kind, **hyper))

    (found,) = train([remote], servers=3)
    local = _mlp()
    for mine, theirs in zip(_fit(local, kind(local.parameters(), **hyper)), found, strict=True):
        assert torch.equal(mine, theirs)


def test_all_trainers_begin_with_the_values_of_one() -> None:
    def begin(seed: int) -> Callable[..., list[Tensor]]:
        def go() -> list[Tensor]:
            torch.manual_seed(seed)
            model = nn.Linear(4, 4)
            ps.Optimizer(ps.connect(server_names(2), trainers=2), model, dense=torch.optim.SGD)
            return [parameter.detach().clone() for parameter in model.parameters()]

        return go

    one, other = train([begin(1), begin(2)], servers=2)
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


# --- consistency


def _counting(pushes: int) -> Callable[..., Tensor]:
    """Each push adds one to every row."""

    def go(consistency: Any, servers: int, trainers: int) -> Tensor:
        cluster = ps.connect(server_names(servers), consistency=consistency, trainers=trainers)
        table = cluster.table("counts", 2, ps.SGD(lr=1.0))
        ids = torch.arange(40)
        for _ in range(pushes):
            table.pull(ids[:5])
            table.push(ids, -torch.ones(40, 2))
        cluster.finish()
        return table.pull(ids)

    return go


@pytest.mark.parametrize("consistency", [ps.BSP(ps.Reduce.SUM), ps.SSP(0), ps.SSP(2), ps.Async()])
def test_trainers_with_unequal_numbers_of_steps_finish_and_every_push_counts_once(
    consistency: Any,
) -> None:
    rows = train([_counting(9), _counting(4)], consistency, 2, 2, servers=2)
    assert bool((rows[0] <= 13).all())
    (last,) = train([_counting(9)], consistency, 2, 1, servers=2)
    assert bool((last == 9).all())


def test_what_all_have_pushed_is_there_once_all_have_finished() -> None:
    both = threading.Barrier(2)

    def go(pushes: int) -> Callable[..., Tensor]:
        def run() -> Tensor:
            _counting(pushes)(ps.Async(), 2, 2)
            both.wait(30)
            cluster = ps.connect(server_names(2), consistency=ps.Async(), trainers=2)
            return cluster.table("counts", 2, ps.SGD(lr=1.0)).pull(torch.arange(40))

        return run

    for rows in train([go(9), go(4)], servers=2):
        assert bool((rows == 13).all())


# --- snapshots and resizing


def test_a_snapshot_is_restored_into_another_number_of_servers(tmp_path: Path) -> None:
    def save() -> Tensor:
        cluster = ps.connect(server_names(2))
        table = cluster.table("items", 8, ps.Adam(lr=0.1), init=ps.Uniform(0.1, seed=3))
        for ids, grad in _batches(0):
            table.push(ids, grad)
        cluster.snapshot(tmp_path / "one", extra={"epoch": 3}).wait(30)
        for ids, grad in _batches(1):
            table.push(ids, grad)
        return table.pull(torch.arange(IDS))

    def restore(servers: int) -> Tensor:
        cluster = ps.connect(server_names(servers), restore=tmp_path / "one")
        table = cluster.table("items", 8, ps.Adam(lr=0.1), init=ps.Uniform(0.1, seed=3))
        for ids, grad in _batches(1):
            table.push(ids, grad)
        assert cluster.step == 24
        return table.pull(torch.arange(IDS))

    (rows,) = train([save], servers=2)
    for servers in (1, 3, 5):
        (again,) = train([restore], servers, servers=servers)
        assert torch.equal(rows, again)


def test_dense_parameters_are_restored_onto_more_servers_than_they_have_pieces(
    tmp_path: Path,
) -> None:
    def go(servers: int, restore: Path | None) -> Tensor:
        cluster = ps.connect(server_names(servers), restore=restore)
        model = nn.Linear(2, 1)
        optimizer = ps.Optimizer(cluster, model, dense=torch.optim.Adam)
        if restore is None:
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            cluster.snapshot(tmp_path / "one").wait(30)
        assert optimizer.state_dict()["state"][0]["step"] == 1
        return model.weight.detach().clone()

    (saved,) = train([lambda: go(1, None)], servers=1)
    (restored,) = train([lambda: go(4, tmp_path / "one")], servers=4)
    assert torch.equal(saved, restored)


@pytest.mark.kills
def test_snapshots_under_pushes_are_of_one_point_in_all_of_them(
    tmp_path: Path, request: pytest.FixtureRequest, record_property: Callable[[str, Any], None]
) -> None:
    snapshots = request.config.getoption("--kills")
    done = threading.Event()

    def connected() -> tuple[ps.Cluster, ps.Table, ps.Table]:
        cluster = ps.connect(server_names(2), consistency=ps.Async(), trainers=4)
        counts = cluster.table("counts", 2, ps.SGD(lr=1.0))
        return cluster, counts, cluster.table("moments", 2, ps.Adam(lr=0.1))

    def push() -> None:
        cluster, *tables = connected()
        ids = torch.arange(3000)
        while not done.is_set():
            cluster.push(dict.fromkeys(tables, (ids, -torch.ones(3000, 2))))
        cluster.finish()

    def save() -> None:
        cluster = connected()[0]
        try:
            waiting.until(lambda: any(shard["updates"] for shard in _shards(cluster)))
            for number in range(snapshots):
                folder = tmp_path / str(number)
                cut = sum(cluster.snapshot(folder).wait(60).counts.values())
                ids, rows = ps.read(folder, "counts")
                assert len(ids) == (3000 if cut else 0)
                assert bool((rows == cut).all())
                for column in ("weight", "state.mean", "state.square"):
                    others, values = ps.read(folder, "moments", column)
                    assert torch.equal(others, ids)
                    assert len(values.unique()) <= 1  # so every row has had as many updates
        finally:
            done.set()

    train([*[push] * 4, save], servers=2)
    record_property("times", snapshots)


def test_admission_and_eviction_go_on_at_a_backup_and_after_a_snapshot(tmp_path: Path) -> None:
    hub = MemoryHub()

    def go(begin: int, cut: bool, **how: Any) -> tuple[Tensor, int]:
        cluster = ps.connect(**how)
        rule, init = ps.Adam(lr=0.1), ps.Uniform(0.1, seed=3)
        admit, evict = ps.MinCount(3), ps.UnusedFor(steps=4)
        table = cluster.table("items", 8, rule, init=init, admit=admit, evict=evict)
        for step, (ids, grad) in enumerate(_batches(0, steps=24)[begin:], begin):
            if step == 12 and "restore" not in how:
                cluster.snapshot(tmp_path / f"{cut}").wait(30)
            if step == 13 and cut:
                hub.cut(0)
            table.push(ids, grad)
        rows = table.pull(torch.arange(IDS))
        heads = [shard for shard in _shards(cluster) if shard["head"]]
        return rows, sum(head["tables"]["items"]["rows"] for head in heads)

    two, three = server_names(2), server_names(3)
    (whole,) = train([lambda: go(0, False, servers=two, backups=1)], servers=2)
    with local_group(*two, "trainer0", hub=hub) as agents:
        (orphaned,) = run(agents[2:], [lambda: go(0, True, servers=two, backups=1)])
    restored = {"servers": three, "restore": tmp_path / "False"}
    (again,) = train([lambda: go(12, False, **restored)], servers=3)
    for rows, count in (orphaned, again):
        assert torch.equal(rows, whole[0])
        assert count == whole[1]
    assert 0 < whole[1] < IDS


def test_a_snapshot_is_taken_by_whoever_coordinates_after_the_first_was_lost(
    tmp_path: Path,
) -> None:
    hub = MemoryHub()

    def go() -> None:
        cluster = ps.connect(server_names(2), backups=1)
        cluster.table("items", 8, ps.SGD(lr=0.1))
        coordinator = extend.worker().life_of(server_names(2)[0])
        hub.cut(0)
        waiting.until(lambda: not extend.is_living(coordinator))
        assert cluster.snapshot(tmp_path / "one").wait(30).counts == {}

    with local_group(*server_names(2), "observer", hub=hub) as agents:
        run(agents[2:], [go])


def _held(write: Callable[..., None], shard: int) -> tuple[Callable[..., None], threading.Event]:
    """Returns ``write``, but this shard's part is written only when it may be."""
    may = threading.Event()

    def held(folder: str, number: int, *rest: Any) -> None:
        if number == shard:
            assert may.wait(30)
        write(folder, number, *rest)

    return held, may


def test_a_snapshot_is_taken_again_if_a_shard_goes_before_it_has_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, may = _held(writing.write, 2)
    monkeypatch.setattr(writing, "write", write)

    def go() -> None:
        cluster = ps.connect(server_names(3))
        table = cluster.table("counts", 2, ps.SGD(lr=1.0))
        table.push(torch.arange(IDS), -torch.ones(IDS, 2))
        saving = cluster.snapshot(tmp_path / "one")
        cluster.resize(server_names(2))
        assert not saving.done()
        table.push(torch.arange(IDS), -torch.ones(IDS, 2))
        may.set()
        count = saving.wait(30).counts[0]
        ids, rows = ps.read(tmp_path / "one", "counts")
        assert ids.tolist() == list(range(IDS))
        assert bool((rows == count).all())

    train([go], servers=3)


def test_a_snapshot_that_cannot_be_written_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writing, "write", full)

    def go() -> None:
        cluster = ps.connect(server_names(1))
        cluster.table("items", 8, ps.SGD(lr=0.1))
        with pytest.raises(ps.SnapshotError, match=r"shard 0 could not write.* No space left"):
            cluster.snapshot(tmp_path / "one").wait(30)

    train([go])


def test_servers_come_and_go_while_trainers_push() -> None:
    def go(resizes: bool) -> Callable[..., Tensor]:
        def run() -> Tensor:
            cluster = ps.connect(server_names(2), consistency=ps.Async(), trainers=4)
            table = cluster.table("counts", 2, ps.SGD(lr=1.0))
            ids = torch.arange(400)
            for step in range(30):
                table.push(ids, -torch.ones(400, 2))
                if resizes and step in (8, 20):
                    cluster.resize(server_names(3 if step == 8 else 2))
            cluster.finish()
            return table.pull(ids)

        return run

    def last() -> Tensor:
        rows = go(resizes=True)()
        cluster = ps.connect(server_names(2), consistency=ps.Async(), trainers=4)
        table = cluster.table("counts", 2, ps.SGD(lr=1.0))
        while cluster.stats()["trainers"]:
            pass
        rows = table.pull(torch.arange(400))
        assert [len(s["shards"]) for s in cluster.stats()["servers"].values()] == [1, 1]
        return rows

    rows, *_ = train([last, *[go(resizes=False)] * 3], servers=2, spare=1)
    assert bool((rows == 120).all())


# --- errors


def test_who_is_told_that_all_is_lost_can_leave_though_a_server_never_answers() -> None:
    hub, sent = MemoryHub(), threading.Event()

    def waiting_for_the_other() -> None:
        cluster = ps.connect(server_names(3), trainers=2)
        items = cluster.table("items", 8, ps.SGD(lr=0.1))
        ids = torch.arange(IDS)
        push = Gradients({"items": items.gradient_of(ids, torch.ones(IDS, 8))})
        exchanging = cluster.exchange(push, PullRequest({"items": ids}))
        sent.set()
        with pytest.raises(ps.ServerLostError, match=r"no snapshot to go back to"):
            exchanging.wait()

    def cutting() -> None:
        ps.connect(server_names(3), trainers=2).join()
        assert sent.wait(30)
        hub.cut(1)

    with local_group(*server_names(3), "trainer0", "trainer1", hub=hub) as agents:
        run(agents[3:], [waiting_for_the_other, cutting])
        waiting.until(agents[3].is_quiet)


def test_mistakes_are_told_before_anything_is_sent() -> None:
    def go() -> None:
        cluster = ps.connect(server_names(1))
        table = cluster.table("items", 8, ps.SGD(lr=0.1))
        with pytest.raises(ps.DeclarationError, match=r"dim=8, not 4"):
            cluster.table("items", 4, ps.SGD(lr=0.1))
        with pytest.raises(ps.DeclarationError, match=r"consistency"):
            ps.connect(server_names(1), consistency=ps.Async())
        with pytest.raises(TypeError, match=r"torch.int32, not torch.int64"):
            table.pull(torch.arange(3, dtype=torch.int32))
        with pytest.raises(ValueError, match=r"\(3, 4\), not \(3, 8\)"):
            table.push(torch.arange(3), torch.ones(3, 4))
        with pytest.raises(TypeError, match=r"torch.float64, not torch.float32"):
            table.push(torch.arange(3), torch.ones(3, 8, dtype=torch.float64))
        with pytest.raises(ps.ParameterServerError, match=r"no table 'other' here"):
            cluster.exchange(None, PullRequest({"other": torch.arange(3)}))
        with pytest.raises(ps.ParameterServerError, match=r"no table 'other' here"):
            cluster.exchange(Gradients({"other": (torch.arange(3), torch.ones(3, 8))}), None)
        with pytest.raises(ps.ParameterServerError, match=r"no dense group 'top' here"):
            cluster.exchange(None, PullRequest(dense=("top",)))
        with pytest.raises(ps.GradientError, match=r"table 'items' is not finite"):
            table.push(torch.arange(3), torch.full((3, 8), float("nan")))
        with pytest.raises(ValueError, match=r"\(1, 5\), not \(1, 8\)"):
            cluster.exchange(Gradients({"items": (torch.zeros(1).long(), torch.ones(1, 5))}), None)
        with pytest.raises(TypeError, match=r"torch.float32, not torch.int64"):
            cluster.exchange(None, PullRequest({"items": torch.ones(3)}))
        with pytest.raises(ValueError, match=r"sparse_coo, not dense"):
            table.push(torch.arange(3), torch.ones(3, 8).to_sparse())
        with pytest.raises(TypeError, match=r"from tables .* not dict from str"):
            cluster.push({"items": (torch.arange(3), torch.ones(3, 8))})  # type: ignore[dict-item]
        with pytest.raises(TypeError, match=r"extra=\{1\} is no plain JSON"):
            cluster.snapshot("folder", extra={1})
        with pytest.raises(TypeError, match=r"must be a frozen dataclass"):
            cluster.table("mine", 8, ps.Rule())
        with pytest.raises(ValueError, match=r"a table needs a name"):
            cluster.table("", 8, ps.SGD(lr=0.1))
        with pytest.raises(TypeError, match=r"module=Table.* is a Table, not a ps.Embedding"):
            next(ps.prefetch([1], table, ids=lambda b: b))  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"ids=0 is a int, not a function"):
            next(ps.prefetch([1], ps.Embedding(table), ids=0))  # type: ignore[arg-type]
        assert cluster.step == 0

    train([go])


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ({"servers": None}, r"servers=None must be a list of names"),
        ({"name": 3}, r"name=3 is a int, not a text"),
        ({"restore": 3}, r"restore=3 is a int, not a folder"),
        ({"timeout": "a"}, r"timeout='a' is a str, not a number"),
    ],
)
def test_mistakes_in_connecting_name_the_argument(arguments: dict[str, Any], wanted: str) -> None:
    with pytest.raises(TypeError, match=wanted):
        ps.connect(**{"servers": server_names(1), **arguments})


def test_a_server_that_does_not_come_is_named_beside_those_that_are_there() -> None:
    def go() -> None:
        with pytest.raises(TimeoutError, match=r"'ps9' did not .* in it are ps0, trainer0"):
            ps.connect(["ps0", "ps9"], timeout=0.1)

    train([go])


def test_a_pull_that_a_server_cannot_answer_fails_alone() -> None:
    def go() -> None:
        cluster = ps.connect(server_names(1))
        wide = cluster.table("wide", 1 << 44, ps.SGD(lr=0.1))
        items = cluster.table("items", 8, ps.SGD(lr=0.1), init=ps.Constant(2.0))
        with pytest.raises(ps.ParameterServerError, match=r"shard 0 could not answer a pull"):
            wide.pull(torch.arange(1))
        assert bool((items.pull(torch.arange(3)) == 2.0).all())
        items.push(torch.arange(3), torch.ones(3, 8))

    train([go])


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({"name": 3, "dense": torch.optim.Adam}, r"name=3 is a int, not a text"),
        ({"dense": "adam"}, r"dense='adam' is a str, not a class"),
        ({"lr": 0.1}, r"lr needs dense="),
        ({"tables": ["items"], "dense": torch.optim.Adam}, r"tables='items' is a str, not a table"),
        ({"model": "net", "dense": torch.optim.Adam}, r"model='net' is a str, not a module"),
        ({"dense": torch.optim.SparseAdam}, r"SparseAdam cannot step on servers"),
    ],
)
def test_an_optimizer_refuses_what_it_cannot_step(given: dict[str, Any], wanted: str) -> None:
    def go() -> None:
        with pytest.raises((TypeError, ValueError), match=wanted):
            ps.Optimizer(ps.connect(server_names(1)), **{"model": nn.Linear(2, 1), **given})

    train([go])


def test_pulls_move_no_clock_and_make_nobody_a_trainer() -> None:
    def go() -> tuple[int, int]:
        cluster = ps.connect(server_names(1), trainers=2)  # nobody else ever comes
        table = cluster.table("items", 8, ps.SGD(lr=0.1))
        assert bool((table.pull(torch.arange(3)) == 0).all())
        return cluster.step, cluster.number

    assert train([go]) == [(0, -1)]


def test_a_table_that_a_step_does_not_use_stays_as_it_is() -> None:
    def go() -> tuple[int, int]:
        cluster = ps.connect(server_names(2))
        used, unused = (cluster.table(n, 4, ps.Adam(lr=0.1)) for n in ("used", "unused"))
        cluster.push({used: (torch.arange(5), torch.ones(5, 4))})
        rows = unused.pull(torch.arange(5))
        return cluster.step, int(rows.count_nonzero())

    assert train([go], servers=2) == [(1, 0)]


def test_a_bad_step_is_skipped_or_counted_if_one_wants_that() -> None:
    def go(policy: ps.NanPolicy) -> tuple[int, int, bool]:
        cluster = ps.connect(server_names(1), nans=policy)
        table = cluster.table("items", 2, ps.SGD(lr=0.1))
        table.push(torch.arange(3), torch.full((3, 2), float("inf")))
        finite = bool(torch.isfinite(table.pull(torch.arange(3))).all())
        return cluster.step, cluster.bad_steps, finite

    assert train([lambda: go(ps.NanPolicy.SKIP)]) == [(1, 1, True)]
    assert train([lambda: go(ps.NanPolicy.COUNT)]) == [(1, 1, False)]


def test_a_bad_gradient_on_one_shard_is_refused_by_all(monkeypatch: pytest.MonkeyPatch) -> None:
    gathered: list[int] = []
    dense_push = splitting.dense_push

    def counted(whole: WholeDense, slots: Any, shard: int, buffers: Any) -> Any:
        gathered.append(shard)
        return dense_push(whole, slots, shard, buffers)

    monkeypatch.setattr(splitting, "dense_push", counted)

    def go(policy: ps.NanPolicy) -> tuple[int, int, list[bool]]:
        cluster = ps.connect(server_names(2), nans=policy)
        weights = [nn.Parameter(torch.zeros(1 << 15)) for _ in range(2)]
        optimizer = ps.Optimizer.wrap(torch.optim.SGD(weights, 1.0), cluster)
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        gathered.clear()
        optimizer.step()
        assert gathered == [0, 1]
        weights[1].grad[-1] = torch.nan
        if policy is ps.NanPolicy.RAISE:
            with pytest.raises(ps.GradientError, match=r"parameter 1 of 'model' is not finite"):
                optimizer.step()
            optimizer.skip()
        else:
            optimizer.step()
        found = torch.cat(weights)
        return cluster.step, cluster.bad_steps, (found == -1).unique().tolist()

    for policy, bad in ((ps.NanPolicy.RAISE, 0), (ps.NanPolicy.SKIP, 1)):
        assert train([partial(go, policy)], servers=2) == [(2, bad, [True])]
    assert train([partial(go, ps.NanPolicy.COUNT)], servers=2) == [(2, 1, [False])]


# --- going back


def test_a_roll_back_says_what_it_undid_of_every_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tasks, "PATIENCE", 0.05)
    hub, hand_over = MemoryHub(), [threading.Barrier(3) for _ in range(3)]
    ids = torch.arange(20)

    def go(number: int) -> ps.RolledBack:
        cluster = ps.connect(server_names(2), consistency=ps.Async(), trainers=3)
        table = cluster.table("counts", 2, ps.SGD(lr=1.0))

        def push(times: int) -> None:
            for _ in range(times):
                table.push(ids, -torch.ones(20, 2))

        push(4)
        hand_over[0].wait(30)
        if number == 0:
            cluster.snapshot(tmp_path / "one").wait(30)
        hand_over[1].wait(30)
        push(3 + number)
        if number == 2:
            cluster.finish()
        hand_over[2].wait(30)
        if number == 0:
            hub.cut(1)
        if number == 2:
            return ps.RolledBack(0, {}, "")
        waiting.until(lambda: cluster.session.rollbacks == 1)
        with pytest.raises(ps.RolledBack) as raised:
            push(1)
        assert bool((table.pull(ids) == 12).all())
        return raised.value

    names = [*server_names(2), "trainer0", "trainer1", "trainer2"]
    with local_group(*names, hub=hub) as agents:
        found = run(agents[2:], [partial(go, number) for number in range(3)])
    for error in found[:2]:
        assert error.step == 4
        assert error.lost == {"trainer0": 3, "trainer1": 4, "trainer2": 5}
