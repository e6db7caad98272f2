"""Names that should not meet: of models, of clusters, of settings; one error each."""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tensorwire import parameter_server as ps
from tensorwire.parameter_server.declarations.dense_spec import DenseSpec, Spread, describe
from tests.tensorwire.parameter_server.clusters import server_names, train


class Model(nn.Module):
    """A table and a layer."""

    def __init__(self, table: ps.Table) -> None:
        super().__init__()
        self.rows, self.top = ps.Embedding(table), nn.Linear(4, 1)

    def forward(self, ids: Tensor) -> Tensor:
        output: Tensor = self.top(self.rows(ids))
        return output


def _cluster(name: str = "default", **options: Any) -> ps.Cluster:
    return ps.connect(server_names(1), name=name, **options)


def _table(cluster: ps.Cluster, name: str = "items", **options: Any) -> ps.Table:
    return cluster.table(name, dim=4, optimizer=ps.SGD(lr=1.0), **options)


def test_two_models_of_one_trainer_need_two_names() -> None:
    def go() -> None:
        cluster = _cluster()
        one, other = nn.Linear(2, 2), nn.Linear(2, 2)
        before = other.weight.detach().clone()
        makers: list[Callable[..., Any]] = [
            lambda model, **name: ps.Optimizer(cluster, model, torch.optim.SGD, **name),
            lambda model, **name: ps.Optimizer.wrap(
                torch.optim.SGD(model.parameters()), cluster, **name
            ),
            lambda model, **name: ps.TrainerOptimizer(
                model.parameters(), inner=torch.optim.SGD, cluster=cluster, **name
            ),
            lambda model, name="model": cluster.dense(name, torch.optim.SGD(model.parameters())),
        ]
        makers[0](one)
        for make in makers:
            with pytest.raises(ps.DeclarationError, match="'model' names the dense parameters of"):
                make(other)
            make(one)  # the same model once more is no other
            assert torch.equal(other.weight, before)
        assert not torch.equal(one.weight, other.weight)
        makers[0](other, name="other")
        assert torch.equal(other.weight, before)
        cluster.release("model")
        makers[0](other)
        assert torch.equal(other.weight, one.weight)

    train([go])


def test_a_name_is_free_again_when_its_model_is_gone() -> None:
    def go() -> None:
        cluster = _cluster()
        model = nn.Linear(2, 2)
        optimizer = ps.Optimizer(cluster, model, torch.optim.SGD)
        weight = model.weight.detach().clone()
        torch.optim.lr_scheduler.StepLR(optimizer, 1)  # which puts the optimizer into a cycle
        del model, optimizer
        model = nn.Linear(2, 2)
        ps.Optimizer(cluster, model, torch.optim.SGD)
        assert torch.equal(model.weight, weight)

    train([go])
    gc.collect()


def test_tables_of_another_cluster_are_refused_before_anything_moves() -> None:
    def go() -> None:
        one, other = _cluster("one"), _cluster("other")
        mine, theirs = _table(one), _table(other)
        ids, grad = torch.tensor([1]), torch.ones(1, 4)
        model = nn.ModuleList([ps.Embedding(mine), ps.Embedding(theirs), nn.Linear(4, 1)])
        message = r"'items' is of Cluster\('other'.*, not of Cluster\('one'"
        plain = torch.optim.SGD(model[1].parameters(), lr=1.0)
        for wrong in (
            lambda: ps.Optimizer(one, model, torch.optim.SGD),
            lambda: ps.Optimizer(one, tables=[theirs]),
            lambda: ps.Optimizer.wrap(torch.optim.SGD(model[2].parameters()), one, model),
            lambda: ps.Optimizer.wrap(plain, one),
            lambda: one.push({theirs: (ids, grad)}),
            lambda: one.push({mine: (ids, grad), theirs: (ids, grad)}),
        ):
            with pytest.raises(ValueError, match=message):
                wrong()
        with pytest.raises(ValueError, match="the modules' tables are of 2 clusters"):
            next(ps.prefetch([ids], model[0], model[1], ids=lambda batch: (batch, batch)))
        for table in (mine, theirs):
            assert not table.pull(ids).any()
        assert one.step == other.step == 0
        optimizers = ps.Optimizer(one, tables=[mine]), ps.Optimizer(other, tables=[theirs])
        (model[0](ids) - 2 * model[1](ids)).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
        assert [table.pull(ids)[0, 0].item() for table in (mine, theirs)] == [-1.0, 2.0]

    train([go])


def test_a_table_has_one_cache() -> None:
    def go() -> None:
        cluster = _cluster()
        table = _table(cluster, cache=ps.Cache(10, 1))
        assert _table(cluster, cache=ps.Cache(10, 1)) is table
        for other in (None, ps.Cache(10, 2)):
            with pytest.raises(ps.DeclarationError, match=r"'items' was declared .* cache=Cache"):
                _table(cluster, cache=other)

    train([go])


def test_a_parameter_group_for_a_table_alone_says_what_its_rule_says() -> None:
    def go() -> None:
        cluster = _cluster()
        model = nn.ModuleDict({"rows": ps.Embedding(_table(cluster)), "top": nn.Linear(4, 1)})
        groups = [
            {"params": model["rows"].parameters(), "lr": 5.0},
            {"params": model["top"].parameters()},
        ]
        with pytest.raises(ValueError, match=r"group 0 is for table 'items'.*SGD\(lr=1.0.*lr=5.0"):
            ps.Optimizer.wrap(torch.optim.SGD(groups, lr=0.1), cluster)
        with pytest.raises(ValueError, match=r"group 0 is for table 'items'"):
            ps.TrainerOptimizer(model["rows"].parameters(), inner=torch.optim.SGD, cluster=cluster)
        assert cluster.number < 0  # nothing was declared, nobody joined
        groups = [
            {"params": model["rows"].parameters(), "lr": 1.0},
            {"params": model["top"].parameters()},
        ]
        optimizer = ps.Optimizer.wrap(torch.optim.SGD(groups, lr=0.1), cluster)
        ids = torch.tensor([1])
        model["top"].weight.data.fill_(1.0)
        optimizer.upload()
        model["top"](model["rows"](ids)).sum().backward()
        optimizer.step()
        assert model["rows"](ids)[0, 0].item() == -1.0

    train([go])


@pytest.mark.parametrize("consistency", [ps.BSP(), ps.Async()])
def test_trainers_that_step_together_say_the_same_of_the_steps(consistency: Any) -> None:
    first_has_declared = threading.Event()

    def first() -> None:
        cluster = ps.connect(server_names(1), trainers=2, consistency=consistency)
        optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
        spec = cluster.declare_dense("model", optimizer)
        first_has_declared.set()
        cluster.join()
        cluster.load_dense(spec, optimizer)

    def second() -> str:
        cluster = ps.connect(server_names(1), trainers=2, consistency=consistency)
        model = nn.Linear(2, 2)
        assert first_has_declared.wait(60)
        try:
            ps.Optimizer(cluster, model, torch.optim.SGD, lr=0.2)
        except ps.DeclarationError as error:
            assert cluster.number < 0, "nobody waits for its pushes"
            ps.Optimizer(cluster, model, torch.optim.SGD, lr=0.1)
            return str(error)
        return ""

    told = train([first, second])[1]
    if isinstance(consistency, ps.Async):
        assert not told
    else:
        assert "declared otherwise before: parameter group 0: lr=0.1, not 0.2" in (told or "")


def test_rates_that_drift_apart_between_trainers_are_told(caplog: pytest.LogCaptureFixture) -> None:
    def go(factor: float) -> Callable[[], None]:
        def steps() -> None:
            cluster = ps.connect(server_names(1), trainers=2)
            model = Model(_table(cluster))
            optimizer = ps.Optimizer(cluster, model, torch.optim.SGD, lr=0.1)
            scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: factor**step)
            for _ in range(3):
                optimizer.zero_grad()
                model(torch.tensor([1])).sum().backward()
                optimizer.step()
                scheduler.step()

        return steps

    with caplog.at_level(logging.WARNING, "tensorwire"):
        train([go(1.0), go(0.5)])
    told = [each.message for each in caplog.records if "different hyper-" in each.message]
    assert len(told) == 2
    assert {message.partition("give ")[2].split()[0] for message in told} == {"items", "model"}


def test_a_trainer_that_comes_back_with_a_scheduled_rate_declares_the_same() -> None:
    def spec(lr: float, **scheduled: float) -> DenseSpec:
        group = {"params": [torch.zeros(2)], "lr": lr, **scheduled}
        return describe("model", torch.optim.SGD([group], momentum=0.9), Spread.ELEMENTS)

    assert spec(0.1).other_steps(spec(0.01, initial_lr=0.1)) == []
    assert spec(0.05, initial_lr=0.1).other_steps(spec(0.1)) == []
    assert spec(0.1).other_steps(spec(0.1, momentum=0.8)) == [
        "parameter group 0: momentum=0.8, not 0.9"
    ]
    assert spec(0.1).other_steps(spec(0.1, initial_lr=0.2)) == [
        "parameter group 0: lr=0.2, not 0.1"
    ]
