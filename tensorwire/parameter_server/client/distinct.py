"""De-duplicates ids: each travels once, however often a batch names it."""

from __future__ import annotations

import threading

import numpy as np
import torch
from torch import Tensor

from tensorwire.parameter_server.kernels import kernels
from tensorwire.parameter_server.kernels.arrays import Slots


class _Scratch(threading.local):
    """An empty index for each thread, kept, as fresh memory costs more than what is done in it."""

    def __init__(self) -> None:
        self._table = _empty(0)

    def of(self, count: int) -> Slots:
        """Room for so many ids."""
        if len(self._table) < 2 * count:
            self._table = _empty(2 * count)
        return self._table[: max(2 * count, 2)]


def _empty(size: int) -> Slots:
    table: Slots = np.empty((max(size, 2), 2), np.int64)
    table[:, 1] = -1
    return table


_scratch = _Scratch()


def distinct(ids: Tensor) -> tuple[Tensor, Tensor]:
    """Finds the different ids, in the order in which they come first.

    Args:
        ids: int64, of any shape, on any device.

    Returns:
        The different ids, and for each element of ``ids`` its place among them, in the shape of
        ``ids``; both on the CPU.
    """
    flat = np.ascontiguousarray(ids.detach().cpu().numpy().reshape(-1))
    unique, places = np.empty_like(flat), np.empty_like(flat)
    count = kernels().dedup(_scratch.of(len(flat)), flat, unique, places)
    return torch.from_numpy(unique[:count].copy()), torch.from_numpy(places).view(ids.shape)
