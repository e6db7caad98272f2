"""Keeps the rows that batches ahead want, and knows up to which change each is known. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from tensorwire.parameter_server.client.exchange import UNDER_WAY, UNKNOWN, ShardChanges
from tensorwire.parameter_server.kernels import kernels
from tensorwire.parameter_server.kernels.arrays import Bools, Floats, Ints, Pairs
from tensorwire.parameter_server.messaging.messages import TableIds
from tensorwire.parameter_server.rows.memory import Column


class KeptRows:
    """Rows of tables of one kind, while a batch wants them. Each has a place that stays its own.

    Args:
        tables: their names.
        dim: columns of a row.

    Attributes:
        dim: columns of a row.
    """

    def __init__(self, tables: tuple[str, ...], dim: int) -> None:
        self._tables = tables
        self.dim = dim
        self._k: ModuleType = kernels()
        self._ids = np.empty(0, np.int64)
        self._places = np.empty(0, np.int64)
        self._sizes = np.zeros(len(tables), np.int64)
        self._free = np.empty(0, np.int64)
        self._values = Column(np.float32, dim)
        self._known = np.empty(0, np.int64)
        self._pulls = np.empty(0, np.int64)  # beside a step that asked for each last; 0 for none
        self._users = np.empty(0, np.int64)

    def __len__(self) -> int:
        return len(self._ids)

    def admit(self, wanted: TableIds) -> Ints:
        """Keeps rows that a batch wants.

        Args:
            wanted: of just these tables.

        Returns:
            The place of each row; its own until :meth:`release`.
        """
        self._drop_unused()
        before, given, sizes = self._ids, wanted.ids.numpy(), np.array(wanted.sizes, np.int64)
        numbers = np.arange(len(self._tables))
        tables = np.concatenate((np.repeat(numbers, self._sizes), np.repeat(numbers, sizes)))
        order = np.argsort(tables, kind="stable")
        unique, inverse, counts = self._distinct(
            np.concatenate((before, given))[order], self._sizes + sizes
        )
        positions = np.empty_like(inverse)
        positions[order] = inverse
        places = np.full(len(unique), -1, np.int64)
        places[positions[: len(before)]] = self._places
        new = np.flatnonzero(places < 0)
        places[new] = self._take_free(len(new))
        self._known[places[new]] = UNKNOWN
        self._ids, self._places, self._sizes = unique, places, counts
        mine = places[positions[len(before) :]]
        self._users[mine] += 1
        return mine

    def _distinct(self, ids: Ints, totals: Ints) -> tuple[Ints, Ints, Ints]:
        """The different ids of each table, where each id is among them, and how many there are."""
        scratch: Pairs = np.empty((max(2 * int(totals.max()), 2), 2), np.int64)
        scratch[:, 1] = -1
        unique, inverse = np.empty_like(ids), np.empty_like(ids)
        counts = np.empty(len(totals), np.int64)
        count = self._k.dedup_many(scratch, ids, np.cumsum(totals), unique, inverse, counts)
        return unique[:count].copy(), inverse, counts

    def _drop_unused(self) -> None:
        """Forgets the rows that no batch wants any more."""
        used = self._users[self._places] > 0
        if not used.all():
            self._free = np.concatenate((self._free, self._places[~used]))
            self._sizes = self._counts(used)
            self._ids, self._places = self._ids[used], self._places[used]

    def _counts(self, chosen: Bools) -> Ints:
        """The number of each table's rows that are chosen."""
        sums = np.concatenate(([0], np.cumsum(chosen)))
        ends = np.concatenate(([0], np.cumsum(self._sizes)))
        counts: Ints = np.diff(sums[ends])
        return counts

    def _take_free(self, count: int) -> Ints:
        """Places that nobody has."""
        missing = count - len(self._free)
        if missing > 0:
            size = len(self._known)
            more = max(missing, size)
            self._free = np.concatenate((self._free, np.arange(size, size + more)))
            self._known = np.concatenate((self._known, np.full(more, UNKNOWN)))
            self._pulls = np.concatenate((self._pulls, np.zeros(more, np.int64)))
            self._users = np.concatenate((self._users, np.zeros(more, np.int64)))
            self._values.reserve(size + more)
        taken, self._free = self._free[:count], self._free[count:]
        return taken

    def release(self, places: Ints) -> None:
        """Lets go of the rows at these places, as the batch that wanted them is over."""
        self._users[places] -= 1

    def forget(self) -> None:
        """Notes that no row is known any more; each keeps its place."""
        self._known[:] = UNKNOWN
        self._pulls[:] = 0

    def known(self, places: Ints, pull: int) -> Ints:
        """The change up to which each of these rows is known, or ``UNKNOWN`` or ``UNDER_WAY``.

        Args:
            places: of the rows.
            pull: the one beside a step whose answer is under way; 0 for none.
        """
        known = self._known[places]
        if pull:
            known[self._pulls[places] == pull] = UNDER_WAY
        return known

    def ask(self, places: Ints, pull: int) -> None:
        """Notes that rows are asked for beside a step, by the pull of this number."""
        self._pulls[places] = pull

    def lacking(self, coming: Sequence[Ints], pull: int) -> tuple[TableIds, Ints]:
        """The rows to bring while a step is under way, and their places.

        Those of the batch after the next, as they may have changed; and those of later batches
        that are not here. None that only the batch under way wants: their places may soon be
        others'.

        Args:
            coming: the places of each coming batch, two at least. Those of the first one come
                with the step itself.
            pull: the one beside a step whose answer is under way; 0 for none.
        """
        wanted = np.zeros(len(self._known), bool)
        for later in coming[2:]:
            wanted[later] = self.known(later, pull) == UNKNOWN
        wanted[coming[1]] = True
        wanted[coming[0]] = False
        chosen = wanted[self._places]
        sizes = tuple(self._counts(chosen).tolist())
        ids = torch.from_numpy(self._ids[chosen])
        return TableIds(self._tables, sizes, ids), self._places[chosen]

    def store(self, places: Ints, brought: ShardChanges) -> None:
        """Takes in what a shard has answered.

        Args:
            places: of the rows that were asked for, of all shards.
            brought: its answer.
        """
        own = places if brought.places is None else places[brought.places]
        rows: Floats = np.ascontiguousarray(brought.rows.numpy())
        self._k.scatter(rows, own[brought.which], self._values.rows)
        self._known[own] = brought.number

    def rows(self, places: Ints) -> Tensor:
        """A copy of rows."""
        out: Floats = np.empty((len(places), self.dim), np.float32)
        self._k.gather(self._values.rows, places, out)
        return torch.from_numpy(out)
