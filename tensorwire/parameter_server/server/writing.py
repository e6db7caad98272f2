"""Writes a shard's part of a snapshot while it goes on changing, and reads parts of any shards.

Rows lie in pieces of some tens of megabytes, each a few tensors named
``table/NAME/PIECE/COLUMN``; elements of dense groups as ``dense/NAME/PIECE/value``. The part's
metadata says how many pieces there are. Nothing is pickled.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from torch import Tensor

from tensorwire.checkpoint import Checkpoint, PartWriter
from tensorwire.parameter_server.declarations.dense_spec import PieceData
from tensorwire.parameter_server.declarations.spec import Precision
from tensorwire.parameter_server.storage.dense import DenseShard
from tensorwire.parameter_server.storage.table import Rows, Table

if TYPE_CHECKING:
    from tensorwire.parameter_server.server.state import FrozenShard

_PIECE: Final = 1 << 16

_HALVES: Final = {Precision.BFLOAT16: torch.bfloat16, Precision.FLOAT16: torch.float16}


def part_name(shard: int) -> str:
    """The name of a shard's part."""
    return f"shard{shard}"


def write(
    folder: str | Path, shard: int, frozen: FrozenShard, tables: Mapping[str, Table],
    lock: threading.Lock,
) -> None:  # fmt: skip
    """Writes a shard as it was into a draft.

    Args:
        folder: of the draft.
        shard: its number.
        frozen: the shard as it was.
        tables: its tables as they are.
        lock: held while rows are copied, never while they are written.
    """
    with PartWriter(folder, part_name(shard)) as part:
        described = {
            name: _write_table(part, name, tables[name], each, lock)
            for name, each in frozen.tables.items()
        }
        dense = {
            name: _write_dense(part, name, data) | {"steps": frozen.dense_steps[name]}
            for name, data in frozen.dense.items()
        }
        part.finish({"tables": described, "dense": dense})


def _write_table(
    part: PartWriter, name: str, table: Table, frozen: Any, lock: threading.Lock
) -> dict[str, Any]:
    count = 0
    while True:
        with lock:
            rows = frozen.next_piece(_PIECE)
        if rows is None:
            break
        part.add(f"table/{name}/{count}/ids", torch.from_numpy(rows.ids))
        for column, values in rows.columns.items():
            part.add(f"table/{name}/{count}/{column}", _tensor(values, column, table))
        count += 1
    if frozen.candidates is not None:
        part.add(f"table/{name}/candidates", torch.from_numpy(np.stack(frozen.candidates)))
    return {
        "pieces": count,
        "steps": frozen.steps,
        "dim": table.spec.dim,
        "optimizer": repr(frozen.rule),
        "precision": table.spec.precision.value,
    }


def _tensor(values: Any, column: str, table: Table) -> Tensor:
    half = _HALVES.get(table.spec.precision)
    if column == "weight" and half is not None:
        return torch.from_numpy(values.view(np.int16)).view(half)
    return torch.from_numpy(values)


def _write_dense(part: PartWriter, name: str, data: Mapping[int, PieceData]) -> dict[str, Any]:
    plain: dict[str, dict[str, Any]] = {}
    for place, piece in data.items():
        part.add(f"dense/{name}/{place}/value", piece.value)
        for key, value in piece.state.items():
            if isinstance(value, Tensor):
                part.add(f"dense/{name}/{place}/state/{key}", value)
            else:
                plain.setdefault(str(place), {})[key] = value
    return {"pieces": sorted(data), "plain": plain}


class Restored:
    """A snapshot from which shards begin, whoever wrote it.

    Args:
        saved: the checkpoint.
    """

    def __init__(self, saved: Checkpoint) -> None:
        self._saved = saved

    @classmethod
    def open(cls, folder: str | Path) -> Restored:
        """Opens a snapshot; see :meth:`tensorwire.checkpoint.Checkpoint.open`."""
        return cls(Checkpoint.open(folder))

    def pieces(self, name: str) -> Iterator[tuple[Mapping[str, Any], dict[str, Tensor]]]:
        """The pieces of a table: what its part says of it, and its columns."""
        for part, content in self._saved.parts.items():
            about = content.meta["tables"].get(name)
            for place in range(about["pieces"] if about else 0):
                stem = f"table/{name}/{place}/"
                names = [each for each in content.tensors if each.startswith(stem)]
                yield about, {n.removeprefix(stem): self._saved.tensor(part, n) for n in names}

    def tables(self) -> list[str]:
        """The names of all tables."""
        return sorted({name for part in self._saved.parts.values() for name in part.meta["tables"]})

    def load_table(self, table: Table, own: Any) -> None:
        """Takes in the rows of slots that are marked.

        Raises:
            ValueError: the table was another one.
        """
        name = table.spec.name
        for about, columns in self.pieces(name):
            if about["dim"] != table.spec.dim:
                raise ValueError(
                    f"table {name!r} has dim={table.spec.dim}, but dim={about['dim']} in the "
                    f"snapshot {self._saved.path}"
                )
            table.steps = max(table.steps, about["steps"])
            ids = columns.pop("ids")
            mine = table.in_slots(ids.numpy(), own)
            kept = {key: _array(value)[mine] for key, value in columns.items()}
            table.enter(Rows(ids.numpy()[mine], kept))
        for part, content in self._saved.parts.items():
            if f"table/{name}/candidates" in content.tensors:
                ids, counts, times = self._saved.tensor(part, f"table/{name}/candidates").numpy()
                mine = table.in_slots(ids, own)
                table.enter_candidates((ids[mine], counts[mine], times[mine]))

    def load_dense(self, group: DenseShard) -> None:
        """Takes in the pieces that a shard keeps."""
        name = group.spec.name
        found: dict[int, PieceData] = {}
        is_saved = False
        for part, content in self._saved.parts.items():
            about = content.meta["dense"].get(name)
            if about is None:
                continue
            is_saved = is_saved or bool(about["pieces"])
            group.steps = max(group.steps, about["steps"])
            for place in set(about["pieces"]) & set(group.pieces):
                found[place] = self._piece(part, name, place, about["plain"].get(str(place), {}))
        if is_saved:  # also where no piece is kept, lest trainers set the group anew
            group.load(found, -1)

    def _piece(self, part: str, name: str, place: int, plain: Mapping[str, Any]) -> PieceData:
        stem = f"dense/{name}/{place}/state/"
        tensors = self._saved.parts[part].tensors
        state: dict[str, Any] = dict(plain)
        for each in tensors:
            if each.startswith(stem):
                state[each.removeprefix(stem)] = self._saved.tensor(part, each).clone()
        return PieceData(self._saved.tensor(part, f"dense/{name}/{place}/value").clone(), state)


def _array(values: Tensor) -> Any:
    if values.dtype in (torch.bfloat16, torch.float16):
        return values.view(torch.int16).numpy().view(np.uint16)
    return values.numpy()
