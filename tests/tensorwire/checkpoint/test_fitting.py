"""Saved state is loaded bit for bit, converted as is said, or refused without a change."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from optim_dist import DistributedOptimizer
from remote_module import RemoteModule
from rpc.testing import as_worker, local_group
from tensorwire import checkpoint
from tensorwire.checkpoint import MismatchError
from tensorwire.pipeline import Pipeline

_X = torch.rand(6, 4)


def _two(*more: nn.Module, middle: int = 4, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, middle), nn.Linear(middle, 4), *more).to(dtype)


_MODELS: dict[str, Callable[[], nn.Sequential]] = {
    "same": _two,
    "wide": lambda: _two(middle=5),
    "double": lambda: _two(dtype=torch.float64),
    "half": lambda: _two(dtype=torch.bfloat16),
    "longer": lambda: _two(nn.Linear(4, 4)),
    "shorter": lambda: nn.Sequential(nn.Linear(4, 4)),
    "without bias": lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, bias=False)),
    "normed": lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)),
}
_CONVERTIBLE = {"same", "double", "half"}
_KINDS = ["local", "remote", "pipeline"]


@pytest.fixture
def _workers() -> Iterator[None]:
    with local_group("driver", "a", "b") as agents, as_worker(agents[0]):
        yield


def _hold(kind: str, model: nn.Sequential) -> Any:
    """A model as a program holds it."""
    if kind == "local":
        return model
    placed = zip("aba", model, strict=False)
    stages = [RemoteModule(worker, _Given, (each,)) for worker, each in placed]
    return stages if kind == "remote" else Pipeline(stages, "gpipe", 2, nn.MSELoss())


class _Given(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.inner(x)
        return output


def _state(kind: str, held: Any) -> list[torch.Tensor]:
    found = [each.state_dict() for each in held] if kind == "remote" else [held.state_dict()]
    return [value for state in found for value in state.values()]


@pytest.mark.usefixtures("_workers")
@pytest.mark.parametrize("kind", _KINDS)
@pytest.mark.parametrize("before", _MODELS)
def test_a_model_is_loaded_into_each_other_one_or_refused(
    tmp_path: Path, before: str, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    saved = _hold(kind, _MODELS[before]())
    checkpoint.save(tmp_path / "1", {"model": saved})
    for after, make in _MODELS.items():
        other = _hold(kind, make())
        was = _state(kind, other)
        caplog.clear()
        if before == after:
            checkpoint.load(tmp_path / "1", {"model": other})
            for one, value in zip(_state(kind, saved), _state(kind, other), strict=True):
                assert torch.equal(one, value)
                assert one.dtype == value.dtype
            continue
        with pytest.raises(MismatchError, match=r"'?model"):
            checkpoint.load(tmp_path / "1", {"model": other})
        _require_equal(was, _state(kind, other))
        if {before, after} <= _CONVERTIBLE:
            checkpoint.load(tmp_path / "1", {"model": other}, strict=False)
            assert "is converted: " in caplog.text
            wanted = [each.to(w.dtype) for each, w in zip(_state(kind, saved), was, strict=True)]
            _require_equal(wanted, _state(kind, other))
        else:
            with pytest.raises(MismatchError):
                checkpoint.load(tmp_path / "1", {"model": other}, strict=False)
            _require_equal(was, _state(kind, other))


def _require_equal(wanted: list[torch.Tensor], found: list[torch.Tensor]) -> None:
    for one, other in zip(wanted, found, strict=True):
        assert torch.equal(one, other)


_OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "adam": lambda p: torch.optim.Adam(p),
    "adamw": lambda p: torch.optim.AdamW(p),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adagrad": lambda p: torch.optim.Adagrad(p),
}


@pytest.mark.parametrize("before", _OPTIMIZERS)
def test_the_state_of_one_optimizer_is_not_that_of_another(
    tmp_path: Path, before: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Linear(3, 2)
    optimizer = _OPTIMIZERS[before](model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    checkpoint.save(tmp_path / "1", {"optimizer": optimizer})
    for after, make in _OPTIMIZERS.items():
        other = make(nn.Linear(3, 2).parameters())
        if before == after:
            checkpoint.load(tmp_path / "1", {"optimizer": other})
            assert len(other.state) == 2
            continue
        with pytest.raises(MismatchError, match=r"is the state of a torch\.optim\..* begins anew"):
            checkpoint.load(tmp_path / "1", {"optimizer": other})
        fresh = str(other.state)
        checkpoint.load(tmp_path / "1", {"optimizer": other}, strict=False)
        assert str(other.state) == fresh
    turned = _OPTIMIZERS[before](nn.Linear(2, 3).parameters())
    for strict in (True, False):
        with pytest.raises(MismatchError, match="is for parameters of shapes"):
            checkpoint.load(tmp_path / "1", {"optimizer": turned}, strict=strict)


def test_a_scheduler_of_another_class_is_refused(tmp_path: Path) -> None:
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    saved = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    checkpoint.save(tmp_path / "1", {"scheduler": saved})
    other = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    with pytest.raises(MismatchError, match=r"StepLR, not of a .*ExponentialLR"):
        checkpoint.load(tmp_path / "1", {"scheduler": other})


@pytest.mark.usefixtures("_workers")
def test_a_distributed_optimizer_of_another_class_or_shapes_is_refused(tmp_path: Path) -> None:
    def make(cls: Any, sizes: tuple[int, int] = (4, 2)) -> DistributedOptimizer:
        module = RemoteModule("a", nn.Linear, sizes)
        return DistributedOptimizer(cls, module.remote_parameters(), lr=0.1)

    checkpoint.save(tmp_path / "1", {"optimizer": make(torch.optim.Adam)})
    checkpoint.load(tmp_path / "1", {"optimizer": make(torch.optim.Adam)})
    with pytest.raises(MismatchError, match=r"is the state of a .*Adam, not of a .*Adagrad"):
        checkpoint.load(tmp_path / "1", {"optimizer": make(torch.optim.Adagrad)})
    checkpoint.load(tmp_path / "1", {"optimizer": make(torch.optim.Adagrad)}, strict=False)
    with pytest.raises(MismatchError, match=r"parameter '0' of shape \[2, 4\], not \[4, 2\]"):
        checkpoint.load(tmp_path / "1", {"optimizer": make(torch.optim.Adam, (2, 4))})


@pytest.mark.usefixtures("_workers")
def test_a_pipeline_s_optimizer_of_another_class_is_refused(tmp_path: Path) -> None:
    def make(cls: Any) -> Any:
        pipe = _hold("pipeline", _two())
        optimizer = pipe.optimizer(cls, lr=0.1)
        pipe.train_step(_X, target=_X)
        optimizer.step()
        return optimizer

    checkpoint.save(tmp_path / "1", {"optimizer": make(torch.optim.Adam)})
    with pytest.raises(MismatchError, match=r"is the state of a .*Adam, not of a .*SGD"):
        checkpoint.load(tmp_path / "1", {"optimizer": make(torch.optim.SGD)})


@pytest.mark.usefixtures("_workers")
def test_a_mistake_in_one_object_leaves_the_others_as_they_were(tmp_path: Path) -> None:
    state = {"one": nn.Linear(2, 2), "two": RemoteModule("a", nn.Linear, (2, 2))}
    checkpoint.save(tmp_path / "1", state)
    one, two = nn.Linear(2, 2), RemoteModule("a", nn.Linear, (2, 3))
    before = one.weight.detach().clone()
    with pytest.raises(MismatchError, match=r"'two' .* has 'weight' of shape \(2, 2\), not"):
        checkpoint.load(tmp_path / "1", {"one": one, "two": two})
    assert torch.equal(one.weight, before)


@pytest.mark.usefixtures("_workers")
@pytest.mark.parametrize("wanted", [nn.Linear(2, 2), [nn.Linear(2, 2)], {"a": [nn.Linear(2, 2)]}])
@pytest.mark.parametrize("given", [3, "text", None, [1, 2], {"x": 1}, torch.ones(2)])
def test_an_object_does_not_take_over_what_is_none(tmp_path: Path, given: Any, wanted: Any) -> None:
    checkpoint.save(tmp_path / "1", {"model": given})
    with pytest.raises(MismatchError):
        checkpoint.load(tmp_path / "1", {"model": wanted})
