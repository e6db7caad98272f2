"""Finds rows by id: open addressing, at most three quarters full, 16 bytes a place."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Final

import numpy as np

from tensorwire.parameter_server.kernels.arrays import Ints, Pairs
from tensorwire.parameter_server.kernels.sharing import divide

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
        self._table = pairs
        self.address: int = pairs.__array_interface__["data"][0]
        self.size = len(pairs)

    @property
    def bytes(self) -> int:
        """The bytes that the index takes."""
        return self._table.nbytes

    def find(self, ids: Ints) -> Ints:
        """The row of each id; -1 where there is none."""
        rows = np.empty(len(ids), np.int64)
        k, table = self._kernels, self._table
        divide(len(ids), _LOOK * len(ids), lambda a, b: k.find(table, ids[a:b], rows[a:b]))
        return rows

    def upsert(self, ids: Ints) -> Ints:
        """The row of each id; new ones get the next rows, in order."""
        if self.count + len(ids) > _FULL * len(self._table):  # maybe, as most may be there
            self.reserve(int((self.find(ids) < 0).sum()))
        rows = np.empty(len(ids), np.int64)
        self.count = self._kernels.upsert(self._table, ids, rows, self.count)
        return rows

    def reserve(self, more: int) -> None:
        """Makes room for so many more ids, so that the next :meth:`upsert` moves nothing.

        Those who look ids up meanwhile find what was there before.
        """
        wanted = self.count + more
        if wanted <= _FULL * len(self._table):
            return
        size = len(self._table)
        while wanted > _FULL * size:
            size = int(size * _GROWTH) + 1
        self._rehash(size)

    def _rehash(self, size: int) -> None:
        table = _empty(size)
        self._kernels.rehash(self._table, table)
        self._take(table)

    def assign(self, ids: Ints, rows: Ints) -> None:
        """Gives ids these rows; those that are not there are put in."""
        self.upsert(ids)
        self._kernels.set_rows(self._table, ids, rows)

    def discard(self, ids: Ints) -> None:
        """Takes ids out, all of which are there, from an index whose rows :meth:`assign` gave."""
        self._kernels.remove(self._table, ids)
        self.count -= len(ids)

    def ids(self, places: int) -> Iterator[Ints]:
        """All ids, those of so many places of the index at a time."""
        table = self._table
        for begin in range(0, len(table), places):
            part = table[begin : begin + places]
            yield part[part[:, 1] != -1, 0]

    def remove(self, ids: Ints) -> None:
        """Takes ids out, all of which are there. Does not renumber the others."""
        self._kernels.remove(self._table, ids)

    def renumber(self, ids: Ints, rows: Ints, count: int) -> None:
        """Gives ids other rows; from now on there are ``count``. Shrinks, if that is far fewer."""
        self._kernels.set_rows(self._table, ids, rows)
        self.count = count
        size = max(_FIRST, int(count / _FULL * _GROWTH))
        if 2 * size < len(self._table):
            self._rehash(size)


def _empty(size: int) -> Pairs:
    table = np.empty((size, 2), np.int64)
    table[:, 1] = -1
    return table
