"""Decides which rows a trainer may still use that it fetched before, and keeps them. No I/O.

A row that was fetched ``staleness`` steps ago may be used, an older one may not: neither what
others have pushed since nor what this trainer has pushed is in it.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from tensorwire.parameter_server.declarations.arguments import whole
from tensorwire.parameter_server.kernels import kernels
from tensorwire.parameter_server.kernels.arrays import Ints
from tensorwire.parameter_server.rows.index import Index, vacated
from tensorwire.parameter_server.rows.memory import Column


@dataclass(frozen=True, slots=True)
class Cache:
    """Lets each trainer keep rows of a table for some steps instead of fetching them each time.

    Args:
        rows: how many are kept at most.
        staleness: steps for which a fetched row is used; 1 means in the next step too.

    Raises:
        TypeError: one of them is no whole number.
        ValueError: one of them is smaller than 1.
    """

    rows: int
    staleness: int

    def __post_init__(self) -> None:
        whole("Cache", "rows", self.rows)
        whole("Cache", "staleness", self.staleness)


class RowCache:
    """The rows of one table that one trainer keeps.

    Args:
        rules: how many rows, and for how long.
        dim: columns of the table.

    Attributes:
        hits: rows that were found.
        misses: rows that were not there or too old.
    """

    def __init__(self, rules: Cache, dim: int) -> None:
        self.rules = rules
        self.hits = 0
        self.misses = 0
        self._dim = dim
        self._k: ModuleType = kernels()
        self.clear()

    def __len__(self) -> int:
        return self._index.count

    def clear(self) -> None:
        """Forgets all rows, as after a roll-back."""
        self._index = Index(self._k)
        self._ids = Column(np.int64, 1)
        self._step = Column(np.int64, 1)
        self._values = Column(np.float32, self._dim)

    def lookup(self, ids: Tensor, step: int, out: Tensor) -> Tensor:
        """Writes the rows that may be used into ``out``.

        Args:
            ids: all different.
            step: of the pull: how many pushes its trainer has made.
            out: a row for each id.

        Returns:
            True for each id whose row must be fetched.
        """
        places = self._index.find(ids.numpy())
        age = step - self._step.rows[np.maximum(places, 0), 0]
        missing = (places < 0) | (age > self.rules.staleness) | (age < 0)
        places[missing] = -1
        self._k.gather(self._values.rows, places, out.numpy())
        self.misses += int(missing.sum())
        self.hits += len(missing) - int(missing.sum())
        return torch.from_numpy(missing)

    def store(self, ids: Tensor, rows: Tensor, step: int) -> None:
        """Keeps rows that were fetched.

        Args:
            ids: all different.
            rows: one for each id.
            step: of the pull that fetched them.
        """
        ids, rows = ids[: self.rules.rows], rows[: self.rules.rows]
        self._make_room(ids.numpy(), step)
        places = self._index.upsert(ids.numpy())
        for column in (self._ids, self._step, self._values):
            column.reserve(len(self))
        self._ids.rows[places, 0] = ids.numpy()
        self._step.rows[places, 0] = step
        self._k.scatter(np.ascontiguousarray(rows.numpy()), places, self._values.rows)

    def _make_room(self, ids: Ints, step: int) -> None:
        """Removes rows until these fit: those that are too old, then those fetched first."""
        new = int((self._index.find(ids) < 0).sum())
        excess = len(self) + new - self.rules.rows
        if excess <= 0:
            return
        fetched = self._step.rows[: len(self), 0]
        staying = np.zeros(len(self), bool)
        known = self._index.find(ids)
        staying[known[known >= 0]] = True
        old = np.flatnonzero(~staying & (step - fetched > self.rules.staleness))
        if len(old) < excess:
            others = np.flatnonzero(~staying)
            old = others[np.argsort(fetched[others], kind="stable")[:excess]]
        columns = (self._ids, self._step, self._values)
        self._index.drop(old, *vacated(len(self), old), columns)
