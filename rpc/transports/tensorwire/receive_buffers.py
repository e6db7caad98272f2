"""Memory for what arrives through sockets, used again and again.

Touching fresh pages costs ten times what the copy into them does, so large
payloads and tensors are received into regions that earlier ones left behind.
Owns the idle regions, up to a bound; one in use belongs to whoever holds its array.
"""

from __future__ import annotations

import threading

from rpc.transports.regions import Array, Region, view_of

_SMALLEST = 1 << 16


class ReceiveBuffers:
    """A stock of private memory.

    Args:
        idle_bytes: bound on the memory kept for reuse.
    """

    def __init__(self, idle_bytes: int) -> None:
        # Re-entrant: an array may die inside any allocation, also of the thread that holds it.
        self._lock = threading.RLock()
        self._idle: dict[int, list[Region]] = {}
        self._room = idle_bytes
        self._closed = False

    def take(self, length: int) -> Array:
        """At least ``length`` writable bytes; once the array is dead their memory is reused."""
        size = max(_SMALLEST, 1 << (length - 1).bit_length())
        with self._lock:
            stock = self._idle.get(size)
            region = stock.pop() if stock else None
            if region is not None:
                self._room += size
        if region is None:
            region = Region(size)
        taken = region
        return taken.array(0, size, lambda: self._put_back(taken))

    def view(self, length: int) -> memoryview:
        """The same as exactly ``length`` bytes."""
        return view_of(self.take(length), length)

    def _put_back(self, region: Region) -> None:
        with self._lock:
            if not self._closed and region.size <= self._room:
                self._room -= region.size
                self._idle.setdefault(region.size, []).append(region)
                return
        region.retire()

    def close(self) -> None:
        """Unmaps what is idle; what is in use is unmapped when it comes back."""
        with self._lock:
            self._closed = True
            regions = [region for stock in self._idle.values() for region in stock]
            self._idle.clear()
        for region in regions:
            region.retire()
