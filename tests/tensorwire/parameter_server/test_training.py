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

from rpc.testing import MemoryHub, local_group
from tensorwire import parameter_server as ps
from tensorwire.parameter_server import kernels
from tensorwire.parameter_server.client import splitting
from tensorwire.parameter_server.client.exchange import Gradients, PullRequest
from tensorwire.parameter_server.client.splitting import WholeDense
from tensorwire.parameter_server.decisions import tasks
from tensorwire.parameter_server.declarations.spec import TableSpec
from tensorwire.parameter_server.storage.table import Part, TableShard
from tests import waiting
from tests.tensorwire.parameter_server.clusters import run, server_names, train
from tests.tensorwire.parameter_server.training import (
    IDS,
    batches_of,
    shards_of,
)

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
    table = TableShard(TableSpec("items", 8, rule, INIT), kernels.kernels())
    steps = zip(batches_of(0), batches_of(1), strict=True)
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
            for ids, grad in batches_of(trainer):
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
    every, batches = torch.arange(IDS), batches_of(0, steps=200)

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
    tables = [shard["tables"]["items"] for shard in shards_of(cluster)]
    return [(each["rows"], each["bytes"]) for each in tables]


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
        with pytest.raises(TypeError, match=r"extra=nan is no plain JSON"):
            cluster.snapshot("folder", extra=float("nan"))
        with pytest.raises(ValueError, match=r"snapshot: folder='' must have at least one char"):
            cluster.snapshot("", overwrite=True)
        for servers, error in (((each for each in "ab"), TypeError), ({"ps0"}, TypeError),
                               ([""], ValueError)):  # fmt: skip
            with pytest.raises(error, match=r"resize: servers=.* must be (a list|at least one)"):
                cluster.resize(servers)  # type: ignore[arg-type]
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
        ({"servers": (each for each in ["ps0"])}, r"servers=<generator .* must be a list of names"),
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
