"""A step on servers has the bits of one without, in all the ways in which programs make steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.utils.prune
import torch.utils.checkpoint
from torch import nn
from torch.optim import lr_scheduler as schedulers

from tensorwire import parameter_server as ps
from tests.tensorwire.parameter_server.clusters import train
from tests.tensorwire.parameter_server.habits import (
    IDS,
    Model,
    local_like,
    on_servers,
    same_rows,
)


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
