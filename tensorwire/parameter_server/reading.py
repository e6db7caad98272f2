"""Reads tables out of snapshots, without any cluster."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import Tensor

from tensorwire.parameter_server.server.writing import Restored


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
        KeyError: there is no such table or column in the snapshot.
        FileNotFoundError: there is no snapshot.

    Example::

        ids, weight = ps.read("checkpoints/1000", "items")
    """
    saved = Restored.open(Path(folder))
    if table not in saved.tables():
        raise KeyError(f"read: there is no table {table!r} in {folder}; it has {saved.tables()}")
    ids, rows = [], []
    for _, columns in saved.pieces(table):
        if column not in columns:
            raise KeyError(f"read: rows of {table!r} have {sorted(columns)}, not {column!r}")
        ids.append(columns["ids"].reshape(-1))
        rows.append(columns[column])
    if not ids:
        return torch.empty(0, dtype=torch.int64), torch.empty(0, 0)
    every, order = torch.sort(torch.cat(ids))
    return every, torch.cat(rows)[order]
