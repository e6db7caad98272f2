"""Fills tables and dense groups with what a snapshot has, as it is or converted.

Whether a conversion is wanted was decided where the table was declared (``snapshots.fit``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import torch

from tensorwire.parameter_server.declarations.dense_spec import DenseSpec, PieceData
from tensorwire.parameter_server.declarations.rules import Per
from tensorwire.parameter_server.declarations.spec import Precision, TableSpec
from tensorwire.parameter_server.errors import SnapshotError
from tensorwire.parameter_server.kernels.arrays import Array, Bools
from tensorwire.parameter_server.snapshots.contents import DTYPES, Restored
from tensorwire.parameter_server.snapshots.fit import (
    Carry,
    carries_of,
    fit_of,
    keeps_state,
    keeps_steps,
)
from tensorwire.parameter_server.snapshots.kept import Keeping, KeptDense, KeptRule
from tensorwire.parameter_server.snapshots.saved import (
    Saved,
    SavedDense,
    SavedTable,
    saved_table,
)
from tensorwire.parameter_server.storage.dense import DenseShard
from tensorwire.parameter_server.storage.table import Rows, TableShard

_LARGEST_HALF: Final = 65504.0
_PIECE: Final = 1 << 16


def load_table(table: TableShard, restored: Restored, own: Bools, time: int) -> None:
    """Takes in the rows of slots that are marked.

    Args:
        table: an empty one.
        restored: the snapshot.
        own: by slot, whether it is marked.
        time: pushes of the fastest trainer.

    Raises:
        CheckpointError: the snapshot is damaged, or has another table by that name.
    """
    name, entered = table.spec.name, 0
    saved = restored.described.get(name)
    if saved is None:
        return
    _require_alike(name, saved, table.spec)
    assert isinstance(saved, SavedTable)
    for about, columns in restored.pieces(name):
        _take_steps(table, saved, about.steps)
        ids = columns.pop("ids").numpy()
        mine = table.in_slots(ids, own)
        kept = {key: _array(value)[mine] for key, value in columns.items()}
        table.enter(converted(Rows(ids[mine], kept), saved, table.spec, time))
        entered += int(mine.sum())
    if len(table) != entered:
        raise SnapshotError(f"{restored.folder}: an id of table {name!r} is there twice")
    for shard in restored.shards:
        if name in shard.tables:
            _take_steps(table, saved, shard.tables[name].steps)
    for ids, counts, times in restored.candidates(name):
        mine = table.in_slots(ids, own)
        table.enter_candidates((ids[mine], counts[mine], times[mine]))


def load_dense(group: DenseShard, restored: Restored) -> None:
    """Takes in the pieces that a shard keeps.

    Raises:
        CheckpointError: the snapshot is damaged, or has another group by that name.
    """
    name = group.spec.name
    saved = restored.described.get(name)
    if saved is None:
        return
    _require_alike(name, saved, group.spec)
    assert isinstance(saved, SavedDense)
    parts = [shard.dense[name] for shard in restored.shards if name in shard.dense]
    data = restored.dense_data(name, set(group.pieces))
    group.steps = max(part.steps for part in parts)
    if any(part.is_loaded for part in parts):  # also where no piece is kept
        group.load(_converted_pieces(data, saved, group.spec), -1)


def declared_table(
    old: TableShard, spec: TableSpec, time: int, device: torch.device | None
) -> TableShard:
    """The table that takes the place of one that was kept until it was declared."""
    rule = old.spec.rule
    assert isinstance(rule, KeptRule)
    if _has_same_columns(old.spec, spec):
        old.redeclare(spec)
        return old
    table = old.another(spec, device)
    _take_steps(table, rule.saved, old.steps)
    for rows in old.pieces(_PIECE):
        table.enter(converted(rows, rule.saved, spec, time))
    waiting = old.candidates()
    if waiting is not None:
        table.enter_candidates(waiting)
    return table


def declared_dense(old: DenseShard, spec: DenseSpec, slots: Sequence[int]) -> DenseShard:
    """The group that takes the place of one that was kept until it was declared."""
    assert isinstance(old.spec, KeptDense)
    group = DenseShard(spec, slots, old.shard)
    group.enter(_converted_pieces(old.data(old.pieces), old.spec.saved, spec), old.steps)
    group.is_loaded, group.loader = old.is_loaded, old.loader
    return group


def rows_as_declared(rows: Rows, text: str, spec: TableSpec, time: int) -> Rows:
    """Rows that come from where their table may not have been declared yet."""
    keeping = Keeping.decode(text)
    if keeping is None:
        return rows
    assert isinstance(keeping.saved, SavedTable)
    return converted(rows, keeping.saved, spec, time)


def pieces_as_declared(
    data: Mapping[int, PieceData], text: str, spec: DenseSpec
) -> Mapping[int, PieceData]:
    """Pieces that come from where their group may not have been declared yet."""
    keeping = Keeping.decode(text)
    if keeping is None:
        return data
    assert isinstance(keeping.saved, SavedDense)
    return _converted_pieces(data, keeping.saved, spec)


def _has_same_columns(old: TableSpec, spec: TableSpec) -> bool:
    """True if rows are kept alike, though they begin or are admitted otherwise."""
    assert isinstance(old.rule, KeptRule)
    mine = saved_table(spec, spec.rule)
    same_rule = (old.rule.saved.rule, dict(old.rule.state)) == (mine.rule, dict(mine.state))
    lifetimes = (bool(old.admit), bool(old.evict)) == (bool(spec.admit), bool(spec.evict))
    return same_rule and lifetimes and old.precision is spec.precision


def _require_alike(name: str, saved: Saved, spec: TableSpec | DenseSpec) -> None:
    """Checks a snapshot to go back to: it was checked when it was restored."""
    if isinstance(spec, KeptDense) or (
        isinstance(spec, TableSpec) and isinstance(spec.rule, KeptRule)
    ):
        return
    misfits = fit_of(saved, spec).misfits
    if misfits:
        raise SnapshotError(f"{name!r} cannot be restored as declared: {'; '.join(misfits)}")


def _take_steps(table: TableShard, saved: SavedTable, steps: int) -> None:
    if isinstance(table.spec.rule, KeptRule) or keeps_steps(
        saved, saved_table(table.spec, table.spec.rule)
    ):
        table.steps = max(table.steps, steps)


# --- conversions


def converted(rows: Rows, saved: SavedTable, spec: TableSpec, time: int) -> Rows:
    """Rows of a snapshot as a declared table keeps them; what fits stays as it is.

    Args:
        rows: the rows.
        saved: what the snapshot says of their table.
        spec: what is declared.
        time: pushes of the fastest trainer, as which rows without an age count as used.
    """
    if isinstance(spec.rule, KeptRule):
        return rows
    mine = saved_table(spec, spec.rule)
    columns = {"weight": _precise(rows.columns["weight"], saved.precision, spec.precision)}
    carries = carries_of(saved, mine)
    for name, per in mine.state.items():
        width = spec.dim if per is Per.COLUMN else 1
        if name in carries:
            values = _carried(rows.columns[f"state.{name}"], carries[name], width)
        else:
            values = np.full((len(rows.ids), width), spec.rule.initial(name), np.float32)
        columns[f"state.{name}"] = values
    if spec.evict is not None:
        now = np.full((len(rows.ids), 1), time, np.int64)
        columns["touched"] = rows.columns.get("touched", now)
    return Rows(rows.ids, columns)


def _carried(values: Array, how: Carry, width: int) -> Array:
    if how is Carry.MEAN:
        mean: Array = values.mean(axis=1, keepdims=True, dtype=np.float32)
        return mean
    return np.repeat(values, width, axis=1) if how is Carry.SPREAD else values


def _precise(values: Array, before: Precision, after: Precision) -> Array:
    """Rows of one precision in another, rounded to the nearest."""
    if before is after:
        return values
    wide = torch.from_numpy(values)
    if before is not Precision.FLOAT32:
        wide = torch.from_numpy(values.view(np.int16)).view(DTYPES[before]).float()
    if after is Precision.FLOAT16:
        wide = wide.clamp(-_LARGEST_HALF, _LARGEST_HALF)
    return _array(wide.to(DTYPES[after]))


def _array(values: torch.Tensor) -> Array:
    if values.dtype in (torch.bfloat16, torch.float16):
        return values.view(torch.int16).numpy().view(np.uint16)
    return values.numpy()


def _converted_pieces(
    data: Mapping[int, PieceData], saved: SavedDense, spec: DenseSpec
) -> dict[int, PieceData]:
    if isinstance(spec, KeptDense):
        return dict(data)
    keeps = keeps_state(saved, spec)
    return {
        place: PieceData(
            each.value.to(spec.dtypes[spec.pieces[place].parameter]), each.state if keeps else {}
        )
        for place, each in data.items()
    }
