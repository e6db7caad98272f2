"""Memory that is mapped rather than allocated: shared between workers, or reused.

Owns mappings and their lifetime: a region is unmapped when its owner let go of
it *and* the last array taken from it is dead. An array is what a received
tensor or payload is backed by, so user code decides when that is.

``mmap.mmap`` would keep a descriptor open as long as the mapping, hence libc.

A process that forks shares a region with nobody: its child finds its own copy of
what the arrays held, at the same place, as in any other memory, and neither it nor
what it does with the copy is seen by the parent or the peer. So what is lent is
copied before the fork, when the parent still keeps it as it is.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from rpc.runtime import forks as process_forks

_log = logging.getLogger(__name__)

_forking = process_forks.FORKING

_PAGE = 4096
_HUGE_PAGE = 2 << 20
_PROT_NONE = 0
_PROT_READ_WRITE = 3
_MAP_SHARED = 0x01
_MAP_PRIVATE = 0x02
_MAP_FIXED = 0x10
_MAP_ANONYMOUS = 0x20
_MAP_NORESERVE = 0x4000
_MADV_HUGEPAGE = 14
_MREMAP_MAYMOVE = 1
_MREMAP_FIXED = 2
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


@functools.cache
def _libc() -> ctypes.CDLL:
    """The C library's functions; one for all, as each object of them weighs kilobytes."""
    libc = ctypes.CDLL(None, use_errno=True)
    mmap, mremap = libc.mmap, libc.mremap
    mmap.restype = mremap.restype = ctypes.c_void_p
    mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
    mremap.argtypes = (*mmap.argtypes[:2], ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return libc


class _RegionArray(_ENDLESS):  # type: ignore[misc, valid-type]
    """Memory of a region, which hears when nobody refers to it any more.

    It holds its region, which often nothing else does: a region that only knew its arrays
    would be collected before them, and its memory never be unmapped.
    """

    __slots__ = ("region", "released")

    region: Region
    released: Callable[[], None] | None

    def __del__(self) -> None:
        self.region._array_died(self)


class Region(process_forks.ForkAware):
    """A mapping of ``size`` bytes.

    Args:
        size: in bytes.
        descriptor: of the file to map shared; None for private anonymous memory.

    Raises:
        OSError: the system refuses.
    """

    def __init__(self, size: int, descriptor: int | None = None) -> None:
        self._libc = _libc()
        self.size = size
        self.address = self._map(descriptor)
        self._shared = descriptor is not None
        self._lock = threading.RLock()
        self._lent: dict[int, tuple[int, int]] = {}
        self._borrowed = 0
        self._retired = False
        self._inherited = False
        self._twins: dict[int, int] = {}
        self._late: deque[Callable[[], None] | None] = deque()
        process_forks.join(self)

    def _map(self, descriptor: int | None) -> int:
        """Maps at a multiple of the huge page size, without which there are no huge pages.

        Private memory that has no room for one lies where the system puts it, beside other
        such memory: so it counts as one mapping with that, of which a process may have few.
        """
        if descriptor is None and self.size < _HUGE_PAGE:
            flags = _MAP_PRIVATE | _MAP_ANONYMOUS
            return self._mmap(None, self.size, _PROT_READ_WRITE, flags, -1)
        address = self._map_aligned(descriptor)
        self._libc.madvise(address, self.size, _MADV_HUGEPAGE)
        return address

    def _map_aligned(self, descriptor: int | None) -> int:
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

    def array(self, offset: int, length: int, released: Callable[[], None] | None) -> Array:
        """A view of part of the region that keeps it mapped.

        Args:
            offset: first byte.
            length: bytes that are used.
            released: called once nobody refers to the array any more, on
                whatever thread that happens; must not block.
        """
        with self._lock:
            if not (_forking and self._shared):
                array = _RegionArray.from_address(self.address + offset)
                array.region = self
                array.released = released
                self._lent[id(array)] = (offset, length)
                return array
            self._borrowed += 1
        try:
            return self._copied(offset, length)
        finally:
            if released is not None:
                released()
            self._give_back()

    def _copied(self, offset: int, length: int) -> Array:
        """The same bytes in a region of their own: a fork has looked already at what is lent."""
        private = Region(length)
        ctypes.memmove(private.address, self.address + offset, length)
        array = private.array(0, length, None)
        private.retire()
        return array

    def _array_died(self, array: _RegionArray) -> None:
        if _forking:  # perhaps this is the child already: no locks, nothing shared
            self._late.append(array.released)
            self._lent.pop(id(array), None)
            if not _forking:
                self._settle()
            return
        if array.released is not None and not self._inherited:
            array.released()
        with self._lock:
            self._lent.pop(id(array), None)
            if self._retired:
                self._unmap_if_unused()

    def _settle(self) -> None:
        """Does what waited while a thread forked."""
        with self._lock:
            self._borrowed += 1
        while self._late:
            try:
                released = self._late.popleft()
            except IndexError:  # another thread took it
                break
            if released is not None:
                released()
        self._give_back()

    def _give_back(self) -> None:
        """Ends what kept the region mapped."""
        with self._lock:
            self._borrowed -= 1
            self._unmap_if_unused()

    def retire(self) -> None:
        """Gives the region up; it is unmapped as soon as nothing uses it."""
        with self._lock:
            self._retired = True
            self._unmap_if_unused()

    def _unmap_if_unused(self) -> None:
        used = self._lent or self._borrowed or self._late
        if self._retired and not used and self.size:
            process_forks.leave(self)
            self._libc.munmap(self.address, self.size)
            self.size = 0

    # Forks; see ``process_forks.ForkAware``.

    def before_fork(self) -> None:
        """Copies what is lent, for the child."""
        if not self._shared:
            return
        with self._lock:
            lent = list(self._lent.values())
            self._borrowed += 1
        try:
            if lent:
                self._twins[threading.get_ident()] = self._twin(lent)
        except OSError as error:
            _log.warning("a forked child must not touch the tensors received: %s", error)
        finally:
            self._give_back()

    def _twin(self, lent: list[tuple[int, int]]) -> int:
        """Private memory like this region, where only what is lent was ever touched."""
        flags = _MAP_PRIVATE | _MAP_ANONYMOUS | _MAP_NORESERVE
        twin = self._mmap(None, self.size, _PROT_READ_WRITE, flags, -1)
        for offset, length in lent:
            ctypes.memmove(twin + offset, self.address + offset, length)
        return twin

    def after_fork_in_parent(self) -> None:
        """Drops the copy, which is the child's."""
        twin = self._twins.pop(threading.get_ident(), None)
        if twin is not None:
            self._libc.munmap(twin, self.size)
        self._settle()

    def after_fork_in_child(self) -> None:
        """Puts the copy in the place of what is shared; arrays there are this process's own."""
        self._lock = threading.RLock()
        self._late.clear()
        self._borrowed = 0
        self._inherited = True
        twin = self._twins.pop(threading.get_ident(), None)
        if self._lent or twin is not None:
            self._retired = True
        if self._shared:
            self._shared = False
            self._part(twin)
        self._unmap_if_unused()

    def _part(self, twin: int | None) -> None:
        if twin is not None:
            how = _MREMAP_MAYMOVE | _MREMAP_FIXED
            moved = self._libc.mremap(twin, self.size, self.size, how, self.address)
            if moved == self.address:
                return
        protection = _PROT_NONE if self._lent else _PROT_READ_WRITE
        flags = _MAP_PRIVATE | _MAP_ANONYMOUS | _MAP_NORESERVE | _MAP_FIXED
        self._mmap(self.address, self.size, protection, flags, -1)
