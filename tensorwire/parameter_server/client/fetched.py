"""Rows that are fetched for one step, maybe before a forward pass asks for them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from tensorwire.parameter_server.client.cache import RowCache
from tensorwire.parameter_server.kernels import kernels
from tensorwire.parameter_server.kernels.arrays import Floats
from tensorwire.parameter_server.rows.index import Index


class Fetched:
    """The rows of some ids for one step of one trainer.

    Args:
        ids: all different.
        step: pushes that the trainer has made when it uses them.
        dim: columns of a row.
        cache: what is kept at the trainer; None for nothing.

    Attributes:
        missing: the ids whose rows must be pulled.
    """

    def __init__(self, ids: Tensor, step: int, dim: int, cache: RowCache | None = None) -> None:
        self.ids = ids
        self.step = step
        self.missing = ids
        self._cache = cache
        self._get: Callable[[], Tensor] | None = None
        self._rows: Tensor | None = None
        self._index: Index | None = None
        self._given = False
        if cache is not None:
            self._kept = torch.empty(len(ids), dim)
            self._is_missing = cache.lookup(ids, step, self._kept)
            self.missing = ids[self._is_missing]

    def promise(self, get: Callable[[], Tensor]) -> None:
        """Says where the missing rows come from.

        Args:
            get: returns them; called once, when rows are asked for first.
        """
        self._get = get

    def take(self, ids: Tensor) -> Tensor | None:
        """Returns the rows of these ids, the caller's own, or None if some are not here.

        Args:
            ids: all different.
        """
        if ids is self.ids or torch.equal(ids, self.ids):
            return self._all()
        if len(ids) > len(self.ids):
            return None
        places = self._indexed().find(ids.numpy())
        if (places < 0).any():
            return None
        rows = self._received().detach()
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
            if self._cache is not None:
                self._cache.store(self.missing, rows, self.step)
                self._kept[self._is_missing] = rows
                rows = self._kept
            self._rows = rows
        return self._rows

    def _indexed(self) -> Index:
        if self._index is None:
            self._index = Index(kernels())
            self._index.upsert(self.ids.numpy())
        return self._index
