"""Rows that are fetched for one step, maybe before a forward pass asks for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor

from tensorwire.parameter_server.client.cache import RowCache
from tensorwire.parameter_server.client.exchange import KnownRows
from tensorwire.parameter_server.kernels import kernels
from tensorwire.parameter_server.kernels.arrays import Floats
from tensorwire.parameter_server.messaging.messages import TableIds
from tensorwire.parameter_server.rows.index import Index


class StepRows:
    """The rows of some ids for one step of one trainer; they live until that step is over.

    Args:
        ids: of tables of one width, all or none of which have a cache.
        step: pushes that the trainer has made when it uses the rows.
        dim: columns of a row.
        caches: what is kept at the trainer of each table; none if nothing is.
        known: what is known of rows that are kept for batches ahead; None if none are.

    Attributes:
        missing: the ids whose rows must be pulled.
        known: as given.
    """

    def __init__(
        self,
        ids: TableIds,
        step: int,
        dim: int,
        caches: Sequence[RowCache] = (),
        known: KnownRows | None = None,
    ) -> None:
        self.ids = ids
        self.step = step
        self.missing = ids
        self.known = known
        self._caches = caches
        self._get: Callable[[], Tensor] | None = None
        self._rows: Tensor | None = None
        self._indexes: dict[str, Index] = {}
        self._given = False
        self._spans: dict[str, tuple[int, int]] | None = None
        if caches:
            self._look_into_caches(dim)

    def _look_into_caches(self, dim: int) -> None:
        ids = self.ids
        self._kept = torch.empty(len(ids.ids), dim)
        missing = [
            cache.lookup(own, self.step, kept)
            for cache, own, kept in zip(
                self._caches,
                ids.ids.split_with_sizes(ids.sizes),
                self._kept.split_with_sizes(ids.sizes),
                strict=True,
            )
        ]
        self._is_missing = torch.cat(missing)
        sizes = tuple([int(each.sum()) for each in missing])
        self.missing = TableIds(ids.tables, sizes, ids.ids[self._is_missing])

    def promise(self, get: Callable[[], Tensor]) -> None:
        """Says where the missing rows come from.

        Args:
            get: returns them; called once, when rows are asked for first.
        """
        self._get = get

    def take(self, ids: TableIds) -> Tensor | None:
        """Returns the rows of these ids, the caller's own, or None if some are not here."""
        if ids.ids is self.ids.ids or self._are_equal(ids):
            return self._all()
        if len(ids.tables) == 1:
            return self._of_table(ids.tables[0], ids.ids)
        own = zip(ids.tables, ids.ids.split_with_sizes(ids.sizes), strict=True)
        parts = [self._of_table(table, each) for table, each in own]
        present = [each for each in parts if each is not None]
        return torch.cat(present) if len(present) == len(parts) else None

    def _are_equal(self, ids: TableIds) -> bool:
        mine = self.ids
        same = ids.tables == mine.tables and ids.sizes == mine.sizes
        return same and torch.equal(ids.ids, mine.ids)

    def _of_table(self, table: str, ids: Tensor) -> Tensor | None:
        if self._spans is None:
            ends = [0, *accumulate(self.ids.sizes)]
            self._spans = dict(zip(self.ids.tables, pairwise(ends), strict=True))
        begin, end = self._spans.get(table, (0, 0))
        if len(ids) > end - begin:
            return None
        mine = self.ids.ids[begin:end]
        if torch.equal(ids, mine):
            return self._received().detach()[begin:end].clone()
        places = self._indexed(table, mine).find(ids.numpy())
        if (places < 0).any():
            return None
        rows = self._received().detach()[begin:end]
        out: Floats = np.empty((len(ids), rows.shape[1]), np.float32)
        kernels().gather(rows.numpy(), places, out)
        return torch.from_numpy(out)

    def _all(self) -> Tensor:
        if self._given:
            return self._received().detach().clone()
        self._given = True
        return self._received()

    def _received(self) -> Tensor:
        if self._rows is None:
            assert self._get is not None
            rows = self._get()
            if self._caches:
                sizes = self.missing.sizes
                parts = zip(
                    self._caches,
                    self.missing.ids.split_with_sizes(sizes),
                    rows.split_with_sizes(sizes),
                    strict=False,
                )
                for cache, ids, own in parts:
                    cache.store(ids, own, self.step)
                self._kept[self._is_missing] = rows
                rows = self._kept
            self._rows = rows
        return self._rows

    def _indexed(self, table: str, ids: Tensor) -> Index:
        index = self._indexes.get(table)
        if index is None:
            index = self._indexes[table] = Index(kernels())
            index.upsert(ids.numpy())
        return index
