"""Writes a shard's part of a snapshot, or of a published version, while it goes on changing.

``snapshots`` reads it. A version that is no point to begin from has rows without their state.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
import torch
from torch import Tensor

from tensorwire.checkpoint import PartWriter
from tensorwire.checkpoint.chain import VersionFile
from tensorwire.parameter_server.decisions import orders
from tensorwire.parameter_server.decisions.views import runs_of
from tensorwire.parameter_server.declarations.dense_spec import PieceData
from tensorwire.parameter_server.declarations.spec import Precision, TableSpec
from tensorwire.parameter_server.kernels.arrays import Array
from tensorwire.parameter_server.snapshots.contents import (
    DTYPES,
    columns_of,
    gone_name,
    part_name,
)
from tensorwire.parameter_server.snapshots.kept import KeptDense, KeptRule
from tensorwire.parameter_server.snapshots.quantised import SCALE, quantised
from tensorwire.parameter_server.snapshots.saved import (
    plain,
    saved_dense,
    saved_table,
    without_state,
)

if TYPE_CHECKING:
    from tensorwire.parameter_server.server.parts import FrozenDense, FrozenShard
    from tensorwire.parameter_server.storage.frozen import Frozen
    from tensorwire.parameter_server.storage.table import Rows

_PIECE: Final = 1 << 16
_SLICE: Final = 1 << 12
"""Rows that are copied while the lock is held, beside which pushes wait."""


def write_for(
    folder: str, shard: int, frozen: FrozenShard, lock: threading.Lock
) -> int | orders.Written:
    """Writes a shard as it was, and returns the answer to who gave the order.

    Args:
        folder: of a snapshot's draft; or one in a version's draft, made if it is not there.
        shard: its number.
        frozen: the shard as it was.
        lock: as in :func:`write`.
    """
    if frozen.version is None:
        write(folder, shard, frozen, lock)
        return shard
    path = Path(folder)
    path.mkdir(exist_ok=True)
    files = {name: VersionFile.of(path / name) for name in write(path, shard, frozen, lock)}
    return orders.Written(shard, {n: (each.bytes, each.checksum) for n, each in files.items()})


def write(
    folder: str | Path, shard: int, frozen: FrozenShard, lock: threading.Lock
) -> tuple[str, ...]:
    """Writes a shard as it was into a draft; returns the names of the files.

    Args:
        folder: of the draft.
        shard: its number.
        frozen: the shard as it was.
        lock: held while rows are copied, never while they are written.
    """
    version = frozen.version
    with_state = version is None or version.with_state
    rounded = Precision[version.precision] if version and version.precision else None
    with PartWriter(folder, part_name(shard)) as part:
        for name, ids in frozen.gone.items():
            part.add(gone_name(name), torch.from_numpy(ids))
        tables = {
            name: _write_table(part, name, each, lock, with_state, rounded)
            for name, each in frozen.tables.items()
        }
        dense = {
            name: _write_dense(part, name, each, with_state) for name, each in frozen.dense.items()
        }
        slots = runs_of(frozen.slots)
        part.finish({"shard": shard, "slots": slots, "tables": tables, "dense": dense})
        return part.files


def _write_table(
    part: PartWriter,
    name: str,
    frozen: Frozen,
    lock: threading.Lock,
    with_state: bool,
    rounded: Precision | None,
) -> dict[str, object]:
    rule = frozen.rule
    saved = rule.saved if isinstance(rule, KeptRule) else saved_table(frozen.spec, rule)
    if not with_state:
        saved = without_state(saved)
    if rounded is not None and saved.precision is Precision.FLOAT32:
        saved = replace(saved, precision=rounded)
    columns = columns_of(saved).keys() - {"ids"}
    count = 0
    while True:
        rows = _next_piece(frozen, lock)
        if rows is None:
            break
        part.add(f"table/{name}/{count}/ids", torch.from_numpy(rows.ids))
        kept = {
            column: _tensor(values, column, frozen.spec)
            for column, values in rows.columns.items()
            if column in columns
        }
        for column, tensor in sorted(_rounded(kept, saved.precision).items()):
            part.add(f"table/{name}/{count}/{column}", tensor)
        count += 1
    if frozen.candidates is not None and with_state:
        part.add(f"table/{name}/candidates", torch.from_numpy(np.stack(frozen.candidates)))
    return {"about": saved.encode(), "pieces": count, "steps": frozen.steps}


def _next_piece(frozen: Frozen, lock: threading.Lock) -> Rows | None:
    """The next rows as they were, copied in slices; None after the last.

    After each slice, others may have the lock, and Python's, for as long as it took.
    """
    slices: list[Rows] = []
    count = 0
    while count < _PIECE:
        with lock:
            begin = time.perf_counter()
            rows = frozen.next_piece(_SLICE)
            took = time.perf_counter() - begin
        if rows is None:
            break
        slices.append(rows)
        count += len(rows.ids)
        time.sleep(took)
    return slices[0].followed_by(slices[1:]) if slices else None


def _tensor(values: Array, column: str, spec: TableSpec) -> Tensor:
    if column == "weight" and spec.precision is not Precision.FLOAT32:
        return torch.from_numpy(values.view(np.int16)).view(DTYPES[spec.precision])
    return torch.from_numpy(values)


def _rounded(columns: Mapping[str, Tensor], precision: Precision) -> dict[str, Tensor]:
    """Rows of another precision, the nearest that there are; beyond it they become the largest."""
    rows, dtype = columns["weight"], DTYPES[precision]
    if rows.dtype == dtype:
        return dict(columns)
    if precision is Precision.INT8:
        whole, scale = quantised(rows)
        return {**columns, "weight": whole, SCALE: scale}
    most = torch.finfo(dtype).max
    return {**columns, "weight": rows.clamp(-most, most).to(dtype)}


def _write_dense(
    part: PartWriter, name: str, frozen: FrozenDense, with_state: bool
) -> dict[str, object]:
    kept: dict[str, dict[str, object]] = {}
    for place, piece in frozen.data.items():
        part.add(f"dense/{name}/{place}/value", piece.value)
        stem = f"dense/{name}/{place}/state"
        numbers = _write_state(part, stem, piece) if with_state else {}
        if numbers:
            kept[str(place)] = numbers
    spec = frozen.spec
    saved = spec.saved if isinstance(spec, KeptDense) else saved_dense(spec, frozen.groups)
    return {
        "about": saved.encode(),
        "pieces": sorted(frozen.data),
        "plain": kept,
        "steps": frozen.steps,
        "loaded": frozen.is_loaded,
    }


def _write_state(part: PartWriter, stem: str, piece: PieceData) -> dict[str, object]:
    """Writes what is a tensor; returns the rest."""
    rest: dict[str, object] = {}
    for key, value in piece.state.items():
        if isinstance(value, Tensor):
            part.add(f"{stem}/{key}", value)
        else:
            rest[key] = plain(value)
    return rest
