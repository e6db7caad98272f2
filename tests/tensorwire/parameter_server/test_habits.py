"""Programs may treat modules and optimizers on servers as those of torch.

Each test is a row of the table "What torch's users do" in the guide to parameter servers.
"""

from __future__ import annotations

import copy
import logging
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.utils.prune
import torch.utils.checkpoint
from torch import Tensor, nn

from tensorwire import parameter_server as ps
from tests.tensorwire.parameter_server.clusters import server_names, train
from tests.tensorwire.parameter_server.habits import (
    IDS,
    in_a_cluster,
    local_like,
    on_servers,
    same_rows,
)

# --- requires_grad_


@pytest.mark.parametrize("how", ["module", "parameter", "before the optimizer"])
def test_frozen_rows_stay_and_move_again_when_they_are_thawed(how: str) -> None:
    def go() -> None:
        cluster, model = on_servers()
        if how == "before the optimizer":
            model.rows.requires_grad_(False)
        optimizer = ps.Optimizer(cluster, model, torch.optim.SGD, lr=0.1)
        if how == "module":
            model.rows.requires_grad_(False)
        elif how == "parameter":
            for parameter in model.rows.parameters():
                parameter.requires_grad = False
        before = model.rows(IDS)
        assert not before.requires_grad
        for _ in range(2):
            optimizer.zero_grad()
            model(IDS).sum().backward()
            optimizer.step()
        assert torch.equal(model.rows(IDS), before)
        model.rows.requires_grad_()
        model(IDS).sum().backward()
        optimizer.step()
        assert not torch.equal(model.rows(IDS), before)

    train([go])


@in_a_cluster
def test_frozen_dense_parameters_stay() -> None:
    cluster, model = on_servers()
    optimizer = ps.Optimizer(cluster, model, torch.optim.SGD, lr=0.1)
    model.top.requires_grad_(False)
    before = copy.deepcopy(model.top.state_dict())
    model(IDS).sum().backward()
    optimizer.step()
    assert all(torch.equal(each, model.top.state_dict()[name]) for name, each in before.items())


# --- optimizers


@pytest.mark.parametrize("kind", ["STEP", "tables alone"])
def test_a_scaler_scales_rows_once(kind: str) -> None:
    def go() -> None:
        cluster, model = on_servers()
        local = local_like(model)
        plain = torch.optim.SGD(local.parameters(), lr=1.0)
        parameters = model.rows.parameters() if kind == "tables alone" else model.parameters()
        wrapped = ps.Optimizer.wrap(torch.optim.SGD(parameters, lr=1.0), cluster)
        for each, optimizer in ((model, wrapped), (local, plain)):
            scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
            for step in range(2):
                optimizer.zero_grad()
                scaler.scale(each(IDS).sum()).backward()
                if step:
                    scaler.unscale_(optimizer)
                    nn.utils.clip_grad_norm_(each.parameters(), 0.5)
                scaler.step(optimizer)
                scaler.update()
        if kind == "STEP":
            assert same_rows(model, local)
            assert torch.equal(model.top.weight, local.top.weight)
        else:
            assert not torch.equal(model.rows(IDS), torch.zeros(3, 4))

    train([go])


@pytest.mark.parametrize("with_model", [False, True])
def test_wrapping_takes_tables_out_of_the_optimizer(with_model: bool) -> None:
    def go() -> None:
        cluster, model = on_servers()
        plain = torch.optim.SGD(model.named_parameters(), lr=0.1)
        wrapped = ps.Optimizer.wrap(plain, cluster, model if with_model else None)
        assert [table.name for table in wrapped.tables] == ["rows"]
        assert [each.shape for each in plain.param_groups[0]["params"]] == [(1, 4), (1,)]
        before = model.rows(IDS)
        model(IDS).sum().backward()
        wrapped.step()
        assert not torch.equal(model.rows(IDS), before)

    train([go])


def test_wrapping_says_that_rows_follow_their_rule(caplog: pytest.LogCaptureFixture) -> None:
    def go() -> None:
        cluster, model = on_servers()
        ps.Optimizer.wrap(torch.optim.SGD(model.parameters(), lr=0.1), cluster)

    with caplog.at_level(logging.WARNING, "tensorwire"):
        train([go])
    assert "table 'rows': rows move by the table's rule, SGD(lr=1.0" in caplog.text


@pytest.mark.parametrize(
    "kind",
    [
        lambda p: torch.optim.SGD(p, lr=0.1),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
        lambda p: torch.optim.Adam(p, lr=0.1),
        lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
        lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
        lambda p: torch.optim.Adagrad(p, lr=0.1),
        lambda p: torch.optim.RMSprop(p, lr=0.1),
        lambda p: torch.optim.Adafactor(p, lr=0.1),
        lambda p: torch.optim.NAdam(p, lr=0.1),
    ],
)
@pytest.mark.parametrize("ids", [torch.tensor([1]), IDS])
def test_an_optimizer_of_torch_alone_is_refused_in_its_first_step(kind: Any, ids: Tensor) -> None:
    def go() -> None:
        _, model = on_servers()
        optimizer = kind(model.parameters())
        model(ids).sum().backward()
        with pytest.raises(RuntimeError, match=r"rows of table 'rows' are on its servers.*ps\.Opt"):
            optimizer.step()

    train([go])


@in_a_cluster
def test_steps_by_hand_are_refused_for_rows() -> None:
    _, model = on_servers()
    model(IDS).sum().backward()
    rows = model.rows.rows
    steps: list[Callable[[Tensor], object]] = [
        lambda grad: rows.sub_(grad),
        lambda grad: rows.__isub__(0.1 * grad),
        lambda grad: rows.copy_(rows - grad),
        lambda grad: rows.add_(grad, alpha=-0.1),
    ]
    with torch.no_grad():
        for step in steps:
            with pytest.raises(RuntimeError, match="rows of table 'rows' are on its"):
                step(rows.grad)


@in_a_cluster
def test_penalties_of_rows_by_hand_are_refused() -> None:
    _, model = on_servers()
    penalties: list[Callable[[Tensor], Tensor]] = [
        lambda p: p.pow(2).sum(),
        lambda p: (p**2).sum(),
        lambda p: p.norm(),
        lambda p: torch.linalg.vector_norm(p, 1),
        lambda p: p.abs().sum(),
    ]
    for penalty in penalties:
        with pytest.raises(RuntimeError, match="compute penalties of what the module returns"):
            sum(penalty(parameter) for parameter in model.parameters())


@in_a_cluster
def test_rows_are_looked_up_outside_transforms_of_functions() -> None:
    _, model = on_servers()
    bags = ps.EmbeddingCollection({"one": model.rows.table})
    losses: list[Callable[[Tensor], Tensor]] = [
        lambda factor: (model(IDS) * factor).sum(),
        lambda factor: (bags({"one": IDS})["one"] * factor).sum(),
    ]
    for loss in losses:
        with pytest.raises(RuntimeError, match=r"'rows' cannot be looked up within torch\.func"):
            torch.func.grad(loss)(torch.ones(()))
    rows = model.rows(IDS)
    parameters = dict(model.top.named_parameters())
    slopes = torch.func.grad(
        lambda values: torch.func.functional_call(model.top, values, (rows,)).sum()
    )(parameters)
    assert torch.allclose(slopes["weight"], rows.sum(0))


@in_a_cluster
def test_looking_at_parameters_is_allowed() -> None:
    cluster, model = on_servers()
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) == 5
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert {p.device.type for p in model.parameters()} == {"cpu"}
    assert next(model.parameters()).shape == (0, 4)
    assert "rows" in repr(model)
    assert "size=(0, 4)" in repr(model.rows.rows) or "tensor(" in repr(model.rows.rows)
    assert nn.utils.parameters_to_vector(model.parameters()).shape == (5,)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.0)
    for _ in range(2):
        assert not any(torch.isnan(p).any() for p in model.parameters())
        model(IDS).sum().backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad = parameter.grad / 2
    with pytest.raises(RuntimeError, match=r"has shape \(2, 4\), not \(5, 4\)"):
        model.rows.rows.grad = torch.ones(5, 4)
    model.to(torch.float32).float().cpu().train()
    optimizer = ps.Optimizer(cluster, model, torch.optim.SGD, lr=0.1)
    optimizer.zero_grad(set_to_none=False)
    assert model.rows.rows.grad is not None
    assert not model.rows.rows.grad.any()
    model.zero_grad()
    assert model.rows.rows.grad is None


# --- schedulers


@pytest.mark.parametrize(
    ("rule", "dense"),
    [
        (ps.SGD(lr=0.1), torch.optim.Adam),
        (ps.SGD(lr=0.1, momentum=0.9), torch.optim.AdamW),
        (ps.Adam(lr=0.1), torch.optim.SGD),
        (ps.FTRL(lr=0.1), torch.optim.Adam),
        (ps.RowwiseAdagrad(lr=0.1), torch.optim.SGD),
        (ps.Adam(lr=0.1), None),
        (ps.SGD(lr=0.1, momentum=0.9), None),
    ],
)
def test_one_cycle_cycles_what_each_rule_has(rule: ps.Rule, dense: Any) -> None:
    def go() -> None:
        cluster, model = on_servers(rule)
        options = {"lr": 0.1, "momentum": 0.9} if dense is torch.optim.SGD else {}
        optimizer = ps.Optimizer(cluster, model, dense, **options)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=5)
        rates = []
        for _ in range(4):
            optimizer.zero_grad()
            model(IDS).sum().backward()
            optimizer.step()
            rates.append(model.rows.table.rule.lr)
            scheduler.step()
        assert len(set(rates)) == 4
        if isinstance(rule, ps.Adam) and dense is None:
            assert model.rows.table.rule.betas[0] != 0.9
        if isinstance(rule, ps.SGD) and rule.momentum and dense is None:
            assert model.rows.table.rule.momentum != 0.9

    train([go])


def test_momentum_of_rows_that_keep_none_stays_as_it_is_and_that_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def go() -> None:
        cluster, model = on_servers(ps.SGD(lr=0.1))
        optimizer = ps.Optimizer(cluster, model, torch.optim.SGD, lr=0.1, momentum=0.9)
        torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=5)
        for _ in range(2):
            model(IDS).sum().backward()
            optimizer.step()
        assert model.rows.table.rule.momentum == 0.0

    with caplog.at_level(logging.WARNING, "tensorwire"):
        train([go])
    assert caplog.text.count("rows keep no state for momentum") == 1


@pytest.mark.parametrize(
    "rule",
    [ps.FTRL(lr=0.1), ps.SGD(lr=0.1), ps.Adam(lr=0.1), ps.Adagrad(lr=0.1), ps.RowwiseAdagrad(0.1)],
)
def test_a_warm_up_may_begin_at_zero(rule: ps.Rule) -> None:
    def go() -> None:
        cluster, model = on_servers(rule)
        optimizer = ps.Optimizer(cluster, model, torch.optim.Adam)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 4)
        before = model.rows(IDS).detach()
        for step in range(3):
            optimizer.zero_grad()
            model(IDS).sum().backward()
            optimizer.step()
            scheduler.step()
            assert torch.equal(model.rows(IDS), before) == (step == 0)
        assert cluster.step == 3
        assert torch.isfinite(model.rows(IDS)).all()

    train([go])


# --- gradients that leave during backward


@in_a_cluster
def test_a_scaler_is_refused_where_gradients_leave_during_backward() -> None:
    cluster, model = on_servers()
    optimizer = ps.Optimizer(cluster, model, torch.optim.SGD, lr=0.1, pushing=ps.Pushing.BACKWARD)
    before = model.top.weight.detach().clone()
    scaler = torch.amp.GradScaler("cpu")
    with pytest.raises(ValueError, match="GradScaler: with pushing="):
        scaler.scale(model(IDS).sum()).backward()
    with pytest.raises(ValueError, match="GradScaler: with pushing="):
        scaler.step(optimizer)
    optimizer.reload()
    assert torch.equal(model.top.weight, before)
    assert cluster.step == 0


# --- hooks


@in_a_cluster
def test_hooks_of_parameters_see_and_change_gradients_of_rows() -> None:
    cluster, model = on_servers()
    optimizer = ps.Optimizer(cluster, model, torch.optim.SGD, lr=0.1)
    seen: list[tuple[int, ...]] = []
    after: list[bool] = []
    handles = [p.register_hook(lambda grad: grad * 2) for p in model.parameters()]
    model.rows.rows.register_hook(lambda grad: seen.append(tuple(grad.shape)))
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: after.append(p.grad is not None))
    before = model.rows(IDS).detach()
    model(IDS[1:2]).sum().backward()
    optimizer.step()
    assert seen == [(1, 4)]
    assert after == [True] * 3
    moved = before - model.rows(IDS).detach()
    assert torch.allclose(moved[1], 2 * torch.arange(1.0, 5))
    for handle in handles:
        handle.remove()
    model(IDS[1:2]).sum().backward()
    assert model.rows.rows.grad is not None
    assert model.rows.rows.grad.abs().max() < 8


@in_a_cluster
def test_hooks_of_optimizers_and_of_states_are_called() -> None:
    cluster, model = on_servers()
    optimizer = ps.Optimizer(cluster, model, torch.optim.Adam)
    called: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: called.append("before a step"))
    optimizer.register_step_post_hook(lambda *_: called.append("after a step"))
    optimizer.register_state_dict_pre_hook(lambda _: called.append("before saving"))
    optimizer.register_state_dict_post_hook(lambda _, state: {**state, "mine": 1})
    optimizer.register_load_state_dict_pre_hook(
        lambda _, state: {k: v for k, v in state.items() if k != "mine"}
    )
    optimizer.register_load_state_dict_post_hook(lambda _: called.append("after loading"))
    model.register_state_dict_post_hook(lambda *_: called.append("a model's state"))
    model(IDS).sum().backward()
    optimizer.step()
    state = optimizer.state_dict()
    assert state["mine"] == 1
    optimizer.load_state_dict(state)
    assert set(model.state_dict()) == {"top.weight", "top.bias"}
    assert called == [
        "before a step", "after a step", "before saving", "after loading", "a model's state"
    ]  # fmt: skip


@in_a_cluster
def test_what_an_optimizer_or_a_module_on_servers_has_not_is_told() -> None:
    cluster, model = on_servers()
    optimizer = ps.Optimizer(cluster, model, torch.optim.SGD)
    for copied in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="cannot be copied or pickled; save its state"):
            copied(optimizer)
    assert not hasattr(model.rows, "weight")
    with pytest.raises(AttributeError, match=r"Embedding has no weight: .* table.pull\(ids\)"):
        model.top.weight = model.rows.weight


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_a_converted_model_looks_rows_up_in_its_dtype(dtype: torch.dtype) -> None:
    def go() -> None:
        cluster, model = on_servers()
        local = local_like(model).to(dtype)
        model = model.to(dtype)
        assert torch.equal(model(IDS), local(IDS))
        optimizer = ps.Optimizer(cluster, model, torch.optim.SGD, lr=0.1)
        before = model.rows.table.pull(IDS)
        model(IDS).sum().backward()
        optimizer.step()
        assert torch.allclose(
            before - model.rows.table.pull(IDS),
            local.top.weight.float() * torch.tensor([[2.0], [1.0], [2.0]]),
        )

    train([go])


# --- loaders


class _Using(torch.utils.data.Dataset[str]):
    """Does in the loader's process what only the worker can do; says what comes of it."""

    def __init__(self, uses: list[Callable[[], Any]]) -> None:
        self.uses = uses

    def __len__(self) -> int:
        return len(self.uses)

    def __getitem__(self, item: int) -> str:
        try:
            self.uses[item]()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "it could be used"


@pytest.mark.slow
def test_a_forked_worker_of_a_loader_that_uses_servers_is_told_at_once() -> None:
    def go() -> None:
        cluster, model = on_servers()
        optimizer = ps.Optimizer(cluster, model, torch.optim.SGD, lr=0.1)
        table = model.rows.table
        uses: list[Callable[[], Any]] = [
            lambda: table.pull(IDS),
            lambda: model(IDS),
            lambda: table.push(IDS, torch.ones(3, 4)),
            lambda: optimizer.state_dict(),
            lambda: optimizer.skip(),
            lambda: cluster.table("other", 4, ps.SGD(lr=1.0)),
            lambda: cluster.stats(),
            lambda: cluster.finish(),
        ]
        loader = torch.utils.data.DataLoader(
            _Using(uses), batch_size=None, num_workers=1, multiprocessing_context="fork", timeout=90
        )
        for told in loader:
            assert told.startswith("AgentClosedError: this process was forked from worker 'trainer")
        assert cluster.step == 0
        assert table.pull(IDS).shape == (3, 4)

    train([go])


@pytest.mark.slow
def test_workers_of_a_loader_may_prepare_ids() -> None:
    def go() -> None:
        cluster, model = on_servers()
        optimizer = ps.Optimizer(cluster, model, torch.optim.SGD, lr=0.1)
        loader = torch.utils.data.DataLoader(
            torch.utils.data.TensorDataset(torch.arange(8)),
            batch_size=2, num_workers=2, multiprocessing_context="fork",
        )  # fmt: skip
        for (ids,) in ps.prefetch(loader, model.rows, ids=lambda batch: batch[0]):
            optimizer.zero_grad()
            model(ids).sum().backward()
            optimizer.step()
        assert cluster.step == 4

    train([go])


# --- collections of tables


@in_a_cluster
def test_one_table_of_a_collection_may_be_frozen_and_the_collection_copied() -> None:
    cluster = ps.connect(server_names(1))
    users, items = (cluster.table(name, 4, ps.SGD(lr=1.0)) for name in ("users", "items"))
    bags = ps.EmbeddingBagCollection({"user": users, "item": items})
    optimizer = ps.Optimizer(cluster, bags)
    batch = {"user": torch.tensor([[1]]), "item": torch.tensor([[2]])}
    frozen = next(p for p in bags.parameters() if p.gradient.table is users)
    for step in range(2):
        frozen.requires_grad_(bool(step))
        for each in (bags, copy.deepcopy(bags)):
            each(batch).values().sum().backward()
        optimizer.step()
        assert users.pull(torch.tensor([1]))[0, 0] == (-2.0 if step else 0.0)
        assert items.pull(torch.tensor([2]))[0, 0] == -2.0 * (step + 1)
    bags.requires_grad_(False)
    assert not bags(batch).values().requires_grad
    other = pickle.loads(pickle.dumps(bags))
    assert torch.equal(other(batch).values(), bags(batch).values())
    bags.requires_grad_()
    bags(batch).values().sum().backward()
    with pytest.raises(RuntimeError, match=r"rows of table '(users|items)' are on its servers"):
        torch.optim.SGD(bags.parameters(), lr=1.0).step()
