"""Bounds what is under way to one peer: unanswered requests, by their bytes.

A request counts from before it is sent until its reply is here, so the bound
covers every queue on the way, the receiver's included. Small and large requests
are counted apart, each against the bound, so that a small one never waits for
a large one. Something larger than the bound may travel alone.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

_LEAST_CHARGE = 4096
_LARGE_FROM = 1 << 16
_LOW_WATER = 0.75


@dataclass(slots=True)
class _Lane:
    """The requests of one size class that are under way: their charges by correlation."""

    charges: dict[int, int] = field(default_factory=dict)
    held: int = 0


class FlowWindow:
    """The requests under way to one peer.

    Args:
        limit: bytes, for each size class.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._small = _Lane()
        self._large = _Lane()
        self._waiters = 0
        self._closed = False

    def try_charge(self, correlation: int, size: int) -> bool:
        """Counts a request if it fits, or if none of its class is under way."""
        charge = size if size > _LEAST_CHARGE else _LEAST_CHARGE
        lane = self._small if size < _LARGE_FROM else self._large
        with self._lock:
            if lane.held and lane.held + charge > self._limit:
                return False
            lane.held += charge
            lane.charges[correlation] = charge
            return True

    def force_charge(self, correlation: int, size: int) -> None:
        """Counts a request whether it fits or not."""
        lane = self._lane(size)
        charge = max(size, _LEAST_CHARGE)
        with self._lock:
            lane.held += charge
            lane.charges[correlation] = charge

    def wait_for_room(self, size: int) -> None:
        """Waits until a request of ``size`` bytes is likely to fit, or the window is closed."""
        lane = self._lane(size)
        room = min(size, self._limit)
        enough = min(self._limit - room, int(self._limit * _LOW_WATER))
        with self._changed:
            self._waiters += 1
            try:
                self._changed.wait_for(lambda: self._closed or lane.held <= enough)
            finally:
                self._waiters -= 1

    def release(self, correlation: int) -> None:
        """The reply to a request is here."""
        with self._lock:
            lane = self._small if correlation in self._small.charges else self._large
            lane.held -= lane.charges.pop(correlation, 0)
            if self._waiters:
                self._changed.notify_all()

    @property
    def small_under_way(self) -> int:
        """Small requests that were not replied to."""
        return len(self._small.charges)

    @property
    def held(self) -> int:
        """Bytes under way."""
        return self._small.held + self._large.held

    def close(self) -> None:
        """Nothing will come back: wakes whoever waits for room."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _lane(self, size: int) -> _Lane:
        return self._small if size < _LARGE_FROM else self._large
