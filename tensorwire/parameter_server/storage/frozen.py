"""A table as it was at one moment, while it goes on changing.

At the moment itself all rows are marked, or those that are to be published, which takes a byte a
row. A writer copies them in pieces, each under the shard's lock; whoever changes a marked row that
was not copied yet saves it first.
"""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Final

import numpy as np

from tensorwire.parameter_server.kernels.arrays import Bytes, Ints

if TYPE_CHECKING:
    from tensorwire.parameter_server.storage.table import Rows, TableShard

_LOOK: Final = 16
"""Rows that are looked at for each that may be copied, where few are wanted."""


class Frozen:
    """The rows of one table as they were at one moment.

    Args:
        table: whose.
        kernels: see ``kernels``.
        wanted: by row, 1 for those that are to be remembered; None for all rows.
    """

    def __init__(self, table: TableShard, kernels: ModuleType, wanted: Bytes | None = None) -> None:
        self.count = len(table)
        self.spec = table.spec
        self.steps = table.steps
        self.rule = table.rule
        self.candidates = table.candidates()
        self._table = table
        self._k = kernels
        self._pending: Bytes = np.ones(self.count, np.uint8) if wanted is None else wanted
        self._saved: list[Rows] = []
        self._next = 0

    def save(self, rows: Ints) -> None:
        """Copies those of the rows that nobody has copied yet."""
        if self._next >= self.count:
            return
        claimed = np.empty(len(rows), np.int64)
        count = self._k.claim(self._pending, rows, claimed)
        if count:
            self._saved.append(self._table.taken(claimed[:count]))

    def thaw(self) -> None:
        """Ends remembering, as nobody needs to know any more how the table was."""
        if self in self._table.watchers.frozen:
            self._table.watchers.frozen.remove(self)

    def next_piece(self, size: int) -> Rows | None:
        """The next rows as they were; None after the last. Call it under the shard's lock."""
        while self._next < self.count:
            begin = self._next
            pending = np.flatnonzero(self._pending[begin : begin + _LOOK * size])
            rows = pending[:size] + begin
            is_all = len(pending) <= size
            self._next = min(begin + _LOOK * size, self.count) if is_all else int(rows[-1]) + 1
            self._pending[rows] = 0
            if len(rows):
                return self._table.taken(rows)
        return self._next_saved(size)

    def _next_saved(self, size: int) -> Rows | None:
        """Some of the rows that changed before they were copied, of several updates together."""
        pieces: list[Rows] = []
        while self._saved and sum(len(each.ids) for each in pieces) < size:
            pieces.append(self._saved.pop())
        return pieces[0].followed_by(pieces[1:]) if pieces else None
