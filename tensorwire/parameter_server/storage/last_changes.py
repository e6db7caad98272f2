"""Numbers the changes of a shard, so that trainers which keep rows are sent only what changed.

A trainer says of each row that it keeps up to which number it knows it. Numbers are those of one
server's copy of a shard: they end, and others begin, with a roll-back, a resize, another head and
everything else after which nobody can say what has changed.
"""

from __future__ import annotations

import secrets

import numpy as np

from tensorwire.parameter_server.kernels.arrays import Bools, Ints
from tensorwire.parameter_server.rows.memory import Column

_BITS = 62


class Numbering:
    """The changes of one shard, counted from when a trainer first kept rows.

    Attributes:
        life: names this count; no other one has the same, at this server or another.
        number: changes so far.
    """

    def __init__(self) -> None:
        self.life = 1 + secrets.randbits(_BITS)
        self.number = 0


class LastChanges:
    """The number of the last change of each row of one table.

    Rows that are there when this is made count as changed just now.

    Args:
        numbering: of the shard.
        count: rows of the table.

    Attributes:
        column: the numbers, which move with the rows.
    """

    def __init__(self, numbering: Numbering, count: int) -> None:
        self._numbering = numbering
        self.column = Column(np.int64, 1)
        self.column.reserve(count)
        self.column.rows[:count] = numbering.number

    def mark(self, rows: Ints) -> None:
        """Marks these rows as changed."""
        self.column.rows[rows, 0] = self._numbering.number

    def since(self, rows: Ints, known: Ints) -> Bools:
        """True for each row that was changed after the number up to which it is known.

        Args:
            rows: negative for ids without a row, which count as never changed.
            known: the number of each row up to which it is known.
        """
        last = self.column.rows[np.maximum(rows, 0), 0]
        changed: Bools = (last > known) & (rows >= 0)
        return changed
