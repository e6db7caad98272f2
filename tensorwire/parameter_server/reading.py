"""Reads tables out of snapshots, without any cluster."""

from __future__ import annotations

import os

import torch
from torch import Tensor

from tensorwire.checkpoint import NotSavedError
from tensorwire.parameter_server.snapshots.contents import require_different
from tensorwire.parameter_server.snapshots.published import saved_at
from tensorwire.parameter_server.snapshots.saved import SavedDense, SavedTable


def read(
    folder: str | os.PathLike[str], table: str, column: str = "weight"
) -> tuple[Tensor, Tensor]:
    """Reads a table of a snapshot, in any process.

    Args:
        folder: the snapshot's.
        table: name of the table.
        column: what of each row: ``"weight"``, or the state of its rule, such as
            ``"state.sum"``. Default the weights.

    Returns:
        The ids in ascending order, and a row for each, as it was kept.

    Raises:
        NotSavedError: there is no such table or column in the snapshot (also a ``KeyError``).
        NoCheckpointError: there is no snapshot (also a ``FileNotFoundError``).
        CheckpointError: it is damaged.

    Example::

        ids, weight = ps.read("checkpoints/1000", "items")
    """
    restored = saved_at(folder)
    tables = [n for n, each in restored.described.items() if isinstance(each, SavedTable)]
    if table not in tables:
        raise NotSavedError(f"read: there is no table {table!r} in {folder}; it has {tables}")
    ids, rows = [], []
    for _, columns in restored.pieces(table):
        if column not in columns:
            raise NotSavedError(f"read: rows of {table!r} have {sorted(columns)}, not {column!r}")
        ids.append(columns["ids"].reshape(-1))
        rows.append(columns[column])
    if not ids:
        return torch.empty(0, dtype=torch.int64), torch.empty(0, 0)
    require_different(table, torch.cat(ids).numpy())
    every, order = torch.sort(torch.cat(ids))
    return every, torch.cat(rows)[order]


def read_dense(folder: str | os.PathLike[str], name: str) -> Tensor | None:
    """Reads the dense parameters of a snapshot.

    Args:
        folder: the snapshot's.
        name: of the dense parameters in the cluster.

    Returns:
        The elements of all parameters, one behind the other; None if there are none.

    Raises:
        NoCheckpointError: there is no snapshot (also a ``FileNotFoundError``).
        CheckpointError: it is damaged.
    """
    restored = saved_at(folder)
    saved = restored.described.get(name)
    if not isinstance(saved, SavedDense) or not saved.pieces:
        return None
    places = range(len(saved.pieces))
    pieces = restored.dense_data(name, set(places))
    return torch.cat([pieces[place].value.reshape(-1) for place in places])
