"""Dense parameters are restored into each other optimizer: bits, a stated conversion, an error."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from tensorwire import parameter_server as ps
from tensorwire.parameter_server.declarations.dense_spec import DenseSpec, describe, spread_of
from tensorwire.parameter_server.snapshots.contents import Restored
from tensorwire.parameter_server.snapshots.fit import require_fit
from tensorwire.parameter_server.snapshots.kept import Keeping
from tests.tensorwire.parameter_server.snapshots import shards as them

_OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {}),
    "momentum": (torch.optim.SGD, {"momentum": 0.9}),
    "adam": (torch.optim.Adam, {}),
    "amsgrad": (torch.optim.Adam, {"amsgrad": True}),
    "adamw": (torch.optim.AdamW, {}),
    "adagrad": (torch.optim.Adagrad, {}),
    "rmsprop": (torch.optim.RMSprop, {}),
    "centered": (torch.optim.RMSprop, {"centered": True, "momentum": 0.9}),
    "adadelta": (torch.optim.Adadelta, {}),
    "adamax": (torch.optim.Adamax, {}),
    "nadam": (torch.optim.NAdam, {}),
    "radam": (torch.optim.RAdam, {}),
    "asgd": (torch.optim.ASGD, {}),
    "rprop": (torch.optim.Rprop, {}),
    "adafactor": (torch.optim.Adafactor, {}),
}
_SHAPES = [(4, 3), (3,), (2, 2, 2)]


def _spec(name: str, shapes: Any = _SHAPES, dtype: torch.dtype = torch.float32) -> DenseSpec:
    cls, options = _OPTIMIZERS[name]
    parameters = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes]
    optimizer: Optimizer = cls(parameters, lr=0.1, **options)
    return describe("net", optimizer, spread_of(optimizer))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("snapshots")
    for name in _OPTIMIZERS:
        them.save(base / name, _spec(name))
    return {name: base / name for name in _OPTIMIZERS}


def _refusal(folder: Path, spec: DenseSpec, strict: bool) -> str:
    saved = Restored.open(folder).described["net"]
    try:
        require_fit("net", Keeping(saved, str(folder), strict), spec)
    except ps.RestoreError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("before", _OPTIMIZERS)
def test_parameters_come_back_as_they_were_or_as_is_said(
    folders: dict[str, Path], before: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Values always; state where the same optimizer keeps the same."""
    for after in _OPTIMIZERS:
        spec = _spec(after)
        caplog.clear()
        assert _refusal(folders[before], spec, strict=False) == ""
        assert bool(caplog.records) == (before != after), (before, after, caplog.text)
        strictly = _refusal(folders[before], spec, strict=True)
        assert ("its state begins anew" in strictly) == (before != after), strictly
        kept = them.restore(folders[before], 3, {})
        was = them.dense(kept, "net")
        them.declare(kept, spec)
        for place, data in them.dense(kept, "net").items():
            assert torch.equal(data.value.reshape(-1), was[place].value.reshape(-1))
            assert set(data.state) == (set(was[place].state) if before == after else set())
        them.push(kept, spec, 4)


@pytest.mark.parametrize("name", _OPTIMIZERS)
def test_steps_go_on_from_a_snapshot_as_if_there_had_been_none(name: str, tmp_path: Path) -> None:
    spec = _spec(name)
    whole = them.save(tmp_path / "1", spec, steps=2, shards=1)
    them.write_all(tmp_path / "2", them.restore(tmp_path / "1", 1, {}), 2)  # nobody declared it
    resumed = them.restore(tmp_path / "2", 1, {})
    them.declare(resumed, spec)
    for time in (3, 4):
        them.push(whole, spec, time)
        them.push(resumed, spec, time)
    wanted = them.values(whole, "net")
    for place, value in them.values(resumed, "net").items():
        assert torch.equal(value, wanted[place])


@pytest.mark.parametrize(
    "shapes", [[(3, 4), (3,), (2, 2, 2)], [(4, 3), (3,)], [(4, 3), (3,), (2, 2, 2), (1,)], [(23,)]]
)
def test_other_shapes_are_refused(folders: dict[str, Path], shapes: Any) -> None:
    for strict in (True, False):
        refused = _refusal(folders["adam"], _spec("adam", shapes), strict)
        assert "shapes ((4, 3), (3,), (2, 2, 2)) were saved" in refused
        assert "are declared" in refused


def test_other_dtypes_are_converted_if_one_says_so(folders: dict[str, Path]) -> None:
    spec = _spec("adam", dtype=torch.float64)
    assert "float32" in _refusal(folders["adam"], spec, strict=True)
    assert _refusal(folders["adam"], spec, strict=False) == ""
    kept = them.restore(folders["adam"], 2, {})
    was = them.values(kept, "net")
    them.declare(kept, spec)
    for place, value in them.values(kept, "net").items():
        assert value.dtype == torch.float64
        assert torch.equal(value.float(), was[place])
    them.push(kept, spec, 4)


def test_parameters_of_other_names_are_refused(tmp_path: Path) -> None:
    named = replace(_spec("adam"), names=("a", "b", "c"))
    them.save(tmp_path / "1", named)
    assert _refusal(tmp_path / "1", named, strict=True) == ""
    assert _refusal(tmp_path / "1", _spec("adam"), strict=True) == ""  # nobody knows
    other = replace(named, names=("a", "c", "b"))
    assert "parameters (a, b, c) were saved" in _refusal(tmp_path / "1", other, strict=False)


def test_other_learning_rates_are_the_program_s_own(folders: dict[str, Path]) -> None:
    for name in _OPTIMIZERS:
        spec = _spec(name)
        changed = replace(spec, groups=tuple({**group, "lr": 0.7} for group in spec.groups))
        assert _refusal(folders[name], changed, strict=True) == ""
