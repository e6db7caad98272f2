"""Memory for what arrives through sockets, used again and again.

Touching fresh pages costs ten times what the copy into them does, so large
payloads and tensors are received into regions that earlier ones left behind.
Owns the idle regions, up to a bound; one in use belongs to whoever holds its array.
When the system maps no more, ordinary memory will do.
"""

from __future__ import annotations

import threading
from collections import deque

from rpc.transports.host.regions import Array, Region, view_of

_SMALLEST = 1 << 16
_COARSE_UP_TO = 20
"""Bits of a size up to which sizes are powers of two; above, there are eight to a doubling."""


def _size_for(length: int) -> int:
    """Returns the size to take for ``length`` bytes; from a megabyte on, at most an eighth more."""
    bits = (length - 1).bit_length()
    if bits <= _COARSE_UP_TO:
        return max(_SMALLEST, 1 << bits)
    step = 1 << (bits - 4)
    return -(-length // step) * step


class ReceiveBuffers:
    """A stock of private memory.

    Args:
        idle_bytes: bound on the memory kept for reuse.
    """

    def __init__(self, idle_bytes: int) -> None:
        self._lock = threading.Lock()
        self._idle: dict[int, list[Region]] = {}
        self._returned: deque[Region] = deque()
        self._limit = self._room = idle_bytes
        self._closed = False

    def take(self, length: int) -> Array:
        """At least ``length`` writable bytes; once the array is dead their memory is reused.

        Raises:
            MemoryError: there is no such memory.
        """
        size = _size_for(length)
        with self._lock:
            region = self._find(size)
        if self._returned:
            self._sort_returned()
        if region is None:
            region = self._map(size)
            if region is None:
                return _ordinary(length)
        taken = region
        return taken.array(0, taken.size, lambda: self._put_back(taken))

    def _find(self, size: int) -> Region | None:
        """An idle region that is large enough, but not twice as large. Needs the lock."""
        stock = self._idle.get(size)
        if not stock:
            larger = min((s for s in self._idle if size < s < 2 * size), default=0)
            stock = self._idle.get(larger)
        if not stock:
            return None
        region = stock.pop()
        if not stock:
            del self._idle[region.size]
        self._room += region.size
        return region

    def _map(self, size: int) -> Region | None:
        """Fresh memory, if need be in exchange for all that is idle; None if there is none."""
        try:
            return Region(size)
        except OSError:
            self._drop_idle()
        try:
            return Region(size)
        except OSError:
            return None

    def view(self, length: int) -> memoryview:
        """The same as exactly ``length`` bytes."""
        return view_of(self.take(length), length)

    def _put_back(self, region: Region) -> None:
        """Runs where an array dies, which may be inside any allocation, also under the lock."""
        self._returned.append(region)
        self._sort_returned()

    def _sort_returned(self) -> None:
        """Keeps what came back, unless a thread is at the stock, which then does so itself."""
        while self._returned and self._lock.acquire(False):
            unwanted: list[Region] = []
            try:
                while self._returned:
                    unwanted += self._keep(self._returned.popleft())
            finally:
                self._lock.release()
            for region in unwanted:
                region.retire()

    def _keep(self, region: Region) -> list[Region]:
        """Makes a region idle; returns what there is no room for. Needs the lock."""
        size = region.size
        if self._closed or size > self._limit:
            return [region]
        unwanted: list[Region] = []
        while self._room < size:  # what was in use last stays
            oldest = next(iter(self._idle))
            stock = self._idle[oldest]
            unwanted.append(stock.pop())
            self._room += oldest
            if not stock:
                del self._idle[oldest]
        stock = self._idle.pop(size, [])
        stock.append(region)
        self._idle[size] = stock
        self._room -= size
        return unwanted

    def _drop_idle(self) -> None:
        with self._lock:
            regions = [region for stock in self._idle.values() for region in stock]
            self._idle.clear()
            self._room = self._limit
        for region in regions:
            region.retire()
        self._sort_returned()

    def close(self) -> None:
        """Unmaps what is idle; what is in use is unmapped when it comes back."""
        with self._lock:
            self._closed = True
        self._drop_idle()


def _ordinary(length: int) -> bytearray:
    try:
        return bytearray(length)
    except MemoryError:
        raise MemoryError(f"{length} bytes cannot be allocated") from None
