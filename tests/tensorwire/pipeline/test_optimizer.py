"""An optimizer over all stages does what one over the whole model does in one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from tensorwire.pipeline import GradScaler, Pipeline
from tests.tensorwire.pipeline.reference import Reference, gradients, group, place

_X, _Y = torch.rand(6, 4), torch.rand(6, 2)


def _modules() -> list[nn.Module]:
    torch.manual_seed(3)
    return [
        nn.Linear(4, 5),
        nn.Sequential(nn.Tanh(), nn.LayerNorm(5), nn.Linear(5, 5)),
        nn.Linear(5, 2),
    ]


def _require_equal(pipe: Pipeline, modules: Sequence[nn.Module]) -> None:
    for stage, module in zip(pipe.stages, modules, strict=True):
        state = stage.state_dict()
        for name, value in module.state_dict().items():
            assert torch.equal(state[name], value), name


def _decay(name: str, parameter: nn.Parameter) -> dict[str, Any]:
    return {"weight_decay": 0.5} if parameter.ndim > 1 and not name.startswith("0.") else {}


def _local(modules: Sequence[nn.Module]) -> torch.optim.Optimizer:
    named = [(f"{i}.{n}", p) for i, m in enumerate(modules) for n, p in m.named_parameters()]
    groups: list[dict[str, Any]] = [{"params": []}, {"params": [], "weight_decay": 0.5}]
    for name, parameter in named:
        groups[len(_decay(name, parameter))]["params"].append(parameter)
    return torch.optim.AdamW(groups, lr=0.1, weight_decay=0.0)


def test_training_with_a_scheduler_and_clipping_is_that_of_one_process() -> None:
    modules = _modules()
    parameters = [p for module in modules for p in module.parameters()]
    with group("a", "b"):
        pipe = Pipeline(place(modules, "aba"), "gpipe", 3, nn.MSELoss())
        optimizer = pipe.optimizer(torch.optim.AdamW, groups=_decay, lr=0.1, weight_decay=0.0)
        local = _local(modules)
        schedulers = [torch.optim.lr_scheduler.CosineAnnealingLR(o, 4) for o in (optimizer, local)]
        reference = Reference(modules, nn.MSELoss())
        for step in range(4):
            pipe.train_step(_X, target=_Y)
            reference.train_step(pipe.table(), _X.chunk(3), _Y.chunk(3), step)
            norm = pipe.clip_grad_norm_(0.3)
            assert torch.equal(norm, nn.utils.clip_grad_norm_(parameters, 0.3))
            for each in (optimizer, local, *schedulers):
                each.step()
            optimizer.zero_grad()
            local.zero_grad()
            _require_equal(pipe, modules)
        assert [each["lr"] for each in optimizer.param_groups] == [0.0, 0.0]
        assert gradients(pipe.stages[1]) == [None] * 4


def test_state_goes_on_in_a_pipeline_on_other_workers() -> None:
    modules = _modules()
    with group("a", "b", "c"):
        pipe = Pipeline(place(modules, "abc"), "gpipe", 3, nn.MSELoss())
        optimizer = pipe.optimizer(torch.optim.Adam, lr=0.1)
        for _ in range(2):
            pipe.train_step(_X, target=_Y)
            optimizer.step()
            optimizer.zero_grad()
        optimizer.param_groups[0]["lr"] = 0.01

        other = Pipeline(place(_modules(), "baa"), "1f1b", 3, nn.MSELoss())
        continued = other.optimizer(torch.optim.Adam, lr=0.1)
        other.load_state_dict(pipe.state_dict())
        continued.load_state_dict(optimizer.state_dict())
        assert set(continued.state_dict()["state"]) == set(pipe.state_dict())
        for one, its in ((pipe, optimizer), (other, continued)):
            one.train_step(_X, target=_Y)
            its.step()
        for name, value in pipe.state_dict().items():
            assert torch.equal(value, other.state_dict()[name])

        with pytest.raises(RuntimeError, match=r"no stage has .*\['9.x'\]"):
            pipe.load_state_dict({**pipe.state_dict(), "9.x": torch.ones(1)})


class _Overflows(nn.Module):
    """Its gradient is infinite in one call."""

    def __init__(self, call: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.calls, self.call = 0, call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        output = x * self.weight
        return output * torch.inf if self.calls == self.call else output


def test_one_infinite_gradient_skips_the_step_of_all_stages() -> None:
    modules: list[nn.Module] = [nn.Linear(4, 2), _Overflows(3)]
    parameters = [p for module in modules for p in module.parameters()]
    with group("a", "b"):
        pipe = Pipeline(place(modules, "ab"), "gpipe", 1, nn.MSELoss())
        optimizer = pipe.optimizer(torch.optim.SGD, lr=0.1)
        local = torch.optim.SGD(parameters, lr=0.1)
        options: dict[str, Any] = {"init_scale": 8.0, "growth_interval": 2}
        scaler, torchs = GradScaler(pipe, **options), torch.amp.GradScaler("cpu", **options)
        for _ in range(4):
            scale = scaler.get_scale()
            assert scale == torchs.get_scale()
            pipe.train_step(_X, target=_Y, scale=scale)
            torchs.scale(nn.functional.mse_loss(nn.Sequential(*modules)(_X), _Y)).backward()  # type: ignore[no-untyped-call]
            for each, its in ((scaler, optimizer), (torchs, local)):
                each.step(its)  # type: ignore[arg-type]
                each.update()
                its.zero_grad()
            _require_equal(pipe, modules)
        assert scaler.state_dict() == torchs.state_dict()
        with pytest.raises(RuntimeError, match="needs a step"):
            scaler.update()


def test_what_is_shared_counts_once_in_the_norm_and_stays_equal() -> None:
    modules = _modules()
    with group("a", "b", "c"):
        first, middle, last = place([modules[0], modules[1], modules[2]], "abc")
        (replica,) = place([modules[1]], "c")
        pipe = Pipeline([first, [middle, replica], last], "gpipe", 2, nn.MSELoss())
        optimizer = pipe.optimizer(torch.optim.SGD, lr=0.1)
        pipe.train_step(_X, target=_Y)
        reference = Reference(modules, nn.MSELoss())
        reference.train_step(pipe.table(), _X.chunk(2), _Y.chunk(2))
        parameters = [p for module in modules for p in module.parameters()]
        norm = nn.utils.clip_grad_norm_(parameters, 1e9)
        assert torch.allclose(pipe.clip_grad_norm_(1e9), norm)
        optimizer.step()
        one, two = middle.state_dict(), replica.state_dict()
        assert all(torch.equal(one[name], two[name]) for name in one)


def test_gradients_add_up_until_they_are_cleared() -> None:
    modules = _modules()
    with group("a", "b", "c"):
        pipe = Pipeline(place(modules, "abc"), "gpipe", 2, nn.MSELoss())
        optimizer = pipe.optimizer(torch.optim.SGD, lr=0.1)
        for step in range(3):
            pipe.train_step(_X, target=_Y, scale=1 / 3)
            Reference(modules, nn.MSELoss()).train_step(
                pipe.table(), _X.chunk(2), _Y.chunk(2), step
            )
        optimizer.step()
        local = torch.optim.SGD([p for module in modules for p in module.parameters()], lr=0.1 / 3)
        local.step()
        for stage, module in zip(pipe.stages, modules, strict=True):
            for name, value in module.state_dict().items():
                assert torch.allclose(stage.state_dict()[name], value)
        optimizer.zero_grad(set_to_none=False)
        assert all(not g.any() for g in gradients(pipe.stages[0]) if g is not None)


def test_a_pipeline_without_anything_to_train_has_no_optimizer() -> None:
    with group("a"):
        (stage,) = place([nn.Linear(2, 2)], "a")
        stage.requires_grad_(False)
        pipe = Pipeline([stage], "gpipe", 1, nn.MSELoss())
        with pytest.raises(ValueError, match="no parameter of the pipeline requires a gradient"):
            pipe.optimizer(torch.optim.SGD, lr=0.1)
