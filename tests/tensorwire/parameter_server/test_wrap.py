"""An optimizer that was moved to servers does what it would have done here, to the bit."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tensorwire import parameter_server as ps
from tests.tensorwire.parameter_server.clusters import server_names, train

SERVERS = 3
STEPS = 6

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, 0.01, amsgrad=True),
    "adamw, fused": lambda p: torch.optim.AdamW(p, 0.01, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, 0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 0.01, momentum=0.5),
    "adafactor": lambda p: torch.optim.Adafactor(p, 0.05),
    "nadam": lambda p: torch.optim.NAdam(p, 0.01),
    "own": lambda p: Normalized(p, 0.01),
}


class Normalized(torch.optim.Optimizer):
    """One of a user's own, which looks at whole parameters."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                mean = self.state[parameter].setdefault("mean", torch.zeros_like(parameter))
                mean.lerp_(parameter.grad / parameter.grad.norm(), 0.5)
                parameter.sub_(mean, alpha=group["lr"])


def network() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(60, 400), nn.ReLU(), nn.Linear(400, 3))


def groups(model: nn.Module) -> list[dict[str, Any]]:
    weights = [p for p in model.parameters() if p.dim() > 1]
    return [{"params": weights, "weight_decay": 0.01}, {"params": [p for p in model.parameters()
                                                                   if p.dim() == 1]}]  # fmt: skip


def batches(begin: int, end: int) -> Iterator[tuple[Tensor, Tensor]]:
    for step in range(begin, end):
        r = torch.Generator().manual_seed(step)
        yield torch.randn(16, 60, generator=r), torch.arange(16) % 3


def fit(
    model: nn.Module, optimizer: torch.optim.Optimizer, begin: int = 0, end: int = STEPS
) -> None:
    """Trains with a schedule, clipping, and two backward passes a step."""
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + begin + step))
    for x, y in batches(begin, end):
        optimizer.zero_grad()
        for half in (slice(8), slice(8, 16)):
            (nn.functional.cross_entropy(model(x[half]), y[half]) / 2).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        schedule.step()


def same(one: Any, other: Any) -> bool:
    """True if states are equal to the bit."""
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def test_every_optimizer_has_the_bits_of_its_local_run_and_its_state_goes_both_ways() -> None:
    local = {name: network() for name in OPTIMIZERS}
    optimizers = {name: make(groups(local[name])) for name, make in OPTIMIZERS.items()}
    halfway = {}
    for name, optimizer in optimizers.items():
        fit(local[name], optimizer, 0, 3)
        halfway[name] = copy.deepcopy((local[name].state_dict(), optimizer.state_dict()))
        fit(local[name], optimizer, 3, STEPS)

    def go() -> dict[str, tuple[Any, Any, Any]]:
        cluster = ps.connect(server_names(SERVERS))
        found = {}
        for name, make in OPTIMIZERS.items():
            model = network()
            optimizer = ps.Optimizer.wrap(make(groups(model)), cluster, name=name)
            fit(model, optimizer)
            last = copy.deepcopy(model.state_dict()), optimizer.state_dict()
            weights, state = halfway[name]
            model.load_state_dict(weights)
            optimizer.load_state_dict(state)
            fit(model, optimizer, 3, STEPS)
            found[name] = (*last, model.state_dict())
        return found

    (found,) = train([go], servers=SERVERS)
    for name, (weights, state, again) in found.items():
        assert same(local[name].state_dict(), weights), name
        assert same(_plain(optimizers[name].state_dict()), _plain(state)), name
        assert same(weights, again), name


def _plain(state: dict[str, Any]) -> dict[str, Any]:
    """Without what schedulers put into groups anew."""
    dropped = {"initial_lr"}
    kept = [{k: v for k, v in g.items() if k not in dropped} for g in state["param_groups"]]
    return {**state, "param_groups": kept}


def test_an_optimizer_is_moved_in_the_middle_with_its_state() -> None:
    local = network()
    fit(local, torch.optim.Adam(local.parameters(), 0.01), 0, 0)
    optimizer = torch.optim.Adam(local.parameters(), 0.01)
    fit(local, optimizer)

    def go() -> nn.Module:
        model = network()
        before = torch.optim.Adam(model.parameters(), 0.01)
        fit(model, before, 0, 3)
        after = ps.Optimizer.wrap(before, ps.connect(server_names(2)))
        fit(model, after, 3, STEPS)
        return model

    (model,) = train([go], servers=2)
    assert same(local.state_dict(), model.state_dict())


def test_what_is_set_here_is_set_at_the_servers() -> None:
    other = network()
    with torch.no_grad():
        other[0].weight.mul_(2)
    wanted = copy.deepcopy(other)
    fit(wanted, torch.optim.SGD(wanted.parameters(), 0.1))

    def go() -> nn.Module:
        model = network()
        optimizer = ps.Optimizer.wrap(
            torch.optim.SGD(model.parameters(), 0.1), ps.connect(server_names(2))
        )
        model.load_state_dict(other.state_dict())
        fit(model, optimizer)
        return model

    (model,) = train([go], servers=2)
    assert same(wanted.state_dict(), model.state_dict())


def test_gradients_pushed_during_backward_move_the_same_and_are_freed() -> None:
    local = network()
    _plain_steps(local, torch.optim.AdamW(local.parameters(), 0.01))

    def go() -> tuple[nn.Module, int]:
        model = network()
        cluster = ps.connect(server_names(2))
        optimizer = ps.Optimizer.wrap(
            torch.optim.AdamW(model.parameters(), 0.01), cluster, pushing=ps.Pushing.BACKWARD
        )
        _plain_steps(model, optimizer)
        assert all(parameter.grad is None for parameter in model.parameters())
        return model, cluster.step

    ((model, pushes),) = train([go], servers=2)
    assert same(local.state_dict(), model.state_dict())
    assert pushes == STEPS * len(list(model.parameters()))


def _plain_steps(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for x, y in batches(0, STEPS):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()


def test_a_step_that_a_scaler_skips_is_an_empty_push() -> None:
    def go() -> tuple[int, bool, float]:
        model = network()
        cluster = ps.connect(server_names(1))
        optimizer = ps.Optimizer.wrap(torch.optim.SGD(model.parameters(), 0.1), cluster)
        before = copy.deepcopy(model.state_dict())
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        x, y = next(batches(0, 1))
        scaler.scale(nn.functional.cross_entropy(model(x * float("inf")), y)).backward()
        scaler.step(optimizer)
        scaler.update()
        return cluster.step, same(before, model.state_dict()), scaler.get_scale()

    assert train([go]) == [(1, True, 2.0)]


def test_a_scaled_step_is_the_plain_one() -> None:
    local = network()
    _plain_steps(local, torch.optim.SGD(local.parameters(), 0.1))

    def go() -> nn.Module:
        model = network()
        optimizer = ps.Optimizer.wrap(
            torch.optim.SGD(model.parameters(), 0.1), ps.connect(server_names(1))
        )
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for x, y in batches(0, STEPS):
            optimizer.zero_grad()
            scaler.scale(nn.functional.cross_entropy(model(x), y)).backward()
            scaler.step(optimizer)
            scaler.update()
        return model

    (model,) = train([go])
    assert same(local.state_dict(), model.state_dict())


def test_schedulers_of_before_and_reduce_on_plateau_reach_the_servers() -> None:
    def steps(model: nn.Module, optimizer: Any, schedules: list[Any]) -> None:
        for x, y in batches(0, STEPS):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            schedules[0].step()
            schedules[1].step(1.0)

    def schedules(optimizer: torch.optim.Optimizer) -> list[Any]:
        return [
            torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS),
            torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1),
        ]

    local = network()
    optimizer = torch.optim.SGD(local.parameters(), 0.1)
    steps(local, optimizer, schedules(optimizer))

    def go() -> nn.Module:
        model = network()
        inner = torch.optim.SGD(model.parameters(), 0.1)
        before = schedules(inner)
        wrapped = ps.Optimizer.wrap(inner, ps.connect(server_names(1)))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the scheduler saw no step of its optimizer
            steps(model, wrapped, before)
        return model

    (model,) = train([go])
    assert same(local.state_dict(), model.state_dict())


def test_other_programs_can_make_it_with_parameters_first() -> None:
    local = network()
    _plain_steps(local, torch.optim.AdamW(groups(local), lr=0.01))

    def go() -> nn.Module:
        model = network()
        optimizer = ps.TrainerOptimizer(
            groups(model), inner=torch.optim.AdamW, cluster=ps.connect(server_names(2)), lr=0.01
        )
        _plain_steps(model, optimizer)
        return model

    (model,) = train([go], servers=2)
    assert same(local.state_dict(), model.state_dict())


def test_mistakes_are_told() -> None:
    def go() -> None:
        cluster = ps.connect(server_names(1))
        model = network()
        with pytest.raises(TypeError, match="is a Sequential, not a torch optimizer"):
            ps.Optimizer.wrap(model, cluster)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="LBFGS evaluates the loss several times"):
            ps.Optimizer.wrap(torch.optim.LBFGS(model.parameters()), cluster)
        optimizer = ps.Optimizer.wrap(torch.optim.SGD(model.parameters(), 0.1), cluster)
        with pytest.raises(ValueError, match="cannot be added"):
            optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})

    train([go])
