"""Finds rows by id: open addressing, at most three quarters full, 16 bytes a place."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Final

import numpy as np

from tensorwire.parameter_server.kernels.arrays import Ints, Pairs
from tensorwire.parameter_server.kernels.sharing import divide
from tensorwire.parameter_server.rows.memory import Column

_FIRST: Final = 1024
_GROWTH: Final = 1.5
_FULL: Final = 0.75
_LOOK: Final = 64
"""Bytes of memory that looking one id up takes."""


class Index:
    """Numbers ids from 0 in the order in which they come.

    Args:
        kernels: see ``kernels``.

    Attributes:
        count: ids that are there.
        address: where its places begin.
        size: how many places there are.
    """

    def __init__(self, kernels: ModuleType) -> None:
        self._kernels = kernels
        self._take(_empty(_FIRST))
        self.count = 0

    def _take(self, pairs: Pairs) -> None:
        self._pairs = pairs
        self.address: int = pairs.__array_interface__["data"][0]
        self.size = len(pairs)

    @property
    def bytes(self) -> int:
        """The bytes that the index takes."""
        return self._pairs.nbytes

    def find(self, ids: Ints) -> Ints:
        """The row of each id; -1 where there is none."""
        rows = np.empty(len(ids), np.int64)
        k, table = self._kernels, self._pairs
        divide(len(ids), _LOOK * len(ids), lambda a, b: k.find(table, ids[a:b], rows[a:b]))
        return rows

    def upsert(self, ids: Ints) -> Ints:
        """The row of each id; new ones get the next rows, in order."""
        if self.count + len(ids) > _FULL * len(self._pairs):  # maybe, as most may be there
            self.reserve(int((self.find(ids) < 0).sum()))
        rows = np.empty(len(ids), np.int64)
        self.count = self._kernels.upsert(self._pairs, ids, rows, self.count)
        return rows

    def reserve(self, more: int) -> None:
        """Makes room for so many more ids, so that the next :meth:`upsert` moves nothing.

        Those who look ids up meanwhile find what was there before.
        """
        wanted = self.count + more
        if wanted <= _FULL * len(self._pairs):
            return
        size = len(self._pairs)
        while wanted > _FULL * size:
            size = int(size * _GROWTH) + 1
        self._rehash(size)

    def _rehash(self, size: int) -> None:
        pairs = _empty(size)
        self._kernels.rehash(self._pairs, pairs)
        self._take(pairs)

    def assign(self, ids: Ints, rows: Ints) -> None:
        """Gives ids these rows; those that are not there are put in."""
        self.upsert(ids)
        self._kernels.set_rows(self._pairs, ids, rows)

    def discard(self, ids: Ints) -> None:
        """Takes ids out, all of which are there, from an index whose rows :meth:`assign` gave."""
        self._kernels.remove(self._pairs, ids)
        self.count -= len(ids)

    def ids(self, places: int) -> Iterator[Ints]:
        """All ids, those of so many places of the index at a time."""
        for begin in range(0, self.size, places):
            part = self._pairs[begin : begin + places]
            yield part[part[:, 1] != -1, 0]

    def drop(self, rows: Ints, holes: Ints, moving: Ints, columns: Sequence[Column]) -> None:
        """Takes out the ids of rows, and gives those of the last rows their numbers.

        Shrinks, if far fewer are left.

        Args:
            rows: all different.
            holes: see :func:`vacated`.
            moving: likewise.
            columns: by row; the first one begins with the ids.
        """
        ids = columns[0].rows
        self._kernels.remove(self._pairs, ids[rows, 0].copy())
        self._kernels.set_rows(self._pairs, ids[moving, 0].copy(), holes)
        self.count -= len(rows)
        for column in columns:
            column.rows[holes] = column.rows[moving]
            column.release(self.count)
        size = max(_FIRST, int(self.count / _FULL * _GROWTH))
        if 2 * size < len(self._pairs):
            self._rehash(size)


def _empty(size: int) -> Pairs:
    pairs = np.empty((size, 2), np.int64)
    pairs[:, 1] = -1
    return pairs


def vacated(count: int, rows: Ints) -> tuple[Ints, Ints]:
    """The places that rows leave, and the last rows, which take them.

    Args:
        count: rows before.
        rows: those that go; all different.
    """
    left = count - len(rows)
    gone = np.zeros(count, bool)
    gone[rows] = True
    return np.flatnonzero(gone[:left]), np.flatnonzero(~gone[left:]) + left
