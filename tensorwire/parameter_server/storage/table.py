"""One shard's share of a table: ids, which come in and must leave, over a store of rows.

Rows are numbered from 0 without gaps: when rows go, the last ones take their numbers. A pull
changes nothing. Not for several threads at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Final

import numpy as np
import torch
from torch import Tensor

from tensorwire.parameter_server.declarations.rules import Rule
from tensorwire.parameter_server.declarations.spec import TableSpec
from tensorwire.parameter_server.kernels.arrays import Array, Bools, Bytes, Floats, Ints, Pairs
from tensorwire.parameter_server.rows.index import Index, vacated
from tensorwire.parameter_server.rows.memory import Column
from tensorwire.parameter_server.storage.candidates import Candidates
from tensorwire.parameter_server.storage.changes import Gone
from tensorwire.parameter_server.storage.frozen import Frozen
from tensorwire.parameter_server.storage.last_changes import LastChanges, Numbering
from tensorwire.parameter_server.storage.row_store import HostRows, store_for
from tensorwire.parameter_server.storage.watchers import Watchers

_SWEEPS: Final = 8
"""The number of searches for rows that are too old while one row grows too old."""


@dataclass(frozen=True, slots=True)
class Part:
    """The push of one trainer to a table.

    Args:
        ids: all different.
        grad: a row for each; it stays as it is.
        places: the rows that a pull has found for these ids, or None.
    """

    ids: Ints
    grad: Floats
    places: Places | None = None


@dataclass(frozen=True, slots=True)
class Places:
    """Rows as they were numbered at one time."""

    rows: Ints
    layout: int


class Rows:
    """Some rows with their ids and state, apart from any table."""

    __slots__ = ("columns", "ids")

    def __init__(self, ids: Ints, columns: dict[str, Array]) -> None:
        self.ids = ids
        self.columns = columns

    def followed_by(self, others: Sequence[Rows]) -> Rows:
        """These rows and others of the same table, with the columns that all have.

        Marks of changes are missing from rows that were copied while nobody published.
        """
        every = [self, *others]
        ids = np.concatenate([each.ids for each in every])
        columns = {
            name: np.concatenate([each.columns[name] for each in every])
            for name in self.columns
            if all(name in each.columns for each in others)
        }
        return Rows(ids, columns)


class TableShard:
    """The rows of one table on one shard.

    Args:
        spec: what the table is.
        kernels: see ``kernels``.
        device: where float32 rows and their state are; None for the host's memory. The index,
            and rows of 16 bits, are always in the host's memory.

    Attributes:
        rule: how rows move from now on; set by :meth:`set_hyper`.
        hyper: its hyper-parameters.
        steps: how often the table was updated.
        layout: changes when rows get other numbers.
        index: where the row of each id is.
        store: the rows and their state.
        plain: the store if rows are float32 in the host's memory, every id gets one, and none
            leaves: such tables ``storage.tables`` reads and moves together. Else None.
        row_bytes: the bytes that one more row takes, with its place in the index.
        watchers: those who must know which rows change; false if there are none.
    """

    def __init__(
        self, spec: TableSpec, kernels: ModuleType, device: torch.device | None = None
    ) -> None:
        self.spec = spec
        self.rule = spec.rule
        self.hyper = spec.rule.hyper()
        self.steps = 0
        self.layout = 0
        self.dropped = 0
        self.evicted = 0
        self._k = kernels
        self.index = Index(kernels)
        self._ids = Column(np.int64, 1)
        self.store = store_for(spec, kernels, device)
        self._touched = Column(np.int64, 1) if spec.evict else None
        self._candidates = Candidates(spec.admit.pushes, kernels) if spec.admit else None
        self.swept = 0
        self.watchers = Watchers()
        has_all = spec.admit is None and spec.evict is None
        self.plain = self.store if has_all and isinstance(self.store, HostRows) else None
        self._width = self.store.row_bytes + 8 + (8 if spec.evict else 0)
        self.row_bytes = self._width + 32

    def __len__(self) -> int:
        return self.index.count

    @property
    def bytes(self) -> int:
        """The bytes that rows, state, index and marks of changes take."""
        rows = self._width * len(self)
        waiting = self._candidates.bytes if self._candidates else 0
        marks = 2 * len(self) if self.watchers.changes is not None else 0
        return rows + self.index.bytes + waiting + marks

    # --- reading

    def pull(self, ids: Ints, out: Floats, time: int) -> Places:
        """Writes the row of each id into ``out``: as it is, or as it would begin."""
        rows = self.find(ids, time)
        self.read(rows, ids, out)
        return Places(rows, self.layout)

    def read(self, rows: Ints, ids: Ints, out: Floats) -> None:
        """Writes rows that were found into ``out``, or the initial values of ids without one."""
        self.store.read(rows, out)
        self.fill(rows, ids, out)

    def fill(self, rows: Ints, ids: Ints, out: Floats) -> None:
        """Writes the initial values of ids that have no row.

        Args:
            rows: the row of each id, negative where there is none.
            ids: the ids.
            out: gets the values.
        """
        absent = np.flatnonzero(rows < 0)
        if len(absent):
            self.spec.init.fill(out, absent, ids[absent])

    def find(self, ids: Ints, time: int) -> Ints:
        """The row of each id; none for a row that is too old, although it is still there."""
        rows = self.index.find(ids)
        if self._touched is not None:
            old = self._is_old(rows, time)
            rows[old] = -1
        return rows

    def _is_old(self, rows: Ints, time: int) -> Bools:
        assert self._touched is not None
        assert self.spec.evict is not None
        touched = self._touched.rows[np.maximum(rows, 0), 0]
        old: Bools = (rows >= 0) & (time - touched >= self.spec.evict.steps)
        return old

    def changed(self, rows: Ints, known: Ints, numbering: Numbering) -> Bools:
        """True for each id whose row may be another than its asker knows.

        Args:
            rows: the row of each id, negative where there is none.
            known: up to which change the asker knows each; negative for not at all.
            numbering: counts the changes.
        """
        if self.watchers.last_changes is None:
            self.watchers.last_changes = LastChanges(numbering, len(self))
        strange = known < 0
        if self.spec.evict is not None:  # a row that is not there may have been
            strange = strange | (rows < 0)
        return strange | self.watchers.last_changes.since(rows, known)

    # --- changing

    def apply(self, parts: Sequence[Part], time: int, share: float | None = None) -> None:
        """Makes one update of all of these together.

        Args:
            parts: one for each trainer, in order.
            time: steps of the fastest trainer, this one included.
            share: what the sum of gradients is divided by; None for nothing.
        """
        self.steps += 1
        ids, grad, counts, places = self._merged(parts)
        if share is not None:
            grad = grad / np.float32(share)
        if self._candidates is not None:
            ids, grad, places = self._admitted(ids, grad, counts, time)
        rows = self.rows_for(ids, places, time - 1)
        self.watchers.note(rows)
        self.store.update(rows, ids, grad, self.rule, self.steps)
        if self._touched is not None:
            self._touched.rows[rows, 0] = time
            self._sweep(time)

    def _merged(self, parts: Sequence[Part]) -> tuple[Ints, Floats, Ints | None, Places | None]:
        """All gradients of one id added up in the parts' order, and how many parts have it."""
        if len(parts) == 1:
            return parts[0].ids, parts[0].grad, None, parts[0].places
        every = np.concatenate([part.ids for part in parts])
        scratch: Pairs = np.empty((max(2 * len(every), 2), 2), np.int64)
        scratch[:, 1] = -1
        unique, inverse = np.empty_like(every), np.empty_like(every)
        count = self._k.dedup(scratch, every, unique, inverse)
        total: Floats = np.zeros((count, self.spec.dim), np.float32)
        begin = 0
        for part in parts:
            self._k.add_rows(part.grad, inverse[begin : begin + len(part.ids)], total)
            begin += len(part.ids)
        return unique[:count].copy(), total, np.bincount(inverse, minlength=count), None

    def _admitted(
        self, ids: Ints, grad: Floats, counts: Ints | None, time: int
    ) -> tuple[Ints, Floats, None]:
        """Leaves out ids that were not pushed often enough."""
        assert self._candidates is not None
        rows = self.find(ids, time - 1)
        strange = np.flatnonzero(rows < 0)
        pushes = np.ones(len(strange), np.int64) if counts is None else counts[strange]
        enough = self._candidates.count(ids[strange], pushes, time)
        kept = np.ones(len(ids), bool)
        kept[strange[~enough]] = False
        self.dropped += int((~enough).sum())
        return ids[kept], np.ascontiguousarray(grad[kept]), None

    def rows_for(self, ids: Ints, places: Places | None, time: int) -> Ints:
        """The row of each id; makes those that are not there.

        Args:
            ids: all different.
            places: the rows that a pull has found for them, or None.
            time: steps of the fastest trainer before this one.
        """
        before = len(self)
        if places is not None and places.layout == self.layout:
            rows = places.rows
            missing = np.flatnonzero(rows < 0)
            if len(missing):
                rows = rows.copy()
                rows[missing] = self.index.upsert(ids[missing])
        else:
            rows = self.index.upsert(ids)
        if len(self) > before:
            new = np.flatnonzero(rows >= before)
            self._begin(rows[new], ids[new])
        if self._touched is not None:
            old = np.flatnonzero((rows < before) & self._is_old(rows, time))
            self.watchers.save_before(rows[old])
            self._begin(rows[old], ids[old])
        return rows

    def fill_new(self, ids: Ints, values: Floats) -> None:
        """Gives rows to ids that have none; those that have one stay as they are.

        Args:
            ids: all different.
            values: a row for each.
        """
        new = self.index.find(ids) < 0
        ids, values = ids[new], np.ascontiguousarray(values[new])
        rows = self.rows_for(ids, None, self.swept)
        self.store.write(rows, ids, values, self.steps)
        self.watchers.note(rows)
        if self._touched is not None:
            self._touched.rows[rows, 0] = self.swept

    def _begin(self, rows: Ints, ids: Ints) -> None:
        """Gives rows their initial values."""
        self._reserve()
        self._ids.rows[rows, 0] = ids
        self.store.begin(rows, ids, self.rule, self.steps)

    def _reserve(self) -> None:
        """Makes room for the rows that the index has numbered."""
        count = len(self)
        self.store.reserve(count)
        for column in self._own_columns():
            column.reserve(count)

    def redeclare(self, spec: TableSpec) -> None:
        """Becomes the table of a declaration that keeps the same columns."""
        self.spec = self.store.spec = spec
        self.set_hyper(spec.rule)
        if spec.admit is not None and self._candidates is not None:
            self._candidates.enough = spec.admit.pushes

    def another(self, spec: TableSpec, device: torch.device | None) -> TableShard:
        """An empty table beside this one."""
        return TableShard(spec, self._k, device)

    def set_hyper(self, rule: Rule) -> None:
        """The next updates are made with these hyper-parameters."""
        self.rule = rule
        self.hyper = rule.hyper()

    def become(
        self, hyper: tuple[float, ...], steps: int, swept: int, counts: tuple[int, int]
    ) -> None:
        """Goes on where another copy of this table was, which ``enter`` brings the rows of.

        Args:
            hyper: of the rule.
            steps: updates that were made.
            swept: when rows that are too old were last looked for.
            counts: rows that were evicted, and gradients that were dropped.
        """
        self.set_hyper(self.rule.with_hyper(hyper))
        self.steps, self.swept = steps, swept
        self.evicted, self.dropped = counts

    # --- leaving

    def _sweep(self, time: int) -> None:
        """Now and then, removes the rows that are too old."""
        assert self.spec.evict is not None
        assert self._touched is not None
        pause = max(1, self.spec.evict.steps // _SWEEPS)
        if time < self.swept + pause:
            return
        self.swept = time
        age = time - self._touched.rows[: len(self), 0]
        old = np.flatnonzero(age >= self.spec.evict.steps)
        self.evicted += len(old)
        if self.watchers.changes is not None:
            self.watchers.changes.note_gone(self._ids.rows[old, 0].copy())
        self.remove(old)
        if self._candidates is not None:
            self._candidates.forget(time - self.spec.evict.steps)

    def _own_columns(self) -> tuple[Column, ...]:
        """The columns of the table itself: ids, ages, marks and numbers of changes."""
        ages = () if self._touched is None else (self._touched,)
        return (self._ids, *ages, *self.watchers.columns())

    def remove(self, rows: Ints) -> None:
        """Removes rows, all different; the last ones take their numbers."""
        if not len(rows):
            return
        left = len(self) - len(rows)
        holes, moving = vacated(len(self), rows)
        self.watchers.save_before(np.concatenate([rows, moving]))
        self.store.move(moving, holes)
        self.store.release(left)
        self.index.drop(rows, holes, moving, self._own_columns())
        self.layout += 1

    # --- as a whole

    def rows_in(self, slots: Bools) -> Ints:
        """The rows whose ids lie in slots that are marked."""
        return np.flatnonzero(self.in_slots(self._ids.rows[: len(self), 0].copy(), slots))

    def in_slots(self, ids: Ints, slots: Bools) -> Bools:
        """True for each id that lies in a slot that is marked."""
        slot_of = np.empty(len(ids), np.int64)
        self._k.slots(np.ascontiguousarray(ids), slot_of)
        return np.asarray(slots)[slot_of]

    def taken(self, rows: Ints) -> Rows:
        """A copy of some rows."""
        columns = self.store.take(rows)
        if self._touched is not None:
            columns["touched"] = self._touched.rows[rows]
        if self.watchers.changes is not None:
            columns |= self.watchers.changes.taken(rows)
        return Rows(self._ids.rows[rows, 0], columns)

    def enter(self, rows: Rows) -> None:
        """Takes in rows of another table."""
        places = self.index.upsert(rows.ids)
        self._reserve()
        self.watchers.save_before(places)
        self._ids.rows[places, 0] = rows.ids
        self.store.put(places, rows.columns)
        if self._touched is not None and "touched" in rows.columns:
            self._touched.rows[places] = rows.columns["touched"]
        if self.watchers.changes is not None:
            self.watchers.changes.enter(places, rows.columns)

    def take_candidates(self, slots: Bools) -> tuple[Ints, Ints, Ints] | None:
        """Ids in marked slots that wait for a row, with their counts; they are no more here."""
        return self._candidates.take(slots) if self._candidates is not None else None

    def enter_candidates(self, waiting: tuple[Ints, Ints, Ints]) -> None:
        """Takes in ids that wait for a row."""
        if self._candidates is not None:
            self._candidates.enter(*waiting)

    def candidates(self) -> tuple[Ints, Ints, Ints] | None:
        """A copy of the ids that wait for a row, with their counts."""
        return self._candidates.all() if self._candidates is not None else None

    def take_gone(self, slots: Bools) -> Gone | None:
        """Evicted ids in marked slots, which were to be published; they are no more here."""
        if self.watchers.changes is None:
            return None
        return self.watchers.changes.take_gone(lambda ids: self.in_slots(ids, slots))

    # --- as it was

    def freeze(self, wanted: Bytes | None = None) -> Frozen:
        """Remembers the rows as they are now, while they go on changing; see :class:`Frozen`.

        Args:
            wanted: by row, 1 for those that are to be remembered; None for all rows.
        """
        frozen = Frozen(self, self._k, wanted)
        self.watchers.frozen.append(frozen)
        return frozen

    def pieces(self, size: int) -> Iterator[Rows]:
        """All rows, copied some at a time."""
        for begin in range(0, len(self), size):
            yield self.taken(np.arange(begin, min(begin + size, len(self))))

    def all(self) -> tuple[Tensor, Tensor]:
        """All ids and rows, for tests and small tables."""
        rows = np.arange(len(self))
        out: Floats = np.empty((len(self), self.spec.dim), np.float32)
        self.store.read(rows, out)
        return torch.from_numpy(self._ids.rows[: len(self), 0].copy()), torch.from_numpy(out)
