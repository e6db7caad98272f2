"""Decides what becomes of this worker's outstanding calls. Sans-IO.

A call is open from the moment before its request is sent until its reply, its
deadline, its cancellation or the loss of its worker, whichever comes first: exactly
one of them ends it. A call that ended by deadline or was cancelled leaves a *ghost*
behind until the late reply arrives or the worker is lost, because only then is it
known that the request is no longer under way: references lent to it stay alive, and shutdown
must not overtake it.

Deadlines are kept in buckets of 1/64 s, so that opening and closing a call
costs a dict operation however many are outstanding.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from rpc.ids import new_tuple

T = TypeVar("T")

_BUCKETS_PER_SECOND = 64


class Ending(enum.Enum):
    """Reasons for which a call, or a ghost, ended."""

    REPLY = "reply"
    DEADLINE = "deadline"
    CANCELLED = "cancelled"
    LOST = "lost"
    LATE_REPLY = "late reply"
    GHOST_LOST = "ghost lost"


_REPLY = Ending.REPLY


class _AnyEnded(NamedTuple):  # apart, as Python 3.10 has no generic named tuples
    ending: Ending
    call: object


class Ended(_AnyEnded, Generic[T]):
    """Effect: tell ``call`` how it ended."""

    __slots__ = ()
    if TYPE_CHECKING:
        call: T


class _AnyOpen(NamedTuple):
    call: object
    to: int
    opened_at: float
    bucket: int


class _Open(_AnyOpen, Generic[T]):
    __slots__ = ()
    if TYPE_CHECKING:
        call: T


@dataclass(frozen=True, slots=True)
class OutstandingCall(Generic[T]):
    """One row of a dump of outstanding calls."""

    call_id: int
    call: T
    to: int
    opened_at: float


class CallTable(Generic[T]):
    """The outstanding calls of one worker; ``T`` is whatever the agent keeps per call.

    Times are seconds on any monotonic clock, always passed in.
    """

    def __init__(self) -> None:
        self._ids = itertools.count(1)
        self._open: dict[int, _Open[T]] = {}
        self.open_calls: Callable[[], int] = self._open.__len__
        """Counts those that have not ended."""
        self._ghosts: dict[int, tuple[T, int]] = {}
        self._buckets: dict[int, set[int]] = {}

    def open(self, call: T, to: int, now: float, timeout: float) -> int:
        """Registers a call; ``timeout`` in seconds, 0 for none. Returns its id."""
        call_id = next(self._ids)
        bucket = int((now + timeout) * _BUCKETS_PER_SECOND) + 1 if timeout else 0
        self._open[call_id] = new_tuple(_Open, (call, to, now, bucket))
        if bucket:
            members = self._buckets.get(bucket)
            if members is None:
                self._buckets[bucket] = {call_id}
            else:
                members.add(call_id)
        return call_id

    def close(self, call_id: int, sender: int | None = None) -> Ended[T] | None:
        """Ends the call of a reply that arrived; None if it ended before and left no ghost.

        Also None if it came from a ``sender`` that was not called.
        """
        entry = self._open.get(call_id)
        if entry is None:
            return self._close_ghost(call_id, sender)
        if sender is not None and sender != entry.to:
            return None
        call, bucket = entry.call, entry.bucket
        del self._open[call_id]
        if bucket:  # as ``_unbucket`` does; every call comes here
            members = self._buckets[bucket]
            members.discard(call_id)
            if not members:
                del self._buckets[bucket]
        return new_tuple(Ended, (_REPLY, call))

    def _close_ghost(self, call_id: int, sender: int | None) -> Ended[T] | None:
        ghost = self._ghosts.get(call_id)
        if ghost is None or (sender is not None and sender != ghost[1]):
            return None
        del self._ghosts[call_id]
        return Ended(Ending.LATE_REPLY, ghost[0])

    def find(self, call_id: int) -> T | None:
        """A call that is open; None if it ended."""
        entry = self._open.get(call_id)
        return None if entry is None else entry.call

    def find_first(self, wanted: Callable[[T], bool]) -> int | None:
        """The oldest open call that is wanted, by its id; None if there is none."""
        return next((i for i, entry in self._open.items() if wanted(entry.call)), None)

    def withdraw(self, call_id: int) -> bool:
        """Forgets a call whose request could not be sent; False if it ended meanwhile."""
        entry = self._open.get(call_id)
        if entry is None:
            self._ghosts.pop(call_id, None)
            return False
        self._unbucket(call_id, entry.bucket)  # first: no deadline may refer to what is gone
        del self._open[call_id]
        return True

    def cancel(self, call_id: int) -> Ended[T] | None:
        """Ends a call that its caller gives up, and leaves a ghost; None if it ended before."""
        entry = self._open.pop(call_id, None)
        if entry is None:
            return None
        self._unbucket(call_id, entry.bucket)
        self._ghosts[call_id] = (entry.call, entry.to)
        return Ended(Ending.CANCELLED, entry.call)

    def expire(self, now: float) -> list[Ended[T]]:
        """Ends the calls whose deadline has passed, earliest first; each leaves a ghost."""
        ended: list[Ended[T]] = []
        for bucket in sorted(b for b in self._buckets if b <= now * _BUCKETS_PER_SECOND):
            for call_id in sorted(self._buckets.pop(bucket)):
                entry = self._open.pop(call_id, None)
                if entry is None:  # one must not keep the others from ending
                    continue
                self._ghosts[call_id] = (entry.call, entry.to)
                ended.append(Ended(Ending.DEADLINE, entry.call))
        return ended

    def lose(self, worker_id: int) -> list[Ended[T]]:
        """Ends every call and ghost that waits for a worker which is gone."""
        ended: list[Ended[T]] = []
        for call_id in [c for c, entry in self._open.items() if entry.to == worker_id]:
            entry = self._open.pop(call_id)
            self._unbucket(call_id, entry.bucket)
            ended.append(Ended(Ending.LOST, entry.call))
        for call_id in [c for c, (_, to) in self._ghosts.items() if to == worker_id]:
            ended.append(Ended(Ending.GHOST_LOST, self._ghosts.pop(call_id)[0]))
        return ended

    def next_expiry(self) -> float | None:
        """Returns when :meth:`expire` should run next; None while no call has a deadline."""
        return min(self._buckets) / _BUCKETS_PER_SECOND if self._buckets else None

    def destinations(self) -> set[int]:
        """The workers that a reply is expected from."""
        return {entry.to for entry in self._open.values()}

    def outstanding(self) -> Iterator[OutstandingCall[T]]:
        """The open calls, oldest first; to be gone through before anything changes."""
        return (OutstandingCall(i, e.call, e.to, e.opened_at) for i, e in self._open.items())

    def __len__(self) -> int:
        """Returns how many requests may still be under way: open calls and ghosts."""
        return len(self._open) + len(self._ghosts)

    def _unbucket(self, call_id: int, bucket: int) -> None:
        if bucket:
            members = self._buckets[bucket]
            members.discard(call_id)
            if not members:
                del self._buckets[bucket]
