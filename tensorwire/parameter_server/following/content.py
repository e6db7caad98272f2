"""The tables and dense parameters of one version, made from those of the version before."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from tensorwire.checkpoint import Kind, Version
from tensorwire.checkpoint.following import Held
from tensorwire.parameter_server.declarations.initialisers import (
    Constant,
    Initialiser,
    Normal,
    Uniform,
)
from tensorwire.parameter_server.errors import SnapshotError
from tensorwire.parameter_server.following.rows import Change, RowsView, TableRows
from tensorwire.parameter_server.kernels.arrays import Array
from tensorwire.parameter_server.opaque import UserValue
from tensorwire.parameter_server.snapshots.contents import DTYPES, Restored
from tensorwire.parameter_server.snapshots.published import content_of
from tensorwire.parameter_server.snapshots.quantised import SCALE
from tensorwire.parameter_server.snapshots.saved import SavedDense, SavedTable

_INITIALISERS: Final[Mapping[str, type[Initialiser]]] = {
    each.__name__: each for each in (Constant, Uniform, Normal)
}
_CALL: Final = re.compile(r"(\w+)\((.*)\)")


@dataclass(frozen=True, slots=True)
class TableContent:
    """A table at one version.

    Args:
        saved: what it is.
        rows: its rows.
        init: how ids without a row read; None if that is not known here.
    """

    saved: SavedTable
    rows: RowsView
    init: Initialiser | None

    def pull(self, ids: Tensor) -> Tensor:
        """The rows of different ids, float32, the caller's own.

        Raises:
            SnapshotError: an id has no row, and the class of its initial values is the user's.
        """
        wanted = np.ascontiguousarray(ids.numpy())
        places = self.rows.find(wanted)
        values = self.rows.gather(places)
        absent = np.flatnonzero(places < 0)
        if len(absent):
            if self.init is None:
                raise SnapshotError(
                    f"id {wanted[absent[0]]} has no row in this version, and rows begin with "
                    f"{self.saved.init}, which is not known here"
                )
            self.init.fill(values.numpy(), absent, wanted[absent])
        return values


@dataclass(frozen=True, slots=True)
class DenseContent:
    """Dense parameters at one version.

    Args:
        saved: what they are.
        values: of each parameter, of its shape.
    """

    saved: SavedDense
    values: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class Content:
    """All that a version has.

    Args:
        tables: by name.
        dense: by name.
        extra: plain data of who published it.
    """

    tables: Mapping[str, TableContent]
    dense: Mapping[str, DenseContent]
    extra: UserValue


def taken(held: Held[Content] | None, version: Version) -> Content:
    """The content of a version; a delta's is made from that of the version before.

    Nothing changes for those who read the version before. Rows of a base that are the same as
    before stay where they are.

    Raises:
        CheckpointError: the version is damaged, or none of a parameter server.
    """
    before = held.value if held else None
    version.verify()
    restored = content_of(version.folder, version.about)
    changes: dict[str, Change] = {}
    try:
        for name, saved in restored.described.items():
            if isinstance(saved, SavedTable):
                changes[name] = _begun(before, restored, name, saved)
                _read(changes[name], restored, name, version.kind, _known(before, name, saved))
        dense = {
            name: _dense(restored, name, saved)
            for name, saved in restored.described.items()
            if isinstance(saved, SavedDense)
        }
        for each in changes.values():
            each.check()
    except BaseException:
        for each in changes.values():
            each.undo()
        raise
    tables = {name: _content(restored, name, each) for name, each in changes.items()}
    return Content(tables, dense, version.about.get("extra"))


def _known(before: Content | None, name: str, saved: SavedTable) -> RowsView | None:
    """The rows of a table before, if they are as wide and of the same dtype."""
    known = before.tables.get(name) if before else None
    if known is None:
        return None
    mine = known.saved
    return known.rows if (mine.dim, mine.precision) == (saved.dim, saved.precision) else None


def _begun(before: Content | None, restored: Restored, name: str, saved: SavedTable) -> Change:
    known = _known(before, name, saved)
    if known is not None:
        return known.rows.begin(known)
    rows = TableRows(saved.dim, DTYPES[saved.precision])
    return rows.begin(None, restored.count(name))


def _read(
    change: Change, restored: Restored, name: str, kind: Kind, before: RowsView | None
) -> None:
    is_compared = kind is Kind.BASE and before is not None
    if not is_compared:
        for gone in restored.gone(name):
            change.remove(np.array(gone))
    for _, columns in restored.pieces(name):
        put = change.compare if is_compared else change.put
        put(np.array(columns["ids"].numpy()), _as_kept(columns))
    if is_compared:
        change.forget_others()


def _as_kept(columns: Mapping[str, Tensor]) -> Array:
    """Rows as ``TableRows`` keeps them: of eight bits, each has its scale behind it."""
    rows = columns["weight"]
    if rows.dtype == torch.int8:
        rows = torch.cat((rows, columns[SCALE].contiguous().view(torch.int8)), 1)
    elif rows.dtype != torch.float32:
        rows = rows.view(torch.int16)
    return np.ascontiguousarray(rows.numpy())


def _content(restored: Restored, name: str, change: Change) -> TableContent:
    saved = restored.described[name]
    assert isinstance(saved, SavedTable)
    return TableContent(saved, change.finish(), initialiser_of(saved.init))


def _dense(restored: Restored, name: str, saved: SavedDense) -> DenseContent:
    flat = [
        torch.empty(shape, dtype=dtype).reshape(-1)
        for shape, dtype in zip(saved.shapes, saved.dtypes, strict=True)
    ]
    places = set(range(len(saved.pieces)))
    pieces = restored.dense_data(name, places)
    if pieces.keys() != places:
        raise SnapshotError(f"{restored.folder}: {name!r} lacks some of its pieces")
    for place, piece in enumerate(saved.pieces):
        flat[piece.parameter][piece.start : piece.stop] = pieces[place].value.reshape(-1)
    shaped = zip(flat, saved.shapes, strict=True)
    return DenseContent(saved, tuple(each.view(shape) for each, shape in shaped))


def initialiser_of(text: str) -> Initialiser | None:
    """The initialiser that a description shows; None if it is of a class of the user's."""
    match = _CALL.fullmatch(text)
    kind = _INITIALISERS.get(match[1]) if match else None
    if match is None or kind is None:
        return None
    try:
        call = ast.parse(f"f({match[2]})", mode="eval").body
        assert isinstance(call, ast.Call)
        given = {str(each.arg): ast.literal_eval(each.value) for each in call.keywords}
        return kind(**given)
    except (SyntaxError, ValueError, TypeError) as error:
        raise SnapshotError(f"rows begin with {text[:80]!r}, which cannot be: {error}") from None
