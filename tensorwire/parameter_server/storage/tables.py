"""Reads and moves rows of several tables of one width, in one go where they are kept alike.

A gather, an update and a look at the indexes are one call of a kernel each, for any number of
tables. Tables that are kept otherwise (16 bits, on a device, with admission or eviction, under a
rule that has no kernel for several tables) take part too, one after the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import attrgetter
from types import ModuleType

import numpy as np

from tensorwire.parameter_server.declarations.rules import Kernel, Touched, kernel_of
from tensorwire.parameter_server.kernels.arrays import Bools, Floats, Ints, Pairs
from tensorwire.parameter_server.kernels.sharing import divide
from tensorwire.parameter_server.storage import updates
from tensorwire.parameter_server.storage.last_changes import Numbering
from tensorwire.parameter_server.storage.row_store import HostRows
from tensorwire.parameter_server.storage.table import Part, Places, TableShard

Tables = Sequence[TableShard]
_plain_of = attrgetter("plain")
"""The store of a table that is kept like others; None for one that is not. Calls no Python."""


@dataclass(frozen=True, slots=True)
class ManyPlaces:
    """Rows of several tables as they were numbered at one time.

    Args:
        rows: those of one table after those of another.
        layouts: of each table.
    """

    rows: Ints
    layouts: list[int]


@dataclass(frozen=True, slots=True)
class ManyParts:
    """The push of one trainer to several tables.

    Args:
        sizes: ids of each table.
        ids: those of one table after those of another, all different within a table.
        grad: a row for each; it stays as it is.
        places: the rows that a pull has found for these ids, or None.
    """

    sizes: tuple[int, ...]
    ids: Ints
    grad: Floats
    places: ManyPlaces | None = None

    def of(self, place: int) -> Part:
        """The part of one table."""
        begin = sum(self.sizes[:place])
        end = begin + self.sizes[place]
        places = None
        if self.places is not None:
            places = Places(self.places.rows[begin:end], self.places.layouts[place])
        return Part(self.ids[begin:end], self.grad[begin:end], places)


def pull(
    k: ModuleType, tables: Tables, sizes: Sequence[int], ids: Ints, out: Floats, time: int
) -> ManyPlaces:
    """Writes the row of each id into ``out``: as it is, or as it would begin.

    Args:
        k: the kernels.
        tables: whose rows.
        sizes: ids of each.
        ids: those of one table after those of another.
        out: gets a row for each.
        time: steps of the fastest trainer.
    """
    ends = [0, *accumulate(sizes)]
    layouts = [table.layout for table in tables]
    rows = np.empty(len(ids), np.int64)
    plain: list[HostRows] = list(map(_plain_of, tables))
    if k.UPDATES is None or len(tables) == 1 or not all(plain):
        for begin, end, table in zip(ends, ends[1:], tables, strict=False):
            rows[begin:end] = table.pull(ids[begin:end], out[begin:end], time).rows
        return ManyPlaces(rows, layouts)
    counts = np.array(ends[1:])
    _find(k, tables, counts, ids, rows)
    _gather(k, plain, counts, rows, out)
    _fill(tables, ends, rows, ids, out)
    return ManyPlaces(rows, layouts)


def find(k: ModuleType, tables: Tables, sizes: Sequence[int], ids: Ints, time: int) -> ManyPlaces:
    """The row of each id; arguments as of :func:`pull`."""
    ends = [0, *accumulate(sizes)]
    rows = np.empty(len(ids), np.int64)
    if k.UPDATES is None or not all(map(_plain_of, tables)):
        for begin, end, table in zip(ends, ends[1:], tables, strict=False):
            rows[begin:end] = table.find(ids[begin:end], time)
    else:
        _find(k, tables, np.array(ends[1:]), ids, rows)
    return ManyPlaces(rows, [table.layout for table in tables])


def changed(
    tables: Tables, sizes: Sequence[int], rows: Ints, known: Ints, numbering: Numbering
) -> tuple[Bools, list[int]]:
    """Finds the ids whose row may be another than its asker knows.

    Args:
        tables: whose rows.
        sizes: ids of each.
        rows: the row of each id, negative where there is none.
        known: up to which change the asker knows each.
        numbering: counts the changes.

    Returns:
        True for each such id, and how many each table has.
    """
    ends = [0, *accumulate(sizes)]
    parts = [
        table.changed(rows[begin:end], known[begin:end], numbering)
        for begin, end, table in zip(ends, ends[1:], tables, strict=False)
    ]
    return np.concatenate(parts), [int(np.count_nonzero(part)) for part in parts]


def read(
    k: ModuleType, tables: Tables, sizes: Sequence[int], rows: Ints, ids: Ints, out: Floats
) -> None:
    """Writes rows that were found into ``out``, or the initial values of ids without one."""
    ends = [0, *accumulate(sizes)]
    plain: list[HostRows] = list(map(_plain_of, tables))
    if k.UPDATES is None or not all(plain):
        for begin, end, table in zip(ends, ends[1:], tables, strict=False):
            table.read(rows[begin:end], ids[begin:end], out[begin:end])
        return
    _gather(k, plain, np.array(ends[1:]), rows, out)
    _fill(tables, ends, rows, ids, out)


def _find(k: ModuleType, tables: Tables, ends: Ints, ids: Ints, rows: Ints) -> None:
    """Looks ids up."""
    indexes = np.array([table.index.address for table in tables])
    k.find_many(indexes, np.array([table.index.size for table in tables]), ids, ends, rows)


def _gather(k: ModuleType, stores: Sequence[HostRows], ends: Ints, rows: Ints, out: Floats) -> None:
    """Copies the rows that are there."""
    columns = np.array([store.weight.address for store in stores])
    divide(len(rows), out.nbytes, lambda a, b: k.gather_many(columns, rows, ends, a, b, out))


def _fill(tables: Tables, ends: Sequence[int], rows: Ints, ids: Ints, out: Floats) -> None:
    """Writes the initial values of ids that have no row."""
    absent = np.searchsorted(ends[1:], np.flatnonzero(rows < 0), "right")
    for place in np.unique(absent).tolist():
        begin, end = ends[place], ends[place + 1]
        tables[place].fill(rows[begin:end], ids[begin:end], out[begin:end])


def apply(
    k: ModuleType, tables: Tables, parts: Sequence[ManyParts], time: int, share: float | None = None
) -> None:  # fmt: skip
    """Makes one update of each table by all of these together.

    Args:
        k: the kernels.
        tables: which; their hyper-parameters are set.
        parts: one for each trainer, in order.
        time: steps of the fastest trainer, this one included.
        share: what the sums of gradients are divided by; None for nothing.
    """
    plain: list[HostRows] = list(map(_plain_of, tables))
    if len(tables) == 1 or not all(plain) or not _are_batched(k, tables):
        for place, table in enumerate(tables):
            table.apply([part.of(place) for part in parts], time, share)
        return
    whole = parts[0] if len(parts) == 1 else _merged(k, parts)
    grad = whole.grad if share is None else whole.grad / np.float32(share)
    ends = list(accumulate(whole.sizes))
    rows = _rows_for(tables, whole, ends, time - 1)
    for table in tables:
        table.steps += 1
    for first, last in _runs(tables):
        begin = ends[first - 1] if first else 0
        run, own = plain[first:last], slice(begin, ends[last - 1])
        state = {
            name: np.array([store.state[name].address for store in run]) for name in run[0].state
        }
        weights = np.array([store.weight.address for store in run])
        theirs = np.array(ends[first:last]) - begin
        touched = Touched(weights, state, rows[own], theirs, grad[own])
        updates.apply_many(k, tables[first].rule, touched, tables[first].steps)


def _are_batched(k: ModuleType, tables: Tables) -> bool:
    """True if the rules of all have kernels for several tables."""
    if k.UPDATES is None:
        return False
    kinds: set[type] = {type(table.rule) for table in tables}
    return {kernel_of(kind) for kind in kinds} == {Kernel.OF_MANY}


def _runs(tables: Tables) -> Iterator[tuple[int, int]]:
    """Ranges of tables that move alike."""
    alike = [(type(table.rule), table.hyper, table.steps) for table in tables]
    first = 0
    for place in range(1, len(alike) + 1):
        if place == len(alike) or alike[place] != alike[first]:
            yield first, place
            first = place


def _rows_for(tables: Tables, whole: ManyParts, ends: Sequence[int], time: int) -> Ints:
    """The row of each id; makes those that are not there, and saves those that are frozen."""
    places = whole.places
    if places is not None and places.layouts == [table.layout for table in tables]:
        rows = places.rows
        missing = np.flatnonzero(rows < 0)
        strangers = np.unique(np.searchsorted(ends, missing, "right")).tolist()
        if strangers:
            rows = rows.copy()
    else:
        rows, strangers = np.empty(len(whole.ids), np.int64), range(len(tables))
    for place in strangers:
        part = whole.of(place)
        rows[ends[place] - len(part.ids) : ends[place]] = tables[place].rows_for(
            part.ids, part.places, time
        )
    for place, table in enumerate(tables):
        if table.watchers:
            table.watchers.note(rows[ends[place] - whole.sizes[place] : ends[place]])
    return rows


def _merged(k: ModuleType, parts: Sequence[ManyParts]) -> ManyParts:
    """All gradients of one id added up in the parts' order."""
    tables = range(len(parts[0].sizes))
    cut = [[0, *accumulate(part.sizes)] for part in parts]
    every = np.concatenate(
        [part.ids[c[t] : c[t + 1]] for t in tables for part, c in zip(parts, cut, strict=True)]
    )
    totals = [sum([part.sizes[t] for part in parts]) for t in tables]
    scratch: Pairs = np.empty((max(2 * max(totals), 2), 2), np.int64)
    scratch[:, 1] = -1
    unique, inverse = np.empty_like(every), np.empty_like(every)
    counts = np.empty(len(totals), np.int64)
    ends = np.array(list(accumulate(totals)))
    count = k.dedup_many(scratch, every, ends, unique, inverse, counts)
    total: Floats = np.zeros((count, parts[0].grad.shape[1]), np.float32)
    begins = [end - size for end, size in zip(ends.tolist(), totals, strict=True)]
    for part, c in zip(parts, cut, strict=True):
        own = [inverse[begins[t] : begins[t] + c[t + 1] - c[t]] for t in tables]
        begins = [begins[t] + c[t + 1] - c[t] for t in tables]
        k.add_rows(part.grad, np.concatenate(own), total)
    return ManyParts(tuple(counts.tolist()), unique[:count].copy(), total)
