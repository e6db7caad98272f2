"""Bounds what is under way to one peer: unanswered requests, by their bytes.

A request counts from before it is sent until its reply is here, so the bound
covers every queue on the way, the receiver's included. Small and large requests
are counted apart, each against the bound, so that a small one never waits for
a large one. Something larger than the bound may travel alone. Waiters get room
in the order in which they came; but a handler does not queue for room that is there, as
those before it may wait for what it does. If nothing comes back for a while, one handler
that waits goes on without room, and later another, ever more slowly: so handlers
that wait for each other's room do not do so for ever. Replies may be counted likewise, from
before they are sent until the peer says that it has them.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field

from rpc.constants import DEFAULT_MAX_BYTES_IN_FLIGHT
from rpc.errors import CallCancelledError, QueueFullError
from rpc.options import WhenFull
from rpc.runtime.executor import blocking, in_handler, is_shared_thread
from rpc.runtime.signals import let_in, restore
from rpc.transports.base import Patience

_LEAST_CHARGE = 4096
_LARGE_FROM = 1 << 16
_LOW_WATER = 0.75
_STALL_SECONDS = 0.25


def _waits(_: int) -> Patience:
    return Patience.WAITS


@dataclass(slots=True, eq=False)
class _Waiter:
    """A request that waits for room, and an event that is set when something changed for it."""

    correlation: int
    charge: int
    changed: threading.Event = field(default_factory=threading.Event)
    counted: bool = False


@dataclass(slots=True)
class _Lane:
    """The requests of one size class: the charges of those under way, and those that wait.

    ``moves`` counts what changed while some waited, ``stalls`` how often nothing did.
    """

    charges: dict[int, int] = field(default_factory=dict)
    held: int = 0
    queue: deque[_Waiter] = field(default_factory=deque)
    moves: int = 0
    stalls: int = 0

    def count(self, correlation: int, charge: int) -> None:
        """Counts a request as under way."""
        self.held += charge
        self.charges[correlation] = charge


class FlowWindow:
    """The requests under way to one peer.

    Args:
        name: the peer's.
        limit: bytes, for each size class; something counts for at least 4096.
        when_full: what becomes of a request that finds no room.
        gives_way: whether another handler runs while one waits for room, and one goes on when
            nothing moves. Not if the waiting one holds what it would send: each would add to
            that.
        stall_seconds: how long nothing moves before the first that waits goes on.
    """

    def __init__(
        self,
        name: str = "",
        limit: int = DEFAULT_MAX_BYTES_IN_FLIGHT,
        when_full: WhenFull = WhenFull.BLOCK,
        gives_way: bool = True,
        stall_seconds: float = _STALL_SECONDS,
    ) -> None:
        self._name = name
        self._limit = limit
        self._when_full = when_full
        self._gives_way = gives_way
        self._stall_seconds = stall_seconds
        self._lock = threading.Lock()
        self._small = _Lane()
        self._large = _Lane()
        self.small_under_way = self._small.charges
        """The small requests that were not replied to."""
        self._closed = False

    def try_charge(self, correlation: int, size: int) -> bool:
        """Counts a request if it fits, or none of its class is under way, and it need not queue."""
        charge = size if size > _LEAST_CHARGE else _LEAST_CHARGE
        lane = self._small if size < _LARGE_FROM else self._large
        with self._lock:
            if lane.held and lane.held + charge > self._limit:
                return False
            if lane.queue and not in_handler():
                return False
            lane.held += charge
            lane.charges[correlation] = charge
            return True

    def charge(
        self,
        correlation: int,
        size: int,
        may_wait: Callable[[], bool],
        patience: Callable[[int], Patience] = _waits,
    ) -> bool:
        """Counts a request that did not fit, once it does.

        Args:
            correlation: the request's.
            size: of the request, in bytes.
            may_wait: whether the calling thread may; if not, or if it runs other handlers,
                too, the request is counted at once.
            patience: of a request, by its correlation.

        Returns:
            False if the window was closed meanwhile. The request is not counted then.

        Raises:
            QueueFullError: nobody is to wait.
            CallCancelledError: the request's call ended meanwhile.
        """
        hurries = patience(correlation) is Patience.HURRIES
        if self._when_full is WhenFull.RAISE and not hurries:
            raise self.full_error()
        lane = self._lane(size)
        waiter = _Waiter(correlation, max(size, _LEAST_CHARGE))
        if hurries or is_shared_thread() or not may_wait():
            with self._lock:
                lane.count(correlation, waiter.charge)
            return True
        with blocking() if self._gives_way else nullcontext():
            try:
                self._wait(lane, waiter, patience)
            except BaseException:
                self._leave(lane, waiter)
                raise
        return waiter.counted

    def release(self, correlation: int) -> None:
        """Frees the room of a request whose reply is here, or never will be."""
        with self._lock:
            lane = self._small if correlation in self._small.charges else self._large
            lane.held -= lane.charges.pop(correlation, 0)
            if lane.queue:
                lane.moves += 1
                lane.stalls = 0
                self._let_in(lane)

    def release_all(self, correlations: Iterable[int]) -> None:
        """Does the same as :meth:`release` for many."""
        if self._small.charges or self._large.charges:
            for correlation in correlations:
                self.release(correlation)

    @property
    def waiting(self) -> int:
        """Requests that wait for room."""
        return len(self._small.queue) + len(self._large.queue)

    @property
    def held(self) -> int:
        """Bytes under way."""
        return self._small.held + self._large.held

    def full_error(self) -> QueueFullError:
        """Returns the error for when nothing more may be sent."""
        return QueueFullError(self._describe())

    def _describe(self) -> str:
        return (
            f"{self.held} bytes are in flight to worker {self._name!r}; the bound is "
            f"{self._limit} (max_bytes_in_flight)"
        )

    def look_again(self) -> None:
        """Looks again at those that wait for room, as the patience of some changed."""
        if self._small.queue or self._large.queue:
            with self._lock:
                self._ring()

    def close(self) -> None:
        """Wakes whoever waits for room, as nothing will come back."""
        with self._lock:
            self._closed = True
            self._ring()

    def _ring(self) -> None:
        """Wakes all that wait for room. Needs the lock."""
        for waiter in (*self._small.queue, *self._large.queue):
            waiter.changed.set()

    def _wait(self, lane: _Lane, waiter: _Waiter, patience: Callable[[int], Patience]) -> None:
        """Waits until a request is counted, or never will be."""
        with self._lock:
            lane.queue.append(waiter)
            self._let_in(lane)
        nested = self._gives_way and in_handler()
        while not waiter.counted:
            seen = lane.moves
            if self._closed:
                self._leave(lane, waiter)
                return
            if patience(waiter.correlation) is Patience.OVER:
                raise CallCancelledError(
                    f"the call ended while it waited for room: {self._describe()}"
                )
            before = let_in()
            try:
                woken = waiter.changed.wait(
                    self._stall_seconds * (1 + lane.stalls) if nested else None
                )
            finally:
                restore(before)
            if woken:
                waiter.changed.clear()
            else:
                self._go_on(lane, waiter, seen)

    def _go_on(self, lane: _Lane, waiter: _Waiter, seen: int) -> None:
        """Counts a handler's request without room if nothing has moved; one at a time."""
        with self._lock:
            if waiter.counted or lane.moves != seen:
                return
            lane.queue.remove(waiter)
            lane.count(waiter.correlation, waiter.charge)
            waiter.counted = True
            lane.moves += 1
            lane.stalls += 1

    def _leave(self, lane: _Lane, waiter: _Waiter) -> None:
        """Removes a request that is not to be sent, after all."""
        with self._lock:
            if waiter in lane.queue:
                lane.queue.remove(waiter)
            lane.held -= lane.charges.pop(waiter.correlation, 0)
            waiter.counted = False
            self._let_in(lane)

    def _let_in(self, lane: _Lane) -> None:
        """Counts those that waited longest, many at a time. Needs the lock."""
        if lane.held > self._limit * _LOW_WATER:
            return
        queue = lane.queue
        while queue and not (lane.held and lane.held + queue[0].charge > self._limit):
            waiter = queue.popleft()
            lane.count(waiter.correlation, waiter.charge)
            waiter.counted = True
            waiter.changed.set()

    def _lane(self, size: int) -> _Lane:
        return self._small if size < _LARGE_FROM else self._large
