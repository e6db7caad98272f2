"""A module with a backup loses nothing that a returned step of its optimizer had done."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import autograd_dist
import rpc
from optim_dist import DistributedOptimizer
from remote_module import RemoteModule
from rpc.testing import MemoryHub, as_worker, local_group


def _given(module: nn.Module) -> nn.Module:
    return module


def _whole() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def _batch(step: int) -> torch.Tensor:
    return torch.rand(5, 3, generator=torch.Generator().manual_seed(step))


def _step(modules: list[RemoteModule], optimizer: DistributedOptimizer, step: int) -> float:
    with autograd_dist.context() as context_id:
        loss = modules[1](modules[0](_batch(step))).square().sum()
        autograd_dist.backward(context_id, [loss])
        optimizer.step(context_id)
    return loss.item()


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_a_module_goes_on_from_its_backup_with_the_optimizer_s_state(kind: Any) -> None:
    options = {"lr": 0.1, **({"momentum": 0.9} if kind is torch.optim.SGD else {})}
    whole, hub = _whole(), MemoryHub()
    with (
        local_group("trainer", "a", "b", "c", "d", hub=hub) as agents,
        as_worker(agents[0]),
    ):
        modules = [
            RemoteModule("a", _given, (copy.deepcopy(whole[:2]),), backup="b"),
            RemoteModule("c", _given, (copy.deepcopy(whole[2]),), backup="d"),
        ]
        parameters = [each for module in modules for each in module.remote_parameters()]
        optimizer = DistributedOptimizer(kind, parameters, **options)
        local = kind(whole.parameters(), **options)
        for step in range(7):
            if step == 2:
                hub.cut(1)  # a, between two steps
                with pytest.raises(rpc.WorkerLostError):
                    modules[0](_batch(step))
                modules[0].recover(backup="d")
                optimizer.recover(modules[:1])
            if step == 5:
                hub.cut(2)  # b, which took the module over; d has its copy
                with pytest.raises(rpc.WorkerLostError):
                    modules[0](_batch(step))
                modules[0].recover()
                with pytest.raises(ValueError, match="parameters of the optimizer were lost"):
                    optimizer.recover(modules)
                optimizer.recover(modules[:1])
            found = _step(modules, optimizer, step)
            loss = whole(_batch(step)).square().sum()
            local.zero_grad()
            loss.backward()
            local.step()
            assert found == pytest.approx(loss.item(), rel=1e-6)
        assert modules[0].on == "d"
        state = modules[0].state_dict()
        for name, value in whole[:2].state_dict().items():
            torch.testing.assert_close(state[name], value)


def test_what_cannot_be_backed_up_is_refused_with_a_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("remote_module.module.SECONDS_TO_HEAR", 0.2)
    with local_group("trainer", "a", "b") as agents, as_worker(agents[0]):
        for backup, error, message in [
            ("a", ValueError, "the module's own worker"),
            ("x", ValueError, "no such worker"),
            (3, TypeError, "is a int, not a worker's name"),
        ]:
            with pytest.raises(error, match=message):
                RemoteModule("a", nn.Linear, (2, 2), backup=backup)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="has no backup"):
            RemoteModule("a", nn.Linear, (2, 2)).recover()
        module = RemoteModule("a", nn.Linear, (2, 2), backup="b")
        with pytest.raises(RuntimeError, match="worker 'a' is living"):
            module.recover()


class _NotOfTorch:
    def __init__(self, parameters: Any) -> None:
        self.parameters = parameters

    def step(self) -> None: ...


def test_an_optimizer_without_a_state_that_can_be_copied_is_refused() -> None:
    with local_group("trainer", "a", "b") as agents, as_worker(agents[0]):
        module = RemoteModule("a", nn.Linear, (2, 2), backup="b")
        with pytest.raises(TypeError, match=r"needs an optimizer of torch\.optim"):
            DistributedOptimizer(_NotOfTorch, module.remote_parameters())
