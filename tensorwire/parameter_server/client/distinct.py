"""De-duplicates ids: each travels once, however often a batch names it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from tensorwire.parameter_server.kernels import kernels
from tensorwire.parameter_server.kernels.arrays import Pairs


class _Scratch(threading.local):
    """An empty index for each thread, kept, as fresh memory costs more than what is done in it."""

    def __init__(self) -> None:
        self._table = _empty(0)

    def of(self, count: int) -> Pairs:
        """Room for so many ids."""
        if len(self._table) < 2 * count:
            self._table = _empty(2 * count)
        return self._table[: max(2 * count, 2)]


def _empty(size: int) -> Pairs:
    pairs: Pairs = np.empty((max(size, 2), 2), np.int64)
    pairs[:, 1] = -1
    return pairs


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


def distinct_many(ids: Tensor, sizes: Sequence[int]) -> tuple[Tensor, Tensor, tuple[int, ...]]:
    """Finds the different ids of each of several tables, in the order in which they come first.

    Args:
        ids: int64, those of one table after those of another, on any device.
        sizes: ids of each table.

    Returns:
        The different ids, one table's after another's; for each element of ``ids`` its place
        among them; and how many different ones each table has. All are on the CPU.
    """
    flat = np.ascontiguousarray(ids.detach().cpu().numpy())
    unique, places = np.empty_like(flat), np.empty_like(flat)
    counts = np.empty(len(sizes), np.int64)
    ends = np.array(list(accumulate(sizes)), np.int64)
    scratch = _scratch.of(max(sizes, default=0))
    count = kernels().dedup_many(scratch, flat, ends, unique, places, counts)
    ids_once = torch.from_numpy(unique[:count].copy())
    return ids_once, torch.from_numpy(places), tuple(counts.tolist())
