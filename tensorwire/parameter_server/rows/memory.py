"""Columns of rows that grow in place: addresses are reserved, memory is taken when touched."""

from __future__ import annotations

import mmap
import weakref
from typing import ClassVar, Final

import numpy as np
from numpy.typing import DTypeLike

from tensorwire.parameter_server.kernels.arrays import Array

_RESERVED: Final = ((64, 1 << 38), (512, 1 << 36))
"""Columns of a process, and the bytes of addresses that so many reserve each. A process has 2**47,
of which 64 columns take an eighth, and 512 nearly half.
"""
_RESERVED_BY_OTHERS: Final = 1 << 34
_LEAST: Final = 1 << 26
_NO_RESERVE: Final = getattr(mmap, "MAP_NORESERVE", 0x4000)
_PAGE: Final = 1 << 21


class Column:
    """Rows of ``width`` numbers each. Views stay valid until :meth:`reserve` has to move them.

    Args:
        dtype: of the numbers.
        width: how many there are in a row.
        reserved: bytes of addresses that rows may take before they have to be copied elsewhere.
            Default 256 GiB; 64 or 16 GiB where the process has many columns.

    Attributes:
        address: where the first one lies.
    """

    _all: ClassVar[weakref.WeakSet[Column]] = weakref.WeakSet()

    def __init__(self, dtype: DTypeLike, width: int, reserved: int | None = None) -> None:
        self.dtype = np.dtype(dtype)
        self.width = width
        self._row_bytes = self.dtype.itemsize * width
        self._memory = _reserve(_usual(len(self._all)) if reserved is None else reserved)
        self._all.add(self)
        self.rows: Array = self._view()

    def _view(self) -> Array:
        count = len(self._memory) // self._row_bytes
        flat = np.frombuffer(self._memory, self.dtype, count * self.width)
        self.address: int = flat.__array_interface__["data"][0]
        return flat.reshape(count, self.width)

    def reserve(self, count: int) -> None:
        """Makes room for so many rows. Copies only if the reserved addresses do not suffice."""
        if count <= len(self.rows):
            return
        old = self.rows
        self._memory = _reserve(2 * count * self._row_bytes)
        self.rows = self._view()
        self.rows[: len(old)] = old

    def release(self, count: int) -> None:
        """Gives the memory back of all rows from ``count`` on; they read as zeros."""
        begin = -(-count * self._row_bytes // _PAGE) * _PAGE
        if begin < len(self._memory):
            self._memory.madvise(mmap.MADV_DONTNEED, begin, len(self._memory) - begin)
        end = min(begin // self._row_bytes + 1, len(self.rows))
        self.rows[count:end] = 0


def _usual(columns: int) -> int:
    """Bytes of addresses for one more column than so many."""
    return next((size for most, size in _RESERVED if columns < most), _RESERVED_BY_OTHERS)


def _reserve(size: int) -> mmap.mmap:
    """Anonymous memory: as much address space as asked for, or as this system grants."""
    size = max(size, _LEAST)
    while True:
        try:
            memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)
        except (OSError, ValueError, OverflowError):
            if size <= _LEAST:
                raise
            size //= 2
            continue
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        return memory
