"""Memory that is mapped rather than allocated: shared between workers, or reused.

Owns mappings and their lifetime: a region is unmapped when its owner let go of
it *and* the last array taken from it is dead. An array is what a received
tensor or payload is backed by, so user code decides when that is.

``mmap.mmap`` would keep a descriptor open as long as the mapping, hence libc.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from typing import Any

_PAGE = 4096
_HUGE_PAGE = 2 << 20
_PROT_NONE = 0
_PROT_READ_WRITE = 3
_MAP_SHARED = 0x01
_MAP_PRIVATE = 0x02
_MAP_FIXED = 0x10
_MAP_ANONYMOUS = 0x20
_MADV_HUGEPAGE = 14
_FAILED = ctypes.c_void_p(-1).value

Array = Any
"""A writable buffer. It claims to be endless, because ctypes needs a new type for every
length: only the bytes its maker spoke of may be touched."""

_ENDLESS = ctypes.c_char * (1 << 46)


def array_at(address: int) -> Array:
    """The memory at ``address``; whoever makes the array sees to it that it stays mapped."""
    return _ENDLESS.from_address(address)


def view_of(array: Array, length: int) -> memoryview:
    """The first ``length`` bytes of an array; keeps the array alive."""
    return memoryview(array).cast("B")[:length]


class _Lent(_ENDLESS):  # type: ignore[misc, valid-type]
    """Memory of a region, which hears when nobody refers to it any more.

    It holds its region, which often nothing else does: a region that only knew its arrays
    would be collected before them, and its memory never be unmapped.
    """

    __slots__ = ("region", "released")

    region: Region
    released: Callable[[], None] | None

    def __del__(self) -> None:
        self.region._array_died(self)


class Region:
    """A mapping of ``size`` bytes.

    Args:
        size: in bytes.
        descriptor: of the file to map shared; None for private anonymous memory.

    Raises:
        OSError: the system refuses.
    """

    def __init__(self, size: int, descriptor: int | None = None) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        mmap = self._libc.mmap
        mmap.restype = ctypes.c_void_p
        mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
        self._libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
        self._libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        self.size = size
        self.address = self._map(descriptor)
        self._lock = threading.RLock()
        self._lent: set[int] = set()
        self._borrowed = 0
        self._retired = False
        self._libc.madvise(self.address, size, _MADV_HUGEPAGE)

    def _map(self, descriptor: int | None) -> int:
        """Maps at a multiple of the huge page size, without which there are no huge pages."""
        span = self.size + _HUGE_PAGE
        reserved = self._mmap(None, span, _PROT_NONE, _MAP_PRIVATE | _MAP_ANONYMOUS, -1)
        start = -(-reserved // _HUGE_PAGE) * _HUGE_PAGE
        end = start + -(-self.size // _PAGE) * _PAGE
        if start > reserved:
            self._libc.munmap(reserved, start - reserved)
        if reserved + span > end:
            self._libc.munmap(end, reserved + span - end)
        flags = _MAP_FIXED | (_MAP_PRIVATE | _MAP_ANONYMOUS if descriptor is None else _MAP_SHARED)
        file = -1 if descriptor is None else descriptor
        try:
            return self._mmap(start, self.size, _PROT_READ_WRITE, flags, file)
        except OSError:
            self._libc.munmap(start, end - start)
            raise

    def _mmap(self, where: int | None, size: int, protection: int, flags: int, file: int) -> int:
        address = self._libc.mmap(where, size, protection, flags, file, 0)
        if address is None or address == _FAILED:
            error = ctypes.get_errno()
            raise OSError(error, f"mmap of {size} bytes: {os.strerror(error)}")
        return int(address)

    def array(self, offset: int, released: Callable[[], None] | None) -> Array:
        """A view of part of the region that keeps it mapped.

        Args:
            offset: first byte.
            released: called once nobody refers to the array any more, on
                whatever thread that happens; must not block.
        """
        array = _Lent.from_address(self.address + offset)
        array.region = self
        array.released = released
        with self._lock:
            self._lent.add(id(array))
        return array

    def _array_died(self, array: _Lent) -> None:
        if array.released is not None:
            array.released()
        with self._lock:
            self._lent.discard(id(array))
            self._unmap_if_unused()

    def borrow(self) -> bool:
        """Keeps the region mapped until :meth:`give_back`; False if it is retired."""
        with self._lock:
            if self._retired:
                return False
            self._borrowed += 1
            return True

    def give_back(self) -> None:
        """Ends a :meth:`borrow`."""
        with self._lock:
            self._borrowed -= 1
            self._unmap_if_unused()

    def retire(self) -> None:
        """Gives the region up; it is unmapped as soon as nothing uses it."""
        with self._lock:
            self._retired = True
            self._unmap_if_unused()

    def _unmap_if_unused(self) -> None:
        if self._retired and not self._lent and not self._borrowed and self.size:
            self._libc.munmap(self.address, self.size)
            self.size = 0
