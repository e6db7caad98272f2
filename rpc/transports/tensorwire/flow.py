"""Bounds what is under way to one peer: unanswered requests, by their bytes.

A request counts from before it is sent until its reply is here, so the bound
covers every queue on the way, the receiver's included. Something larger than
the bound may travel alone.
"""

from __future__ import annotations

import threading

_LEAST_CHARGE = 4096
_LOW_WATER = 0.75


class FlowWindow:
    """The requests under way to one peer.

    Args:
        limit: bytes.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._charges: dict[int, int] = {}
        self._held = 0
        self._waiters = 0
        self._closed = False

    def try_charge(self, correlation: int, size: int) -> bool:
        """Counts a request if it fits, or if nothing is under way."""
        charge = size if size > _LEAST_CHARGE else _LEAST_CHARGE
        with self._lock:
            if self._held and self._held + charge > self._limit:
                return False
            self._held += charge
            self._charges[correlation] = charge
            return True

    def force_charge(self, correlation: int, size: int) -> None:
        """Counts a request whether it fits or not."""
        charge = max(size, _LEAST_CHARGE)
        with self._lock:
            self._held += charge
            self._charges[correlation] = charge

    def wait_for_room(self, size: int) -> None:
        """Waits until a request of ``size`` bytes is likely to fit, or the window is closed."""
        room = min(size, self._limit)
        enough = min(self._limit - room, int(self._limit * _LOW_WATER))
        with self._changed:
            self._waiters += 1
            try:
                self._changed.wait_for(lambda: self._closed or self._held <= enough)
            finally:
                self._waiters -= 1

    def release(self, correlation: int) -> None:
        """The reply to a request is here."""
        with self._lock:
            self._held -= self._charges.pop(correlation, 0)
            if self._waiters:
                self._changed.notify_all()

    @property
    def held(self) -> int:
        """Bytes under way."""
        return self._held

    def close(self) -> None:
        """Nothing will come back: wakes whoever waits for room."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
