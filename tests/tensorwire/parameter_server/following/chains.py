"""Published chains without any cluster: what shards would write, and what readers must find."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any

import numpy as np
import torch
from torch import nn

from tensorwire import parameter_server as ps
from tensorwire.checkpoint import ChainWriter, Kind, PartWriter, Version, VersionFile
from tensorwire.parameter_server.decisions.slots import evenly, slot_of
from tensorwire.parameter_server.decisions.views import runs_of
from tensorwire.parameter_server.declarations.dense_spec import DenseSpec, Spread, describe
from tensorwire.parameter_server.declarations.spec import TableSpec
from tensorwire.parameter_server.snapshots.contents import DTYPES, gone_name, part_name
from tensorwire.parameter_server.snapshots.published import about_version
from tensorwire.parameter_server.snapshots.saved import saved_dense, saved_table, without_state

ITEMS = TableSpec("items", 4, ps.SGD(lr=0.1), ps.Uniform(0.1, seed=3))
USERS = TableSpec("a/b c", 2, ps.SGD(lr=0.1), ps.Constant(7.0), precision=ps.Precision.BFLOAT16)
NET = describe("model", torch.optim.SGD(nn.Linear(3, 2).parameters(), lr=0.1), Spread.ELEMENTS)

Rows = Mapping[int, Sequence[float]]
Changed = Mapping[str, Rows]
_NONE: Changed = MappingProxyType({})


class Published:
    """A chain that is written step by step, and the rows that its newest version has.

    Args:
        folder: of the chain.
        tables: which there are.
        shards: that write.
        keep_bases: see ``ChainWriter``.
        net: its dense parameters.
    """

    def __init__(
        self,
        folder: Path,
        tables: Sequence[TableSpec] = (ITEMS, USERS),
        shards: int = 2,
        keep_bases: int = 9,
        net: DenseSpec = NET,
    ) -> None:
        self.writer = ChainWriter(folder, keep_bases)
        self.rows: dict[str, dict[int, torch.Tensor]] = {each.name: {} for each in tables}
        self.weights = [torch.zeros(shape) for shape in net.shapes]
        self._net = net
        self.tables = {each.name: each for each in tables}
        self._slots = evenly(range(shards))
        self._shards = shards

    def __enter__(self) -> Published:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: object, trace: TracebackType | None
    ) -> None:
        self.writer.close()

    def base(
        self, step: int, rows: Mapping[str, Rows] = _NONE, gone: Sequence[int] = ()
    ) -> Version:
        """All rows, after these have changed in ``items``."""
        self._change(rows, gone)
        return self._write(Kind.BASE, step, self.rows, {})

    def delta(
        self, step: int, rows: Mapping[str, Rows] = _NONE, gone: Sequence[int] = ()
    ) -> Version:
        """Rows of tables that have changed, and ids of ``items`` that went before that."""
        changed = self._change(rows, gone)
        return self._write(Kind.DELTA, step, changed, {"items": gone})

    def _change(
        self, rows: Mapping[str, Rows], gone: Sequence[int]
    ) -> dict[str, dict[int, torch.Tensor]]:
        for each in gone:
            self.rows["items"].pop(each, None)
        changed: dict[str, dict[int, torch.Tensor]] = {name: {} for name in self.tables}
        for name, found in rows.items():
            dtype = DTYPES[self.tables[name].precision]
            changed[name] = {i: torch.tensor(row).to(dtype) for i, row in found.items()}
            self.rows[name] |= changed[name]
        return changed

    def _write(
        self,
        kind: Kind,
        step: int,
        rows: Mapping[str, Mapping[int, torch.Tensor]],
        gone: Mapping[str, Sequence[int]],
    ) -> Version:
        number = self.writer.next_number()
        folder = self.writer.folder_of(number)
        for shard in range(self._shards):
            self._write_shard(folder, shard, rows, gone)
        files = {each.name: VersionFile.of(each) for each in folder.iterdir()}
        about = about_version(range(self._shards), {0: step}, step, {"step": step}, {})
        return self.writer.commit(number, kind, step, files, about)

    def _write_shard(
        self,
        folder: Path,
        shard: int,
        rows: Mapping[str, Mapping[int, torch.Tensor]],
        gone: Mapping[str, Sequence[int]],
    ) -> None:
        with PartWriter(folder, part_name(shard)) as part:
            for name, ids in gone.items():
                own = [i for i in ids if self._slots[slot_of(i)] == shard]
                part.add(gone_name(name), torch.tensor(own, dtype=torch.int64))
            tables: dict[str, Any] = {}
            for name, spec in self.tables.items():
                own = [i for i in rows[name] if self._slots[slot_of(i)] == shard]
                pieces = [own[at : at + 50] for at in range(0, len(own), 50)]
                for place, ids in enumerate(pieces):
                    weight = torch.stack([rows[name][i] for i in ids])
                    part.add(f"table/{name}/{place}/ids", torch.tensor(ids))
                    part.add(f"table/{name}/{place}/weight", weight)
                about = without_state(saved_table(spec, spec.rule)).encode()
                tables[name] = {"about": about, "pieces": len(pieces), "steps": 0}
            dense = self._write_dense(part, self._net) if shard == 0 else {}
            slots = runs_of(self._slots)
            part.finish({"shard": shard, "slots": slots, "tables": tables, "dense": dense})

    def _write_dense(self, part: PartWriter, spec: DenseSpec) -> dict[str, Any]:
        saved = saved_dense(spec, spec.groups)
        for place, piece in enumerate(saved.pieces):
            value = self.weights[piece.parameter].reshape(-1)[piece.start : piece.stop]
            part.add(f"dense/model/{place}/value", value)
        found = list(range(len(saved.pieces)))
        about = {"about": saved.encode(), "pieces": found, "plain": {}, "steps": 0}
        return {"model": about | {"loaded": True}}


def same(value: float, ids: Sequence[int], dim: int = 4) -> dict[int, list[float]]:
    """Rows that hold one number everywhere."""
    return {i: [value] * dim for i in ids}


def random_rows(seed: int, ids: Sequence[int], dim: int = 4) -> dict[int, list[float]]:
    """Rows of random numbers."""
    values = np.random.default_rng(seed).normal(size=(len(ids), dim)).astype(np.float32)
    return dict(zip(ids, values.tolist(), strict=True))
