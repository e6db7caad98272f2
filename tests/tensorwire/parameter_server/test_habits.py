"""Programs may treat modules and optimizers on servers as those of torch.

Each test is a row of the table "What torch's users do" in the guide to parameter servers.
"""

from __future__ import annotations

import copy
import io
import logging
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.utils.prune
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.optim import lr_scheduler as schedulers

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


# --- values that are set here


def _set_clamped(layer: nn.Linear, values: Tensor) -> None:
    layer.weight.data.clamp_(max=0.0).add_(values)


def _set_data(layer: nn.Linear, values: Tensor) -> None:
    layer.weight.data = values.clone()


def _set_by_vector(layer: nn.Linear, values: Tensor) -> None:
    vector = torch.cat([values.flatten(), layer.bias.detach()])
    nn.utils.vector_to_parameters(vector, layer.parameters())


def _set_through_numpy(layer: nn.Linear, values: Tensor) -> None:
    layer.weight.detach().numpy()[:] = values.numpy()


def _set_storage(layer: nn.Linear, values: Tensor) -> None:
    with torch.no_grad():
        layer.weight.set_(values.clone())


def _set_by_foreach(layer: nn.Linear, values: Tensor) -> None:
    torch._foreach_copy_([layer.weight.data], [values])


def _set_one_element(layer: nn.Linear, values: Tensor) -> None:
    layer.weight.data[:, :3] = values[:, :3]
    layer.weight.data[0, 3] = values[0, 3]


def _set_by_state(layer: nn.Linear, values: Tensor) -> None:
    layer.load_state_dict({"weight": values, "bias": layer.bias.detach()})


def _set_by_init(layer: nn.Linear, values: Tensor) -> None:
    nn.init.constant_(layer.weight, float(values[0, 0]))


_SETTERS = [
    _set_clamped,
    _set_data,
    _set_by_vector,
    _set_through_numpy,
    _set_storage,
    _set_by_foreach,
    _set_one_element,
    _set_by_state,
    _set_by_init,
]


@pytest.mark.parametrize("pushing", ps.Pushing)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_values_that_are_set_here_in_any_way_are_set_at_the_servers(
    pushing: ps.Pushing, dtype: torch.dtype
) -> None:
    def go() -> None:
        cluster = ps.connect(server_names(1))
        layer = nn.Linear(4, 1, bias=True, dtype=dtype)
        view = layer.weight.data  # taken before anybody knows of servers
        optimizer = ps.Optimizer(cluster, layer, torch.optim.SGD, lr=1.0, pushing=pushing)
        x = torch.ones(1, 4, dtype=dtype)

        def stepped() -> Tensor:
            optimizer.zero_grad()
            layer(x).sum().backward()
            optimizer.step()
            return layer.weight.detach()

        stepped()
        view.copy_(torch.full((1, 4), 8.0))
        assert torch.equal(stepped(), torch.full((1, 4), 7.0, dtype=dtype))
        for setter in _SETTERS:
            if setter is _set_through_numpy and dtype is torch.bfloat16:
                continue  # NumPy has no such numbers
            layer.weight.data.zero_()
            values = torch.full((1, 4), 5.0, dtype=dtype)
            setter(layer, values)
            assert torch.equal(stepped(), values - 1), setter
        layer.weight.data.neg_()
        assert torch.equal(stepped(), torch.full((1, 4), -5.0, dtype=dtype))

    train([go])


@in_a_cluster
def test_a_model_that_changes_its_dtype_under_its_optimizer_is_refused() -> None:
    cluster, model = on_servers()
    optimizer = ps.Optimizer(cluster, model, torch.optim.SGD, lr=0.1)
    model.double()
    with pytest.raises(
        ValueError, match=r"parameter 0 of 'model' became torch.float64 .* keep torch"
    ):
        optimizer.step()
    assert cluster.step == 0


# --- copies


@in_a_cluster
def test_a_copy_reads_the_same_rows_and_is_frozen_by_itself() -> None:
    cluster, model = on_servers()
    optimizer = ps.Optimizer(cluster, model, torch.optim.SGD, lr=0.1)
    target = copy.deepcopy(model).requires_grad_(False)
    assert torch.equal(target(IDS), model(IDS))
    assert model.rows.rows.requires_grad
    for _ in range(2):
        optimizer.zero_grad()
        (model(IDS) - target(IDS).detach() - 1).square().sum().backward()
        optimizer.step()
    assert torch.equal(target.rows(IDS), model.rows(IDS))
    assert not torch.equal(target.top.weight, model.top.weight)


def _through_pickle(model: Model) -> Any:
    return pickle.loads(pickle.dumps(model))


def _through_save(model: Model) -> Any:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, _through_pickle, _through_save])
def test_a_model_that_was_copied_or_pickled_trains_the_same_rows(copied: Any) -> None:
    def go() -> None:
        cluster, model = on_servers()
        model.again = model.rows
        other = copied(model)
        assert other.again is other.rows
        assert other.rows.table is model.rows.table
        assert len(list(other.parameters())) == len(list(model.parameters()))
        optimizer = ps.Optimizer(cluster, other, torch.optim.SGD, lr=0.1)
        local = local_like(other)
        plain = torch.optim.SGD([{"params": local.rows.parameters(), "lr": 1.0},
                                 {"params": local.top.parameters()}], lr=0.1)  # fmt: skip
        for each, step in ((other, optimizer), (local, plain)):
            each(IDS).sum().backward()
            step.step()
        assert same_rows(other, local)
        assert torch.equal(other.top.weight, local.top.weight)

    train([go])


def test_what_was_pickled_says_which_cluster_it_needs() -> None:
    pickled = []

    def go() -> None:
        pickled.append(pickle.dumps(on_servers()[1]))

    def load() -> None:
        with pytest.raises(ps.ParameterServerError, match=r"call ps.connect\(..., name='default'"):
            pickle.loads(pickled[0])
        on_servers()
        assert pickle.loads(pickled[0])(IDS).shape == (3, 1)

    train([go])
    train([load])


@pytest.mark.parametrize(
    "averaging",
    [
        {},
        {"multi_avg_fn": torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)},
        {"avg_fn": torch.optim.swa_utils.get_ema_avg_fn(0.9), "use_buffers": True},
    ],
    ids=["mean", "ema", "ema with buffers"],
)
def test_averaged_models_average_dense_parameters_and_read_rows_as_they_are(averaging: Any) -> None:
    def go() -> None:
        cluster, model = on_servers()
        optimizer = ps.Optimizer(cluster, model, torch.optim.SGD, lr=0.1)
        local = local_like(model)
        plain = torch.optim.SGD([{"params": local.rows.parameters(), "lr": 1.0},
                                 {"params": local.top.parameters()}], lr=0.1)  # fmt: skip
        average, wanted = (
            torch.optim.swa_utils.AveragedModel(each, **averaging) for each in (model, local)
        )
        for _ in range(3):
            for each, step, kept in ((model, optimizer, average), (local, plain, wanted)):
                step.zero_grad()
                each(IDS).sum().backward()
                kept.update_parameters(each)  # with gradients there, as some do
                step.step()
                kept.update_parameters(each)
        assert torch.equal(average.module.top.weight, wanted.module.top.weight)
        assert torch.equal(average.module.rows(IDS), model.rows(IDS))
        torch.optim.swa_utils.update_bn([IDS], average)

    train([go])


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


# --- everything else: the same steps on servers as without


def trained_alike(
    change: Callable[[Model], Any] = lambda model: None,
    schedule: Callable[[Any], Any] | None = None,
    step: Callable[[Any, Any], None] | None = None,
    rule: ps.Rule | None = None,
    steps: int = 5,
    **options: Any,
) -> None:
    """Trains a model on a server and the same one without, and compares all values to the bit.

    Args:
        change: done to both models before they train.
        schedule: makes a scheduler of an optimizer.
        step: one step of training, of a model and its optimizer.
        rule: of the rows; default SGD.
        steps: how many.
        options: of ``torch.optim.SGD``.
    """
    rule = rule or ps.SGD(lr=0.5)
    given = {"lr": rule.lr, **options}

    def run(model: Any, optimizer: Any) -> None:
        scheduler = None if schedule is None else schedule(optimizer)
        for _ in range(steps):
            optimizer.zero_grad()
            if step is None:
                model(IDS).square().sum().backward()
            else:
                step(model, optimizer)
            optimizer.step()
            if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
                scheduler.step(1.0)
            elif scheduler is not None:
                scheduler.step()

    def go() -> None:
        cluster, model = on_servers(rule)
        local = local_like(model)
        for each in (model, local):
            change(each)
        run(local, torch.optim.SGD(local.parameters(), **given))
        run(model, ps.Optimizer(cluster, model, torch.optim.SGD, **given))
        assert same_rows(model, local)
        wanted = local.top.state_dict()
        assert all(torch.equal(each, wanted[name]) for name, each in model.top.state_dict().items())

    train([go])


def _chained(optimizer: Any) -> Any:
    return schedulers.ChainedScheduler(
        [schedulers.ConstantLR(optimizer, 0.5, 2), schedulers.ExponentialLR(optimizer, 0.9)]
    )


def _in_sequence(optimizer: Any) -> Any:
    parts = [schedulers.LinearLR(optimizer, 0.1, total_iters=2), schedulers.StepLR(optimizer, 1)]
    return schedulers.SequentialLR(optimizer, parts, milestones=[2])


@pytest.mark.filterwarnings("ignore:The epoch parameter in:UserWarning")  # SequentialLR's own
@pytest.mark.parametrize(
    "schedule",
    [
        lambda o: schedulers.LambdaLR(o, lambda step: 1 / (1 + step)),
        lambda o: schedulers.MultiplicativeLR(o, lambda step: 0.9),
        lambda o: schedulers.StepLR(o, 2),
        lambda o: schedulers.MultiStepLR(o, [1, 3]),
        lambda o: schedulers.ConstantLR(o, 0.5, 2),
        lambda o: schedulers.LinearLR(o, 0.1, total_iters=3),
        lambda o: schedulers.ExponentialLR(o, 0.9),
        lambda o: schedulers.CosineAnnealingLR(o, 5),
        lambda o: schedulers.PolynomialLR(o, 5),
        lambda o: schedulers.CosineAnnealingWarmRestarts(o, 2),
        lambda o: schedulers.CyclicLR(o, 0.01, 0.1, 2),
        lambda o: schedulers.OneCycleLR(o, 0.1, total_steps=6),
        lambda o: schedulers.ReduceLROnPlateau(o, patience=0),
        _chained,
        _in_sequence,
        lambda o: torch.optim.swa_utils.SWALR(o, 0.01, 2),
    ],
)
def test_every_scheduler_reaches_rows_and_dense_parameters(schedule: Any) -> None:
    trained_alike(schedule=schedule, rule=ps.SGD(lr=0.05, momentum=0.9), momentum=0.9)


def _clipped_by_norm(model: Any, optimizer: Any) -> None:
    model(IDS).square().sum().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)


def _clipped_by_value(model: Any, optimizer: Any) -> None:
    model(IDS).square().sum().backward()
    nn.utils.clip_grad_value_(model.parameters(), 0.2)


def _accumulated(model: Any, optimizer: Any) -> None:
    for ids in (IDS, IDS[:1]):
        (model(ids).square().sum() / 2).backward()


def _checkpointed(model: Any, optimizer: Any) -> None:
    checkpointed = torch.utils.checkpoint.checkpoint
    checkpointed(model, IDS, use_reentrant=False).square().sum().backward()


def _in_bfloat16(model: Any, optimizer: Any) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(IDS).square().sum()
    loss.backward()


def _as_a_function(model: Any, optimizer: Any) -> None:
    parameters = dict(model.named_parameters())
    torch.func.functional_call(model, parameters, (IDS,)).square().sum().backward()


def _with_a_penalty(model: Any, optimizer: Any) -> None:
    rows = model.rows(IDS)
    (model.top(rows).square().sum() + 0.1 * rows.square().sum()).backward()


def _twice_differentiated(model: Any, optimizer: Any) -> None:
    loss = model(IDS).square().sum()
    (slope,) = torch.autograd.grad(loss, model.top.weight, create_graph=True)
    slope.square().sum().backward()


@pytest.mark.parametrize(
    "step",
    [
        _clipped_by_norm,
        _clipped_by_value,
        _accumulated,
        _checkpointed,
        _in_bfloat16,
        _as_a_function,
        _with_a_penalty,
        _twice_differentiated,
    ],
)
def test_a_step_may_be_made_in_every_way(step: Any) -> None:
    trained_alike(step=step, rule=ps.SGD(lr=0.01))


def _with_spectral_norm(model: Model) -> None:
    torch.manual_seed(1)
    nn.utils.parametrizations.spectral_norm(model.top)


@pytest.mark.parametrize(
    "change",
    [
        lambda model: nn.utils.parametrizations.weight_norm(model.top),
        _with_spectral_norm,
        lambda model: nn.utils.parametrize.register_parametrization(
            model.top, "weight", nn.Softplus(), unsafe=True
        ),
        lambda model: torch.nn.utils.prune.l1_unstructured(model.top, "weight", 0.5),
        lambda model: model.top.register_full_backward_hook(lambda *_: None),
        lambda model: model.rows.register_forward_hook(lambda module, given, out: out * 2),
        lambda model: model.register_forward_pre_hook(lambda module, given: (given[0].flip(0),)),
    ],
    ids=["weight norm", "spectral norm", "parametrized", "pruned", "hook", "forward hook",
         "pre hook"],
)  # fmt: skip
def test_modules_may_be_changed_in_every_way(change: Any) -> None:
    trained_alike(change, rule=ps.SGD(lr=0.01))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_a_compiled_model_trains_alike() -> None:
    def step(model: Any, optimizer: Any) -> None:
        compiled = torch.compile(model, backend="eager")
        compiled(IDS).square().sum().backward()

    trained_alike(step=step, rule=ps.SGD(lr=0.01), steps=2)


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
