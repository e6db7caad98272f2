"""A table that was saved is restored into each other one: equal bits, a conversion, or an error.

Two shards save and three take over, so that rows move besides. What is expected is said here by
the declarations alone.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from tensorwire import parameter_server as ps
from tensorwire.parameter_server.decisions import orders
from tensorwire.parameter_server.decisions.slots import evenly
from tensorwire.parameter_server.declarations import spec as specs
from tensorwire.parameter_server.declarations.spec import TableSpec
from tensorwire.parameter_server.declarations.wire import Wire
from tensorwire.parameter_server.kernels import torch_kernels
from tensorwire.parameter_server.server.state import ShardState
from tensorwire.parameter_server.snapshots.contents import Restored
from tensorwire.parameter_server.snapshots.fit import require_fit
from tensorwire.parameter_server.snapshots.kept import Keeping
from tests.tensorwire.parameter_server.snapshots import shards as them


@dataclass(frozen=True)
class Clipped(ps.Rule):
    """A rule of the user's own."""

    lr: float
    state: ClassVar[Mapping[str, ps.Per]] = {"mean": ps.Per.COLUMN, "count": ps.Per.ROW}

    def update(self, weight: Tensor, grad: Tensor, state: Any, step: int) -> None:
        state["mean"].lerp_(grad, 0.5)
        state["count"].add_(1)
        weight.sub_(state["mean"].clamp(-0.1, 0.1), alpha=self.lr)


_PLAIN = TableSpec("items", 4, ps.Adagrad(lr=0.1, initial_accumulator_value=0.5), ps.Uniform(0.1))
_TABLES = {
    "adagrad": _PLAIN,
    "sgd": replace(_PLAIN, rule=ps.SGD(lr=0.1)),
    "momentum": replace(_PLAIN, rule=ps.SGD(lr=0.1, momentum=0.9)),
    "rowwise": replace(_PLAIN, rule=ps.RowwiseAdagrad(lr=0.1)),
    "adam": replace(_PLAIN, rule=ps.Adam(lr=0.1)),
    "ftrl": replace(_PLAIN, rule=ps.FTRL(lr=0.1)),
    "own": replace(_PLAIN, rule=Clipped(lr=0.1)),
    "bfloat16": replace(_PLAIN, precision=ps.Precision.BFLOAT16),
    "float16": replace(_PLAIN, precision=ps.Precision.FLOAT16),
    "adam in bfloat16": replace(_PLAIN, rule=ps.Adam(lr=0.1), precision=ps.Precision.BFLOAT16),
    "wide": replace(_PLAIN, dim=8),
    "admitting": replace(_PLAIN, admit=ps.MinCount(3)),
    "evicting": replace(_PLAIN, evict=ps.UnusedFor(100)),
    "otherwise begun": replace(_PLAIN, init=ps.Constant(0.5)),
    "packed": replace(_PLAIN, wire=Wire(ps.Float32(), ps.BFloat16())),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """By name of a table: the folder of its snapshot, and the shards that wrote it."""
    base = tmp_path_factory.mktemp("snapshots")
    return {name: (base / name, them.save(base / name, spec)) for name, spec in _TABLES.items()}


def _expected(saved: TableSpec, declared: TableSpec) -> str:
    if saved.dim != declared.dim:
        return "error"
    if type(declared.rule) is ps.FTRL and type(saved.rule) is not ps.FTRL:
        return "error"
    kept = [
        (type(each.rule), tuple(each.rule.state), each.precision, each.init, bool(each.evict))
        for each in (saved, declared)
    ]
    forgets = saved.admit is not None and declared.admit is None
    return "bits" if kept[0] == kept[1] and not forgets else "conversion"


@pytest.mark.parametrize("before", _TABLES)
def test_rows_come_back_as_they_were_or_as_is_said_or_not_at_all(
    folders: dict[str, Any], before: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder, written = folders[before]
    saved = Restored.open(folder).described["items"]
    for after, spec in _TABLES.items():
        expected = _expected(_TABLES[before], spec)
        caplog.clear()
        refused = _refusal(Keeping(saved, str(folder), strict=False), spec)
        told = [record.getMessage() for record in caplog.records]
        if expected == "error":
            assert "table 'items' of the snapshot" in refused, after
            assert f"{folder}" in refused
            continue
        assert refused == "", after
        assert bool(told) == (expected == "conversion"), (before, after, told)
        strictly = _refusal(Keeping(saved, str(folder), strict=True), spec)
        assert bool(strictly) == (expected == "conversion"), strictly
        _take_over(folder, written, before, after, expected)


def _refusal(keeping: Keeping, spec: TableSpec) -> str:
    try:
        with _heard():
            require_fit("items", keeping, spec)
    except ps.RestoreError as error:
        return str(error)
    return ""


def _heard() -> Any:
    logger = logging.getLogger("tensorwire")
    return _Level(logger)


class _Level:
    def __init__(self, logger: logging.Logger) -> None:
        self._logger, self._before = logger, logger.level

    def __enter__(self) -> None:
        self._logger.setLevel(logging.INFO)

    def __exit__(self, *_: object) -> None:
        self._logger.setLevel(self._before)


def _take_over(folder: Path, written: Any, before: str, after: str, expected: str) -> None:
    saved, spec = _TABLES[before], _TABLES[after]
    later = them.restore(folder, 3, {})
    them.declare(later, spec)
    was, found = them.columns(written, "items"), them.columns(later, "items")
    assert torch.equal(was["ids"], found["ids"])
    if expected == "bits":
        assert {n: v.tolist() for n, v in was.items()} == {n: v.tolist() for n, v in found.items()}
        assert them.waiting(written, "items") == them.waiting(later, "items")
        return
    _compare_weights(was["weight"], saved.precision, found["weight"], spec.precision)
    _compare_states(saved, was, spec, found)
    if spec.evict and not saved.evict:
        assert found["touched"].eq(them.STEPS).all()


_DTYPES = {
    ps.Precision.FLOAT32: torch.float32,
    ps.Precision.BFLOAT16: torch.bfloat16,
    ps.Precision.FLOAT16: torch.float16,
}


def _wide(values: Tensor, precision: ps.Precision) -> Tensor:
    return values.view(_DTYPES[precision]).float()


def _compare_weights(was: Tensor, before: Any, found: Tensor, after: Any) -> None:
    wanted = _wide(was, before).to(_DTYPES[after]).float()
    assert torch.equal(_wide(found, after), wanted)


def _compare_states(saved: TableSpec, was: Any, spec: TableSpec, found: Any) -> None:
    squares = (ps.Adagrad, ps.RowwiseAdagrad, ps.FTRL)
    for name, per in spec.rule.state.items():
        values = found[f"state.{name}"]
        is_sum = name == "sum" and all(isinstance(s.rule, squares) for s in (saved, spec))
        same = type(saved.rule) is type(spec.rule) and name in saved.rule.state
        if not (is_sum or same):
            assert values.eq(spec.rule.initial(name)).all(), name
            continue
        wanted = was[f"state.{name}"]
        if per is ps.Per.ROW and saved.rule.state[name] is ps.Per.COLUMN:
            wanted = wanted.mean(1, keepdim=True)
        assert torch.allclose(values, wanted.expand_as(values)), name


@pytest.mark.parametrize("after", ["bfloat16", "adam", "evicting", "rowwise"])
def test_it_is_all_one_when_a_table_is_declared(folders: dict[str, Any], after: str) -> None:
    """After a start from the snapshot, or before the cluster goes back to it."""
    folder, _ = folders["adagrad"]
    later = them.restore(folder, 3, {})
    them.declare(later, _TABLES[after])
    at_once = them.restore(folder, 2, {"items": specs.encode(_TABLES[after])})
    found = them.columns(later, "items")
    for name, values in them.columns(at_once, "items").items():
        assert torch.equal(values, found[name]), name


def test_hyper_parameters_that_keep_no_state_are_the_declared_ones(folders: dict[str, Any]) -> None:
    """Schedulers change them, and they travel with each push."""
    folder, _ = folders["adam"]
    saved = Restored.open(folder).described["items"]
    spec = replace(_TABLES["adam"], rule=ps.Adam(lr=0.5, betas=(0.8, 0.9)))
    assert _refusal(Keeping(saved, str(folder), strict=True), spec) == ""


def test_what_nobody_declares_is_in_the_next_snapshot_as_it_was(
    folders: dict[str, Any], tmp_path: Path
) -> None:
    for name, (folder, written) in folders.items():
        them.write_all(tmp_path / name, them.restore(folder, 3, {}), them.STEPS)
        again = Restored.open(tmp_path / name)
        again.verify()
        assert again.described == Restored.open(folder).described
        found = them.columns(them.restore(tmp_path / name, 1, {}), "items")
        for column, values in them.columns(written, "items").items():
            assert torch.equal(values, found[column]), (name, column)


def test_training_goes_on_from_a_snapshot_as_if_there_had_been_none(tmp_path: Path) -> None:
    for number, spec in enumerate(_TABLES.values()):
        whole = them.save(tmp_path / str(number), spec, steps=2)
        resumed = them.restore(tmp_path / str(number), 3, {})
        them.declare(resumed, spec)
        for time in (3, 4, 5):
            them.push(whole, spec, time)
            them.push(resumed, spec, time)
        wanted = them.columns(whole, "items")
        for column, values in them.columns(resumed, "items").items():
            assert torch.equal(values, wanted[column]), (spec, column)


def test_rows_of_16_bits_that_would_overflow_are_the_largest(tmp_path: Path) -> None:
    spec = replace(_PLAIN, rule=ps.SGD(lr=1e6))
    them.save(tmp_path / "1", spec)
    half = replace(spec, precision=ps.Precision.FLOAT16)
    found = them.columns(them.restore(tmp_path / "1", 1, {"items": specs.encode(half)}), "items")
    assert _wide(found["weight"], half.precision).abs().max() == 65504


def test_rows_that_move_where_they_were_not_declared_yet_are_converted_once(tmp_path: Path) -> None:
    spec = _TABLES["bfloat16"]
    written = them.save(tmp_path / "1", _PLAIN)
    one, other = them.restore(tmp_path / "1", 2, {})
    them.declare([other], spec)
    moved = one.tables["items"].taken(one.tables["items"].rows_in([True] * 1024))
    other.enter("items", them.moved_table(one.declared["items"], moved))
    found = _wide(them.columns([other], "items")["weight"], spec.precision)
    wanted = them.columns(written, "items")["weight"].to(torch.bfloat16).float()
    assert torch.equal(found, wanted)
    one.enter("items", them.moved_table(other.declared["items"], moved))  # declares it there
    assert one.declared["items"] == other.declared["items"]


def test_a_declaration_that_overtakes_the_order_to_begin_counts(tmp_path: Path) -> None:
    saved = them.save(tmp_path / "1", _PLAIN, shards=1)
    restored = Restored.open(tmp_path / "1")
    kept = {
        n: Keeping(each, str(tmp_path), True).encode() for n, each in restored.described.items()
    }
    shard = ShardState(0, ps.BSP(), torch_kernels, them.memory)
    shard.run(orders.Declare("items", specs.encode(_PLAIN)))
    folder = str(tmp_path / "1")
    shard.run(orders.Prime({0: 3}, 3, 0, evenly([0]), frozenset(), kept, folder))
    assert shard.tables["items"].rule == _PLAIN.rule
    found, wanted = them.columns([shard], "items"), them.columns(saved, "items")
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
