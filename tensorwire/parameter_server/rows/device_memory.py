"""Columns of rows on a device such as a GPU. Kept in one tensor, which is copied when it grows."""

from __future__ import annotations

from typing import Final

import numpy as np
import torch
from torch import Tensor

from tensorwire.parameter_server.kernels.arrays import Array, Floats, Ints

_FIRST: Final = 1024
_SPARE: Final = 4
"""Memory is given back where reserved memory is so many times what is used."""


class DeviceColumn:
    """Rows of ``width`` float32 numbers each, on a device; as ``memory.Column`` on the host.

    Arrays go in and come out on the host, by ``column.rows[numbers]``. An update works on
    ``tensor`` itself.

    Args:
        width: how many numbers there are in a row.
        device: where they are.
    """

    def __init__(self, width: int, device: torch.device) -> None:
        self.dtype = np.dtype(np.float32)
        self.width = width
        self.tensor = torch.zeros(_FIRST, width, device=device)

    @property
    def rows(self) -> DeviceColumn:
        """Itself, to be indexed with numbers of rows."""
        return self

    def __len__(self) -> int:
        return len(self.tensor)

    def index(self, rows: Ints) -> Tensor:
        """Numbers of rows, on the device."""
        return to_device(torch.as_tensor(rows), self.tensor.device)

    def __getitem__(self, rows: Ints) -> Floats:
        values: Floats = to_host(self.tensor[self.index(rows)]).numpy()
        return values

    def __setitem__(self, rows: Ints, values: Array | float) -> None:
        given = torch.tensor(values, dtype=torch.float32)
        self.tensor[self.index(rows)] = to_device(given, self.tensor.device)

    def reserve(self, count: int) -> None:
        """Makes room for so many rows."""
        if count > len(self.tensor):
            self._resize(max(count, len(self.tensor) * 3 // 2))

    def release(self, count: int) -> None:
        """Forgets all rows from ``count`` on; they read as zeros."""
        if _SPARE * max(count, _FIRST) < len(self.tensor):
            self._resize(max(count, _FIRST))
        self.tensor[count:] = 0

    def _resize(self, size: int) -> None:
        old = self.tensor
        self.tensor = old.new_zeros(size, self.width)
        kept = min(size, len(old))
        self.tensor[:kept] = old[:kept]


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor on a device; to a GPU it goes from pinned memory, while the host goes on."""
    if device.type != "cuda" or tensor.device == device:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def to_host(tensor: Tensor) -> Tensor:
    """A tensor in the host's memory; from a GPU it comes into pinned memory."""
    if tensor.device.type != "cuda":
        return tensor.cpu()
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    pinned.copy_(tensor, non_blocking=True)
    torch.cuda.current_stream(tensor.device).synchronize()
    return pinned
