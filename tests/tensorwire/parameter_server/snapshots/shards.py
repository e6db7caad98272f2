"""Snapshots of shards without any cluster: written by some shards, taken over by others."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tensorwire.checkpoint import Draft
from tensorwire.parameter_server.decisions import orders
from tensorwire.parameter_server.decisions.consistency import BSP
from tensorwire.parameter_server.decisions.pushes import Apply, Push, PushKind
from tensorwire.parameter_server.decisions.records import Assign
from tensorwire.parameter_server.decisions.slots import evenly, slot_of
from tensorwire.parameter_server.declarations import spec as specs
from tensorwire.parameter_server.declarations.dense_spec import DenseSpec, PieceData
from tensorwire.parameter_server.declarations.spec import TableSpec
from tensorwire.parameter_server.kernels import torch_kernels
from tensorwire.parameter_server.messaging.messages import (
    DensePush,
    Load,
    TableIds,
    TablePush,
    Values,
)
from tensorwire.parameter_server.server.parts import MovedTable
from tensorwire.parameter_server.server.state import ShardState
from tensorwire.parameter_server.server.writing import write
from tensorwire.parameter_server.snapshots.contents import FORMAT, Restored, part_name
from tensorwire.parameter_server.snapshots.kept import Keeping

Spec = TableSpec | DenseSpec
IDS = torch.arange(40)
STEPS = 3


def memory(to: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(tuple(shape), dtype=dtype)


def primed(
    declared: Mapping[str, str], shards: int, folder: str = "", time: int = 0
) -> list[ShardState]:
    """The shards of a new cluster."""
    made = [ShardState(number, BSP(), torch_kernels, memory) for number in range(shards)]
    slots = evenly(range(shards))
    for each in made:
        each.run(orders.Prime({0: time}, time, 0, slots, frozenset(), declared, folder))
    return made


def push(shards: Sequence[ShardState], spec: Spec, time: int) -> None:
    """One step: a gradient for every second id, or for all dense parameters."""
    for shard in shards:
        load = _rows(shard, spec, time) if isinstance(spec, TableSpec) else None
        if isinstance(spec, DenseSpec):
            load = dense_gradients(shard, spec, time)
        shard.run(Apply((Push(0, time - 1, 0, PushKind.UPDATE, load),), time))


def beginning(spec: DenseSpec) -> dict[int, PieceData]:
    """The values that a trainer begins with."""
    dtypes = [spec.dtypes[piece.parameter] for piece in spec.pieces]
    return {
        place: PieceData(torch.sin(torch.arange(piece.start, piece.stop) + place).to(dtype))
        for place, (piece, dtype) in enumerate(zip(spec.pieces, dtypes, strict=True))
    }


def _rows(shard: ShardState, spec: TableSpec, time: int) -> Load:
    chosen = IDS if time > 1 else IDS[::2]
    ids = torch.tensor([i for i in chosen.tolist() if shard.slots[slot_of(i)] == shard.shard])
    grad = torch.sin(ids[:, None].float() + torch.arange(spec.dim) + time)
    packed = spec.wire.push.pack(grad)
    rows = TableIds((spec.name,), (len(ids),), ids.to(torch.int64))
    return Load((TablePush(rows, packed, (spec.rule.hyper(),)),))


def dense_gradients(shard: ShardState, spec: DenseSpec, time: int) -> Load:
    group = shard.dense[spec.name]
    grads: dict[torch.dtype, Any] = {}
    for dtype, flat in group.values().items():
        grads[dtype] = (torch.cos(torch.arange(len(flat)) + time).to(dtype),)
    return Load((), {spec.name: DensePush(grads, frozenset(), spec.groups)})


def save(
    folder: Path, spec: Spec | Sequence[Spec], shards: int = 2, steps: int = STEPS
) -> list[ShardState]:
    """Writes the snapshot of a cluster that has made some steps; returns its shards."""
    several = [spec] if isinstance(spec, TableSpec | DenseSpec) else spec
    made = primed({each.name: specs.encode(each) for each in several}, shards)
    for each in several:
        if isinstance(each, DenseSpec):
            for shard in made:
                shard.run(Assign(Values(each.name, 0, beginning(each))))
    for time in range(1, steps + 1):
        for each in several:
            push(made, each, time)
    write_all(folder, made, steps)
    return made


def write_all(folder: Path, shards: Sequence[ShardState], time: int) -> None:
    """Writes a snapshot of these shards as they are now."""
    draft = Draft.create(folder)
    for each in shards:
        frozen = each.freeze()
        write(draft.folder, each.shard, frozen, threading.Lock())
        each.thaw(frozen)
    about = {"parameter_server": FORMAT, "counts": [[0, time]], "time": time}
    draft.commit([part_name(each.shard) for each in shards], about)


def restore(folder: Path, shards: int, declared: Mapping[str, str]) -> list[ShardState]:
    """The shards of a cluster that begins with a snapshot; what is not declared is kept."""
    restored = Restored.open(folder)
    kept = {
        name: Keeping(saved, str(folder), True).encode()
        for name, saved in restored.described.items()
    }
    return primed({**kept, **declared}, shards, str(folder), restored.time)


def declare(shards: Sequence[ShardState], spec: Spec) -> None:
    """Somebody declares a table or dense group."""
    for each in shards:
        each.run(orders.Declare(spec.name, specs.encode(spec)))


def columns(shards: Sequence[ShardState], name: str) -> dict[str, torch.Tensor]:
    """All that is kept of a table, in the order of its ids, but for marks of what has changed."""
    pieces = [rows for each in shards for rows in each.tables[name].pieces(1000)]
    ids = np.concatenate([rows.ids for rows in pieces])
    order = np.argsort(ids)
    found = {"ids": torch.from_numpy(ids[order])}
    for column in [each for each in pieces[0].columns if not each.startswith("changed.")]:
        values = np.concatenate([rows.columns[column] for rows in pieces])[order]
        is_half = values.dtype == np.uint16
        found[column] = torch.from_numpy(values.view(np.int16) if is_half else values)
    return found


def waiting(shards: Sequence[ShardState], name: str) -> list[tuple[int, ...]]:
    """The ids that wait for a row, with their counts and times."""
    found = [each.tables[name].candidates() for each in shards]
    rows = [row for parts in found if parts is not None for row in zip(*parts, strict=True)]
    return sorted(tuple(map(int, row)) for row in rows)


def values(shards: Sequence[ShardState], name: str) -> dict[int, torch.Tensor]:
    """The elements of a dense group, by piece."""
    return {place: data.value for place, data in dense(shards, name).items()}


def dense(shards: Sequence[ShardState], name: str) -> dict[int, Any]:
    """The pieces of a dense group with their state."""
    found: dict[int, Any] = {}
    for each in shards:
        group = each.dense[name]
        found |= group.data(group.pieces)
    return found


def moved_table(text: str, rows: Any) -> MovedTable:
    """Rows on their way from a shard where the table is declared as that text says."""
    return MovedTable(text, rows.ids, rows.columns, None, 0)
