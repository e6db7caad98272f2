"""Ids that were pushed, but not often enough for a row: exact counts."""

from __future__ import annotations

from types import ModuleType

import numpy as np

from tensorwire.parameter_server.kernels.arrays import Bools, Ints
from tensorwire.parameter_server.rows.index import Index, vacated
from tensorwire.parameter_server.rows.memory import Column


class Candidates:
    """The ids that wait for a row in one table.

    Args:
        enough: pushes that an id needs.
        kernels: see ``kernels``.
    """

    def __init__(self, enough: int, kernels: ModuleType) -> None:
        self.enough = enough
        self._k = kernels
        self._index = Index(kernels)
        self._rows = Column(np.int64, 3)  # id, pushes, when it was pushed last

    def __len__(self) -> int:
        return self._index.count

    @property
    def bytes(self) -> int:
        """The bytes that they take."""
        return self._index.bytes + 24 * len(self)

    def count(self, ids: Ints, pushes: Ints, time: int) -> Bools:
        """Counts pushes; True for each id that now has enough, which is then forgotten here."""
        before = len(self)
        rows = self._index.upsert(ids)
        self._rows.reserve(len(self))
        new = rows[rows >= before]
        self._rows.rows[new, 1] = 0
        self._rows.rows[rows, 0] = ids
        self._rows.rows[rows, 1] += pushes
        self._rows.rows[rows, 2] = time
        enough: Bools = self._rows.rows[rows, 1] >= self.enough
        self._remove(rows[enough])
        return enough

    def forget(self, time: int) -> None:
        """Forgets ids that were pushed last at ``time`` or before."""
        self._remove(np.flatnonzero(self._rows.rows[: len(self), 2] <= time))

    def _remove(self, rows: Ints) -> None:
        if not len(rows):
            return
        self._index.drop(rows, *vacated(len(self), rows), (self._rows,))

    def all(self) -> tuple[Ints, Ints, Ints]:
        """Ids, counts and times."""
        ids, pushes, times = self._rows.rows[: len(self)].T.copy()
        return ids, pushes, times

    def enter(self, ids: Ints, pushes: Ints, times: Ints) -> None:
        """Takes in ids with what was counted elsewhere."""
        rows = self._index.upsert(ids)
        self._rows.reserve(len(self))
        self._rows.rows[rows] = np.stack([ids, pushes, times], axis=1)

    def take(self, slots: Bools) -> tuple[Ints, Ints, Ints]:
        """Those whose slots are marked; they are no more here."""
        slot_of = np.empty(len(self), np.int64)
        self._k.slots(self._rows.rows[: len(self), 0].copy(), slot_of)
        rows = np.flatnonzero(np.asarray(slots)[slot_of])
        ids, pushes, times = self._rows.rows[rows].T.copy()
        self._remove(rows)
        return ids, pushes, times
