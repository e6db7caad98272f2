"""Every owner saves its own part, and other owners can load it."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autograd_dist
import rpc
from optim_dist import DistributedOptimizer
from remote_module import RemoteModule
from rpc.testing import MemoryHub, as_worker, local_group
from tensorwire import checkpoint
from tensorwire.checkpoint import DamagedCheckpointError, UnsavableValueError
from tensorwire.pipeline import Pipeline

_X, _Y = torch.rand(6, 4), torch.rand(6, 4)


@contextmanager
def _group(*names: str, **options: Any) -> Iterator[list[Any]]:
    with local_group("driver", *names, **options) as agents, as_worker(agents[0]):
        yield agents


class _Stage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.norm(torch.tanh(self.linear(x)))
        return output


def _stages(workers: Sequence[str]) -> list[RemoteModule]:
    return [RemoteModule(worker, _Stage) for worker in workers]


def _train(pipe: Pipeline, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    loss = pipe.train_step(_X, target=_Y)
    optimizer.step()
    optimizer.zero_grad()
    return loss


def test_training_goes_on_from_a_checkpoint_on_fewer_workers(tmp_path: Path) -> None:
    with _group("a", "b", "c"):
        pipe = Pipeline(_stages("abc"), "gpipe", 2, nn.MSELoss())
        optimizer = pipe.optimizer(torch.optim.AdamW, lr=0.1)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        for _ in range(3):
            _train(pipe, optimizer)
            scheduler.step()
        state = {"model": pipe, "optimizer": optimizer, "scheduler": scheduler, "step": 3}
        saved = checkpoint.save(tmp_path / "3", state)
        assert set(saved.parts) == {"common", "worker a", "worker b", "worker c"}
        assert "2.norm.running_mean" in saved.parts["worker c"].meta["shares"]["model"]

        fewer = Pipeline(_stages("bab"), "1f1b", 2, nn.MSELoss())
        other = fewer.optimizer(torch.optim.AdamW, lr=0.5)
        its_scheduler = torch.optim.lr_scheduler.ExponentialLR(other, 0.5)
        loaded = checkpoint.load(
            tmp_path / "3", {"model": fewer, "optimizer": other, "scheduler": its_scheduler}
        )
        assert loaded["step"] == 3
        assert fewer.steps == 3
        for _ in range(2):
            assert torch.equal(_train(pipe, optimizer), _train(fewer, other))
            scheduler.step()
            its_scheduler.step()
            assert other.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
        for name, value in pipe.state_dict().items():
            assert torch.equal(value, fewer.state_dict()[name])


def _step(modules: Sequence[RemoteModule], optimizer: DistributedOptimizer) -> torch.Tensor:
    with autograd_dist.context() as context:
        loss = nn.functional.mse_loss(modules[1](modules[0](_X)), _Y)
        autograd_dist.backward(context, [loss])
        optimizer.step(context)
    return loss.detach()


def _optimizer(modules: Sequence[RemoteModule], lr: float) -> DistributedOptimizer:
    parameters = [rref for module in modules for rref in module.remote_parameters()]
    return DistributedOptimizer(torch.optim.Adam, parameters, lr=lr)


def test_remote_modules_and_a_distributed_optimizer_change_owners(tmp_path: Path) -> None:
    with _group("a", "b"):
        modules = _stages("ab")
        optimizer = _optimizer(modules, 0.1)
        _step(modules, optimizer)
        local = nn.Linear(2, 2)
        state = {"modules": modules, "optimizer": optimizer, "local": local, "note": ["x", 1]}
        checkpoint.save(tmp_path / "1", state)

        others = _stages("bb")
        continued = _optimizer(others, 0.7)
        its_local = nn.Linear(2, 2)
        loaded = checkpoint.load(
            tmp_path / "1", {"modules": others, "optimizer": continued, "local": its_local}
        )
        assert loaded["note"] == ["x", 1]
        assert loaded["modules"] == others
        assert torch.equal(its_local.weight, local.weight)
        for _ in range(2):
            assert torch.equal(_step(modules, optimizer), _step(others, continued))


def test_what_is_saved_in_the_background_is_the_state_of_the_call(tmp_path: Path) -> None:
    go_on = threading.Event()

    class _Slow(nn.Linear):
        pass

    with _group("a"):
        module = RemoteModule("a", _Slow, (3, 3))
        before = module.state_dict()
        saving = checkpoint.save_in_background(tmp_path / "1", {"model": module})
        module.load_state_dict({name: each + 1 for name, each in before.items()})
        go_on.set()
        saved = saving.wait(60)
        assert saving.done()
        other = RemoteModule("a", _Slow, (3, 3))
        checkpoint.load(saved, {"model": other})
        for name, value in before.items():
            assert torch.equal(other.state_dict()[name], value)


def test_only_the_last_checkpoints_stay(tmp_path: Path) -> None:
    for step in range(5):
        checkpoint.save(tmp_path / str(step), {"step": step, "tensor": torch.ones(2)}, keep=2)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["3", "4"]
    found = checkpoint.latest(tmp_path)
    assert found is not None
    assert checkpoint.load(found, {})["step"] == 4


class _FailsToSave(nn.Module):
    def get_extra_state(self) -> Any:
        raise OSError(28, "no space left")


def test_a_save_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    with _group("a", "b"):
        good, bad = RemoteModule("a", _Stage), RemoteModule("b", _FailsToSave)
        with pytest.raises(OSError, match="no space left"):
            checkpoint.save(tmp_path / "1", {"good": good, "bad": bad})
        with pytest.raises(UnsavableValueError, match=r"state/x is a builtins.object"):
            checkpoint.save(tmp_path / "1", {"good": good, "x": object()})
        with pytest.raises(OSError, match="no space left"):
            checkpoint.save_in_background(tmp_path / "1", {"bad": bad})
        assert list(tmp_path.iterdir()) == []
        checkpoint.save(tmp_path / "1", {"good": good})


def test_a_lost_owner_ends_the_save_with_an_error(tmp_path: Path) -> None:
    hub = MemoryHub()
    with _group("a", "b", hub=hub):
        module = RemoteModule("b", _Stage)
        module.eval()
        hub.cut(2)
        with pytest.raises(rpc.WorkerLostError, match="'b'"):
            checkpoint.save(tmp_path / "1", {"model": module})
        assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_of_something_else_is_refused_by_name(tmp_path: Path) -> None:
    with _group("a"):
        module = RemoteModule("a", _Stage)
        checkpoint.save(tmp_path / "1", {"model": module, "list": [1, 2]})
        other = RemoteModule("a", nn.Linear, (4, 4))
        with pytest.raises(DamagedCheckpointError, match=r"'model' .* has no 'weight'"):
            checkpoint.load(tmp_path / "1", {"model": other})
        with pytest.raises(DamagedCheckpointError, match="nothing by the name 'encoder'"):
            checkpoint.load(tmp_path / "1", {"encoder": other})
        with pytest.raises(DamagedCheckpointError, match="'list' has 2 items, not 3"):
            checkpoint.load(tmp_path / "1", {"list": [0, 0, other]})
        assert checkpoint.load(tmp_path / "1", {"list": []})["list"] == [1, 2]
        with pytest.raises(ValueError, match="keep=0 must be at least 1"):
            checkpoint.save(tmp_path / "2", {}, keep=0)


def test_a_program_without_workers_saves_and_loads_too(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    checkpoint.save(tmp_path / "1", {"model": model, "optimizer": optimizer, "pid": os.getpid()})
    other = nn.Linear(2, 2)
    its = torch.optim.Adam(other.parameters())
    checkpoint.load(tmp_path / "1", {"model": other, "optimizer": its})
    assert torch.equal(other.weight, model.weight)
    assert torch.equal(its.state[other.weight]["exp_avg"], optimizer.state[model.weight]["exp_avg"])
