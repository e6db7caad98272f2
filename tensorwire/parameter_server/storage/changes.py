"""The rows of a table that have changed since a version was published, and the ids that went.

Marks are a byte a row, in two generations. What changes is *recent* until the next cut at which a
version is taken; there it becomes *unpublished*, together with what an earlier version should have
published and did not. Only when a version is known to be whole are unpublished marks cleared, so
that a full disk or a lost server makes the next version larger and loses nothing.

Ids whose rows were evicted are kept alike. They may have rows again: whoever applies a version
takes ids out first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from tensorwire.parameter_server.kernels.arrays import Array, Bools, Bytes, Ints
from tensorwire.parameter_server.rows.memory import Column

RECENT: Final = "changed.recent"
UNPUBLISHED: Final = "changed.unpublished"
"""The names under which marks travel with rows."""

_RESERVED: Final = 1 << 35
"""Bytes of addresses for marks: those of as many rows as a column of ids has."""


@dataclass(frozen=True, slots=True)
class Gone:
    """Ids of rows that were evicted.

    Args:
        recent: since the last cut.
        unpublished: before it, but not published for certain.
    """

    recent: Ints
    unpublished: Ints


class Changes:
    """The changes of one table. Not for several threads at a time."""

    def __init__(self) -> None:
        self._recent = Column(np.uint8, 1, _RESERVED)
        self._unpublished = Column(np.uint8, 1, _RESERVED)
        self._is_published = True
        self._gone_recently: list[Ints] = []
        self._gone: list[Ints] = []

    def columns(self) -> dict[str, Column]:
        """The marks of rows, as columns of a table."""
        return {RECENT: self._recent, UNPUBLISHED: self._unpublished}

    def mark(self, rows: Ints) -> None:
        """Marks these rows as changed."""
        self._recent.rows[rows, 0] = 1

    def note_gone(self, ids: Ints) -> None:
        """Notes the ids of rows that are evicted."""
        if len(ids):
            self._gone_recently.append(ids)

    def taken(self, rows: Ints) -> dict[str, Bytes]:
        """A copy of the marks of some rows."""
        return {name: column.rows[rows] for name, column in self.columns().items()}

    def enter(self, rows: Ints, columns: Mapping[str, Array]) -> None:
        """Takes in rows of another table, with marks if changes were noted there."""
        if RECENT not in columns:
            self.mark(rows)
            return
        for name, column in self.columns().items():
            column.rows[rows] = columns[name]
        self._is_published = False

    def cut(self, count: int) -> None:
        """Cuts a version: all that was recent is to be published.

        Args:
            count: rows that the table has.
        """
        if self._is_published:
            self._recent, self._unpublished = self._unpublished, self._recent
        else:
            self._unpublished.rows[:count] |= self._recent.rows[:count]
            self._recent.release(0)
        self._is_published = False
        self._gone += self._gone_recently
        self._gone_recently = []

    def publish(self) -> None:
        """Notes that all that was to be published at the last cut is published."""
        self._unpublished.release(0)
        self._is_published = True
        self._gone = []

    def unpublished(self, count: int) -> Bytes:
        """A byte for each row, 1 for those that are to be published."""
        marks: Bytes = self._unpublished.rows[:count, 0].copy()
        return marks

    @property
    def gone(self) -> Gone:
        """The ids that were evicted, each once."""
        return Gone(_once(self._gone_recently), _once(self._gone))

    def enter_gone(self, gone: Gone) -> None:
        """Takes in ids that were evicted where their slots were before."""
        self._gone_recently.append(gone.recent)
        self._gone.append(gone.unpublished)

    def take_gone(self, is_leaving: Callable[[Ints], Bools]) -> Gone:
        """The evicted ids of slots that leave; they are no more here.

        Args:
            is_leaving: says of each of some ids if its slot leaves.
        """
        recent, before = self.gone.recent, self.gone.unpublished
        going = is_leaving(recent), is_leaving(before)
        self._gone_recently, self._gone = [recent[~going[0]]], [before[~going[1]]]
        return Gone(recent[going[0]], before[going[1]])


def _once(ids: list[Ints]) -> Ints:
    return np.unique(np.concatenate(ids)) if ids else np.empty(0, np.int64)
