"""Reads snapshots of any writer, and checks that they are what they say.

Each shard wrote one part. Rows lie in pieces of some tens of megabytes, each a few tensors named
``table/NAME/PIECE/COLUMN``; elements of dense groups as ``dense/NAME/PIECE/value``. The part's
metadata describes each table and group (``saved``), says how many pieces there are, and which
slots were whose. Any fault raises a ``CheckpointError``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch
from torch import Tensor

from tensorwire.checkpoint import Checkpoint, CheckpointError
from tensorwire.parameter_server.decisions.samples import Account
from tensorwire.parameter_server.decisions.slots import SLOTS
from tensorwire.parameter_server.decisions.views import Snapshot
from tensorwire.parameter_server.declarations.dense_spec import PieceData
from tensorwire.parameter_server.declarations.rules import Per
from tensorwire.parameter_server.declarations.spec import Precision
from tensorwire.parameter_server.errors import SnapshotError
from tensorwire.parameter_server.kernels import kernels
from tensorwire.parameter_server.kernels.arrays import Ints
from tensorwire.parameter_server.snapshots.quantised import SCALE
from tensorwire.parameter_server.snapshots.saved import (
    Saved,
    SavedDense,
    SavedTable,
    count,
    require,
    text_of,
    typed,
)

FORMAT: Final = 2
"""The version of what this package writes into a checkpoint."""

DTYPES: Final[Mapping[Precision, torch.dtype]] = {
    Precision.FLOAT32: torch.float32,
    Precision.BFLOAT16: torch.bfloat16,
    Precision.FLOAT16: torch.float16,
    Precision.INT8: torch.int8,
}
"""The dtype in which rows of each precision are written."""


def part_name(shard: int) -> str:
    """The name of a shard's part."""
    return f"shard{shard}"


def gone_name(table: str) -> str:
    """The name of the tensor with the ids of a table that were evicted before a version."""
    return f"table/{table}/gone"


@dataclass(frozen=True, slots=True)
class TablePart:
    """The part of a table that one shard wrote.

    Args:
        saved: the table.
        pieces: how many pieces of rows there are.
        steps: updates of the table until then.
    """

    saved: SavedTable
    pieces: int
    steps: int


@dataclass(frozen=True, slots=True)
class DensePart:
    """The part of a dense group that one shard wrote.

    Args:
        saved: the group.
        pieces: the places of its pieces.
        plain: by place, state that is no tensor.
        steps: updates of the group until then.
        is_loaded: whether a trainer had said how it begins.
    """

    saved: SavedDense
    pieces: tuple[int, ...]
    plain: Mapping[int, Mapping[str, object]]
    steps: int
    is_loaded: bool


@dataclass(frozen=True, slots=True)
class ShardPart:
    """The part of a snapshot that one shard wrote.

    Args:
        name: of the part.
        shard: the shard's number.
        slots: by slot, the shard that had it.
        tables: by name.
        dense: by name.
    """

    name: str
    shard: int
    slots: tuple[int, ...]
    tables: Mapping[str, TablePart]
    dense: Mapping[str, DensePart]


class Restored:
    """A snapshot from which shards begin.

    Args:
        saved: the checkpoint.

    Attributes:
        time: pushes of the fastest trainer.
        counts: by trainer, how many of its pushes are in it.
        shards: what each shard wrote.
        described: each table and dense group by name.
        coarse: tables whose rows were written with eight bits.

    Raises:
        CheckpointError: it is no snapshot of a parameter server, or damaged.
    """

    def __init__(self, saved: Checkpoint) -> None:
        self.saved = saved
        if "parameter_server" not in saved.meta:
            raise SnapshotError(f"{str(saved.path)!r} is no snapshot of a parameter server")
        with _damage(saved.path):
            version = saved.meta["parameter_server"]
            if version != FORMAT:
                raise SnapshotError(f"it has version {version!r}, this release reads {FORMAT}")
            self.time = count(saved.meta.get("time"), "time")
            self.counts = _counts(saved.meta.get("counts"))
            self.samplers, self.accounts = _samples(saved.meta)
            self.shards = tuple(_part(name, each.meta) for name, each in saved.parts.items())
            require(len({each.slots for each in self.shards}) == 1, "all parts have one map")
            named = all(each.name == part_name(each.shard) for each in self.shards)
            require(named, "parts are named by their shard")
            owners = {each.shard for each in self.shards}
            require(owners.issuperset(self.shards[0].slots), "each slot is in a part")
            self.described = self._described()
            self.coarse: tuple[str, ...] = ()

    @classmethod
    def open(cls, folder: str | Path) -> Restored:
        """Opens a snapshot; see :meth:`tensorwire.checkpoint.Checkpoint.open`."""
        return cls(Checkpoint.open(folder))

    @property
    def folder(self) -> str:
        """The folder that it lies in."""
        return str(self.saved.path)

    def _described(self) -> dict[str, Saved]:
        """The tables and dense groups by name; all parts of one must describe it alike."""
        described: dict[str, Saved] = {}
        for shard in self.shards:
            both: dict[str, TablePart | DensePart] = {**shard.tables, **shard.dense}
            require(len(both) == len(shard.tables) + len(shard.dense), "names are those of one")
            for name, part in both.items():
                known = described.setdefault(name, part.saved)
                same = type(known) is type(part.saved) and text_of(known) == text_of(part.saved)
                require(same, f"all parts say the same of {name!r}")
        return described

    def verify(self) -> None:
        """Reads everything, and checks bytes, shapes, and that each row is there once.

        Raises:
            CheckpointError: something is not as it should be.
        """
        self.saved.verify()
        for name, saved in self.described.items():
            if isinstance(saved, SavedTable):
                self._verify_table(name)
            else:
                self._verify_dense(name, saved)

    def require_moment(self, snapshot: Snapshot) -> None:
        """Checks that this is of the point at which a cluster took it.

        Raises:
            SnapshotError: another one has been put in its place.
        """
        if self.time != snapshot.time or (snapshot.counts and self.counts != snapshot.counts):
            raise SnapshotError(f"{self.folder!r} holds a snapshot of another point in the pushes")

    # --- tables

    def count(self, name: str) -> int:
        """The number of rows of a table in the files; a row that was written twice counts twice."""
        stem, end = f"table/{name}/", "/ids"
        return sum(
            entry.shape[0]
            for part in self.saved.parts.values()
            for tensor, entry in part.tensors.items()
            if tensor.startswith(stem) and tensor.endswith(end) and len(entry.shape) == 1
        )

    def pieces(self, name: str) -> Iterator[tuple[TablePart, dict[str, Tensor]]]:
        """The pieces of a table: what its part says of it, and its columns, checked.

        Raises:
            CheckpointError: a column is missing, or not as it was written.
        """
        with _damage(self.saved.path):
            for shard in self.shards:
                about = shard.tables.get(name)
                for place in range(about.pieces if about else 0):
                    assert about is not None
                    yield about, self._columns(shard, name, place, about.saved)

    def _columns(
        self, shard: ShardPart, name: str, place: int, saved: SavedTable
    ) -> dict[str, Tensor]:
        stem = f"table/{name}/{place}/"
        columns = {
            column: self.saved.tensor(shard.name, stem + column) for column in columns_of(saved)
        }
        ids = columns["ids"]
        require(ids.dtype == torch.int64 and ids.dim() == 1, "ids are whole numbers")
        for column, (width, dtype) in columns_of(saved).items():
            if column != "ids":
                values = columns[column]
                require(values.shape == (len(ids), width), f"{column} has a row for each id")
                require(values.dtype == dtype, f"{column} is of {dtype}")
        slots = np.empty(len(ids), np.int64)
        kernels().slots(ids.numpy(), slots)
        mine = np.asarray(shard.slots)[slots] == shard.shard
        require(bool(mine.all()), f"rows of {name!r} lie in the part of their shard")
        return columns

    def candidates(self, name: str) -> Iterator[Ints]:
        """Ids of a table that wait for a row, with their counts and times.

        Raises:
            CheckpointError: they are not as they were written.
        """
        with _damage(self.saved.path):
            for shard in self.shards:
                about = shard.tables.get(name)
                if about is not None and about.saved.admit is not None:
                    kept = self.saved.tensor(shard.name, f"table/{name}/candidates")
                    is_right = kept.dtype == torch.int64 and kept.dim() == 2 and len(kept) == 3
                    require(is_right, f"candidates of {name!r} are ids, counts and times")
                    yield kept.numpy()

    def gone(self, name: str) -> Iterator[Ints]:
        """Ids of a table that were evicted since the version before; they come before its rows.

        Raises:
            CheckpointError: they are not as they were written.
        """
        with _damage(self.saved.path):
            for shard in self.shards:
                if gone_name(name) in self.saved.parts[shard.name].tensors:
                    ids = self.saved.tensor(shard.name, gone_name(name))
                    is_right = ids.dtype == torch.int64 and ids.dim() == 1
                    require(is_right, f"evicted ids of {name!r} are whole numbers")
                    yield ids.numpy()

    def _verify_table(self, name: str) -> None:
        ids = [columns["ids"].numpy() for _, columns in self.pieces(name)]
        require_different(name, np.concatenate(ids) if ids else np.empty(0, np.int64))
        for _ in (*self.candidates(name), *self.gone(name)):
            pass

    # --- dense groups

    def dense_data(self, name: str, places: set[int]) -> dict[int, PieceData]:
        """Some pieces of a dense group with their state, checked.

        Raises:
            CheckpointError: one is missing, or not as it was written.
        """
        pieces: dict[int, PieceData] = {}
        with _damage(self.saved.path):
            for shard in self.shards:
                about = shard.dense.get(name)
                for place in places & set(about.pieces) if about else ():
                    assert about is not None
                    pieces[place] = self._piece(shard.name, name, place, about)
        return pieces

    def _piece(self, part: str, name: str, place: int, about: DensePart) -> PieceData:
        stem = f"dense/{name}/{place}/state/"
        tensors = self.saved.parts[part].tensors
        state: dict[str, object] = dict(about.plain.get(place, {}))
        for each in tensors:
            if each.startswith(stem):
                state[each.removeprefix(stem)] = self.saved.tensor(part, each).clone()
        value = self.saved.tensor(part, f"dense/{name}/{place}/value").clone()
        piece = about.saved.pieces[place]
        require(value.numel() == len(piece), f"piece {place} of {name!r} has its elements")
        require(value.dtype == about.saved.dtypes[piece.parameter], f"{name!r} is of its dtype")
        return PieceData(value, state)

    def _verify_dense(self, name: str, saved: SavedDense) -> None:
        places = [
            p for shard in self.shards if name in shard.dense for p in shard.dense[name].pieces
        ]
        require(sorted(places) == list(range(len(saved.pieces))), f"{name!r} has each piece once")
        for place in range(len(saved.pieces)):
            self.dense_data(name, {place})


def require_different(name: str, ids: Ints) -> None:
    """Checks that no id of a table is there twice.

    Raises:
        SnapshotError: one is.
    """
    ordered = np.sort(ids)
    require(not bool((ordered[1:] == ordered[:-1]).any()), f"ids of {name!r} are there once each")


def columns_of(saved: SavedTable) -> dict[str, tuple[int, torch.dtype]]:
    """The columns of a table, with width and dtype."""
    columns = {"ids": (1, torch.int64), "weight": (saved.dim, DTYPES[saved.precision])}
    if saved.precision is Precision.INT8:
        columns[SCALE] = (1, torch.float32)
    for name, per in saved.state.items():
        columns[f"state.{name}"] = (saved.dim if per is Per.COLUMN else 1, torch.float32)
    if saved.evict is not None:
        columns["touched"] = (1, torch.int64)
    return columns


def _part(name: str, meta: Mapping[str, object]) -> ShardPart:
    tables = {n: _table(each) for n, each in typed(meta.get("tables"), dict, "tables").items()}
    dense = {n: _dense(each) for n, each in typed(meta.get("dense"), dict, "dense").items()}
    return ShardPart(
        name, count(meta.get("shard"), "shard"), _slots(meta.get("slots")), tables, dense
    )


def _table(value: object) -> TablePart:
    entry = typed(value, dict, "a table")
    return TablePart(
        SavedTable.decode(entry.get("about")),
        count(entry.get("pieces"), "pieces"),
        count(entry.get("steps"), "steps"),
    )


def _dense(value: object) -> DensePart:
    entry = typed(value, dict, "a dense group")
    saved = SavedDense.decode(entry.get("about"))
    pieces = tuple(count(p, "a piece") for p in typed(entry.get("pieces"), list, "pieces"))
    require(all(piece < len(saved.pieces) for piece in pieces), "pieces are of the group")
    plain = typed(entry.get("plain"), dict, "plain state")
    return DensePart(
        saved,
        pieces,
        {int(place): typed(each, dict, "plain state") for place, each in plain.items()},
        count(entry.get("steps"), "steps"),
        typed(entry.get("loaded"), bool, "loaded"),
    )


def _slots(value: object) -> tuple[int, ...]:
    runs = [typed(each, list, "a run of slots") for each in typed(value, list, "slots")]
    require(len(runs) <= SLOTS and all(len(run) == 2 for run in runs), "slots are runs")
    pairs = [(count(shard, "a shard"), count(length, "a length")) for shard, length in runs]
    require(sum(length for _, length in pairs) == SLOTS, f"there are {SLOTS} slots")
    return tuple(shard for shard, length in pairs for _ in range(length))


def _counts(value: object) -> dict[int, int]:
    pairs = [typed(each, list, "a count") for each in typed(value, list, "counts")]
    require(all(len(pair) == 2 for pair in pairs), "counts are pairs")
    return {count(trainer, "a trainer"): count(pushes, "pushes") for trainer, pushes in pairs}


def about_samples(
    samplers: Mapping[str, str], accounts: Mapping[str, Account]
) -> dict[str, object]:
    """The plain data about samples that are counted.

    Args:
        samplers: by name, what each is.
        accounts: by name, as they were at the cut.
    """
    told = {name: account.encode() for name, account in accounts.items()}
    return {"samplers": {name: samplers[name] for name in told}, "accounts": told}


def _samples(meta: Mapping[str, object]) -> tuple[dict[str, str], dict[str, Account]]:
    """The samplers whose samples were counted, and their accounts; both may be absent."""
    samplers = typed(meta.get("samplers", {}), dict, "samplers")
    accounts = typed(meta.get("accounts", {}), dict, "accounts")
    require(accounts.keys() <= samplers.keys(), "each account is that of a sampler")
    texts = {name: typed(text, str, "a sampler") for name, text in samplers.items()}
    return texts, {name: Account.decode(each) for name, each in accounts.items()}


@contextmanager
def _damage(path: Path) -> Iterator[None]:
    """Names the folder in what its content brings about."""
    try:
        yield
    except SnapshotError as error:
        if str(path) in str(error):
            raise
        raise SnapshotError(f"{path}: {error}") from None
    except CheckpointError:
        raise
    except (KeyError, IndexError, TypeError, ValueError, OverflowError, AttributeError) as error:
        text = f"{path} is damaged: {type(error).__name__}: {error}"
        raise SnapshotError(text) from error
