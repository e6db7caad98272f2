"""Those who must know which rows of a table change: snapshots, published versions, trainers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tensorwire.parameter_server.kernels.arrays import Ints
from tensorwire.parameter_server.rows.memory import Column
from tensorwire.parameter_server.storage.changes import Changes
from tensorwire.parameter_server.storage.last_changes import LastChanges

if TYPE_CHECKING:
    from tensorwire.parameter_server.storage.frozen import Frozen


class Watchers:
    """The watchers of one table.

    Attributes:
        frozen: memories of the table as it was, to which rows are saved before they change.
        changes: marks of what has changed since a version was published; None if none ever was.
        last_changes: when each row has changed, once a trainer that keeps rows asks; else None.
    """

    def __init__(self) -> None:
        self.frozen: list[Frozen] = []
        self.changes: Changes | None = None
        self.last_changes: LastChanges | None = None

    def __bool__(self) -> bool:
        is_noted = self.changes is not None or self.last_changes is not None
        return is_noted or bool(self.frozen)

    def note(self, rows: Ints) -> None:
        """Saves and marks rows that are about to change."""
        self.save_before(rows)
        if self.changes is not None:
            self.changes.mark(rows)
        if self.last_changes is not None:
            self.last_changes.mark(rows)

    def save_before(self, rows: Ints) -> None:
        """Saves rows that are about to change for those who must know how they were."""
        for frozen in self.frozen:
            frozen.save(rows)

    def columns(self) -> tuple[Column, ...]:
        """The marks and numbers of rows, which move with them."""
        marks = () if self.changes is None else self.changes.columns().values()
        last = () if self.last_changes is None else (self.last_changes.column,)
        return (*marks, *last)
