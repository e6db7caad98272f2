"""The rows of a followed table, at its newest version and at those that somebody still reads.

A row never changes where it lies: a new version of it is written to another place. An index says
where the row of each id is, and an overlay says so of ids that the index does not know yet or knows
otherwise. Readers hold a :class:`RowsView`, an index with an overlay; what the next version changes
is another overlay, which replaces the view at once. When nobody reads older views any more,
the entries of the overlay are put into the index, which its readers cannot see, as they look
into the overlay first; and the places of replaced rows are used again. So a delta takes the memory
of its rows, whatever the size of the table.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tensorwire.parameter_server.errors import SnapshotError
from tensorwire.parameter_server.kernels import kernels
from tensorwire.parameter_server.kernels.arrays import Array, Bytes, Floats, Ints
from tensorwire.parameter_server.kernels.sharing import divide
from tensorwire.parameter_server.rows.index import Index
from tensorwire.parameter_server.rows.memory import Column
from tensorwire.parameter_server.snapshots.quantised import widened

GONE: Final = -2
"""Stands in an overlay for an id of the index that has no row any more."""
_NOTHING: Final[Ints] = np.empty(0, np.int64)
_CHUNK: Final = 4096
"""Entries that are put into the index while readers wait."""
_BITS: Final = {4: np.int32, 2: np.int16, 1: np.int8}
_SCALE_BYTES: Final = 4
_SCAN: Final = 1 << 18
"""Entries of an index that are looked at together."""


class Gate:
    """Lets many readers in, or one writer, for whom new readers wait."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._readers = 0
        self._is_writing = False

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Keeps the writer out."""
        with self._changed:
            while self._is_writing:
                self._changed.wait()
            self._readers += 1
        try:
            yield
        finally:
            with self._changed:
                self._readers -= 1
                if not self._readers:
                    self._changed.notify_all()

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Keeps everybody else out. For one thread, which does not read meanwhile."""
        with self._changed:
            self._is_writing = True
            while self._readers:
                self._changed.wait()
        try:
            yield
        finally:
            with self._changed:
                self._is_writing = False
                self._changed.notify_all()


class Overlay:
    """The places of the rows of some ids, which replace those of an index. Never changes.

    Args:
        ids: all different.
        places: of their rows; ``GONE`` of those that have none.
        index: numbers the ids in this order.
    """

    def __init__(self, ids: Ints, places: Ints, index: Index) -> None:
        self.ids = ids
        self.places = places
        self._index = index

    @classmethod
    def of(cls, ids: Ints, places: Ints) -> Overlay:
        """Makes an overlay whose index is still to be made."""
        return cls(ids, places, _index_of(ids)[0])

    @property
    def bytes(self) -> int:
        """The bytes that it takes."""
        return self._index.bytes + self.ids.nbytes + self.places.nbytes

    def correct(self, ids: Ints, places: Ints) -> None:
        """Puts the places of those ids that it knows in the place of those that were found."""
        if len(self.ids):
            at = self._index.find(ids)
            known = at >= 0
            places[known] = self.places[at[known]]

    def extended(self, by: Overlay) -> Overlay:
        """Makes an overlay that knows the ids of both; where both know one, ``by`` holds."""
        if not len(self.ids):
            return by
        old = self._index.find(by.ids)
        kept = np.ones(len(self.ids), bool)
        kept[old[old >= 0]] = False
        return Overlay.of(
            np.concatenate((self.ids[kept], by.ids)), np.concatenate((self.places[kept], by.places))
        )


class RowsView:
    """The rows of a table at one version. As long as somebody has it, it stays as it is."""

    __slots__ = ("__weakref__", "_rows", "count", "overlay")

    def __init__(self, rows: TableRows, overlay: Overlay, count: int) -> None:
        self._rows = rows
        self.overlay = overlay
        self.count = count

    def find(self, ids: Ints) -> Ints:
        """The place of the row of each id; negative where there is none."""
        overlay = self.overlay  # first: once it is in the index, an empty one stands here
        places = self._rows.find(ids)
        overlay.correct(ids, places)
        return places

    def gather(self, places: Ints) -> Tensor:
        """The rows at some places as float32, the caller's own; any numbers for negative ones."""
        return self._rows.gather(places)

    @property
    def rows(self) -> TableRows:
        """The table whose rows these are."""
        return self._rows


class TableRows:
    """The memory of a followed table.

    Args:
        dim: columns of a row.
        dtype: float32, bfloat16, float16, or int8 with a scale: the rows as they are kept.
    """

    def __init__(self, dim: int, dtype: torch.dtype) -> None:
        self.dim = dim
        self.dtype = dtype
        self._column = _column_for(dim, dtype)
        self._index = Index(kernels())
        self._gate = Gate()
        self._end = 0
        self._free: list[Ints] = []
        self._replaced: list[Ints] = []
        self._views: list[weakref.ref[RowsView]] = []

    @property
    def bytes(self) -> int:
        """The bytes that rows and index take, without overlays."""
        width = self._column.width * self._column.dtype.itemsize
        return self._end * width + self._index.bytes

    def find(self, ids: Ints) -> Ints:
        """The places of the rows of ids, by the index."""
        with self._gate.reading():
            return self._index.find(ids)

    def gather(self, places: Ints) -> Tensor:
        """See :meth:`RowsView.gather`."""
        if self.dtype == torch.float32:
            out: Floats = np.empty((len(places), self.dim), np.float32)
            source, k = self._column.rows, kernels()
            divide(len(places), out.nbytes, lambda a, b: k.gather(source, places[a:b], out[a:b]))
            return torch.from_numpy(out)
        if self.dtype == torch.int8:
            packed = torch.from_numpy(self._column.rows[np.maximum(places, 0)])
            scale = packed[:, self.dim :].contiguous().view(torch.float32)
            return widened(packed[:, : self.dim], scale)
        halves = torch.from_numpy(self._column.rows).view(self.dtype)
        return halves.index_select(0, torch.from_numpy(places).clamp_min(0)).float()

    def are_equal(self, places: Ints, rows: Array) -> NDArray[np.bool_]:
        """Says of each place whether the row there has the bits of another."""
        bits = _BITS[self._column.dtype.itemsize]
        mine = self._column.rows[places].view(bits)
        return np.asarray((mine == rows.view(bits)).all(1))

    # --- changes, all by one thread

    def begin(self, before: RowsView | None, rows: int = 0) -> Change:
        """Begins the next version.

        Args:
            before: the version that it changes, the newest; None for an empty table.
            rows: about as many will be put in.
        """
        if before is None:
            self._index.reserve(rows)
        else:
            self._settle(before)
        return Change(self, before)

    def _settle(self, newest: RowsView) -> None:
        """Puts the overlay of the newest view into the index, if nobody has an older view."""
        self._views = [each for each in self._views if each() is not None]
        if any(each() is not newest for each in self._views):
            return
        self._free += self._replaced
        self._replaced = []
        overlay = newest.overlay
        self._enter(overlay.ids, overlay.places)
        newest.overlay = Overlay.of(_NOTHING, _NOTHING)

    def _enter(self, ids: Ints, places: Ints) -> None:
        there = places >= 0
        with_rows, at = ids[there], places[there]
        self._index.reserve(int((self._index.find(with_rows) < 0).sum()))
        for begin in range(0, len(with_rows), _CHUNK):
            with self._gate.writing():
                self._index.assign(with_rows[begin : begin + _CHUNK], at[begin : begin + _CHUNK])
        without = ids[~there]
        known = without[self._index.find(without) >= 0]
        for begin in range(0, len(known), _CHUNK):
            with self._gate.writing():
                self._index.discard(known[begin : begin + _CHUNK])

    def write(self, rows: Array) -> Ints:
        """Writes rows to places where nobody reads; returns which."""
        places = self._take_places(len(rows))
        if self._column.dtype == np.float32:
            kernels().scatter(rows, places, self._column.rows)
        else:
            self._column.rows[places] = rows
        return places

    def _take_places(self, count: int) -> Ints:
        parts: list[Ints] = []
        while count and self._free:
            last = self._free.pop()
            parts.append(last[:count])
            if len(last) > count:
                self._free.append(last[count:])
            count -= len(parts[-1])
        if count:
            self._column.reserve(self._end + count)
            parts.append(np.arange(self._end, self._end + count, dtype=np.int64))
            self._end += count
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    def fill(self, ids: Ints, places: Ints) -> None:
        """Enters ids into the index of a table that nobody reads yet.

        Raises:
            SnapshotError: one is there already.
        """
        before = self._index.count
        self._index.assign(ids, places)
        if self._index.count != before + len(ids):
            raise SnapshotError("an id is there twice")

    def give_back(self, places: Ints) -> None:
        """Lets places be used again in which nobody has read."""
        self._free.append(places)

    def finish(self, overlay: Overlay, count: int, replaced: Ints) -> RowsView:
        """Makes the view of a new version, which readers of older ones do not see."""
        if len(replaced):
            self._replaced.append(replaced)
        view = RowsView(self, overlay, count)
        self._views.append(weakref.ref(view))
        return view

    def entries(self) -> Iterator[Ints]:
        """All ids of the index, in parts. To be called in the thread that changes the index."""
        yield from self._index.ids(_SCAN)

    @property
    def capacity(self) -> int:
        """Places that have been used so far."""
        return self._end


class Change:
    """The next version of a table while it is made; readers see nothing of it.

    Made by :meth:`TableRows.begin`. Ended by :meth:`check` and :meth:`finish`, or :meth:`undo`.
    """

    def __init__(self, rows: TableRows, before: RowsView | None) -> None:
        self._rows = rows
        self._before = before
        self._ids: list[Ints] = []
        self._places: list[Ints] = []
        self._taken: list[Ints] = []
        self._count = 0 if before is None else before.count
        self._seen: Bytes | None = None

    def remove(self, ids: Ints) -> None:
        """Removes rows that went, before any are put in; ids without a row are passed over."""
        if self._before is not None:
            self._ids.append(ids)
            self._places.append(np.full(len(ids), GONE, np.int64))

    def put(self, ids: Ints, rows: Array) -> None:
        """Enters rows that came or changed, each id once."""
        places = self._rows.write(rows)
        self._taken.append(places)
        if self._before is None:
            self._rows.fill(ids, places)
            self._count += len(ids)
        else:
            self._ids.append(ids)
            self._places.append(places)

    def compare(self, ids: Ints, rows: Array) -> None:
        """Takes some of all the rows that there are now; :meth:`forget_others` ends it."""
        assert self._before is not None
        if self._seen is None:
            self._seen = np.zeros(self._rows.capacity, np.uint8)
        places = self._before.find(ids)
        known = places >= 0
        self._seen[places[known]] = 1
        same = known.copy()
        same[known] = self._rows.are_equal(places[known], rows[known])
        self.put(ids[~same], rows[~same])

    def forget_others(self) -> None:
        """Removes all rows that :meth:`compare` was not given."""
        assert self._before is not None
        seen = np.zeros(self._rows.capacity, np.uint8) if self._seen is None else self._seen
        for ids in (*self._rows.entries(), self._before.overlay.ids):
            places = self._before.find(ids)
            there = places >= 0
            there[there] = seen[places[there]] == 0
            self._ids.insert(0, ids[there])
            self._places.insert(0, np.full(int(there.sum()), GONE, np.int64))

    def check(self) -> None:
        """Refuses what cannot be; afterwards :meth:`finish` will do.

        Raises:
            SnapshotError: an id came twice.
        """
        before, self._overlay, self._replaced = self._before, self._latest(), _NOTHING
        if before is not None:
            old = before.find(self._overlay.ids)
            self._replaced = old[old >= 0]
            self._count += int((self._overlay.places >= 0).sum()) - len(self._replaced)
            self._overlay = before.overlay.extended(self._overlay)

    def finish(self) -> RowsView:
        """The view of the new version."""
        return self._rows.finish(self._overlay, self._count, self._replaced)

    def _latest(self) -> Overlay:
        """Each id once, with its place: that of its row, if it also went."""
        if not self._ids:
            return Overlay.of(_NOTHING, _NOTHING)
        ids, places = np.concatenate(self._ids), np.concatenate(self._places)
        self._ids.clear()
        self._places.clear()
        index, at = _index_of(ids)
        came = places >= 0
        latest = np.full(index.count, GONE, np.int64)
        latest[at[came]] = places[came]
        if int((latest >= 0).sum()) != int(came.sum()):
            raise SnapshotError("an id is there twice")
        once = np.empty(index.count, np.int64)
        once[at] = ids
        return Overlay(once, latest, index)

    def undo(self) -> None:
        """Leaves everything as it was before."""
        for each in self._taken:
            self._rows.give_back(each)


def _column_for(dim: int, dtype: torch.dtype) -> Column:
    if dtype == torch.int8:
        return Column(np.int8, dim + _SCALE_BYTES)
    return Column(np.float32 if dtype == torch.float32 else np.int16, dim)


def _index_of(ids: Ints) -> tuple[Index, Ints]:
    """An index that numbers ids from 0, and the number of each."""
    index = Index(kernels())
    index.reserve(len(ids))
    return index, index.upsert(ids)
