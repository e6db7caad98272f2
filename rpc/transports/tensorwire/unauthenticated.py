"""Chooses which unauthenticated connection to close when there are too many. Sans-IO.

A flood of connections must not keep members of the group out, and many members that connect
at once must not evict each other for ever. So the evicted connection comes from the origin
that most connections come from. Of those it is the oldest, which had most time to prove who
it is. But each connection may have a time in which none of the same origin evicts it: while
that lasts for all of them, the newest is refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)


class UnauthenticatedConnections(Generic[Key]):
    """Connections in the order in which they came.

    Args:
        most: how many there may be.
        seconds: time in which a connection is not evicted by another of the same origin.
    """

    def __init__(self, most: int, seconds: float) -> None:
        self._most = most
        self._seconds = seconds
        self._arrived: dict[Key, tuple[Hashable, float]] = {}

    def add(self, connection: Key, origin: Hashable, now: float) -> Key | None:
        """Adds a connection.

        Args:
            connection: a new one.
            origin: the host or process that it comes from.
            now: the time, in seconds.

        Returns:
            The connection to close, which is removed; None if there is room for all.
        """
        self._arrived[connection] = (origin, now)
        if len(self._arrived) <= self._most:
            return None
        counts = Counter(each for each, _ in self._arrived.values())
        most = max(counts.values())
        evicted = next(key for key, (each, _) in self._arrived.items() if counts[each] == most)
        is_new = self._arrived[evicted][1] + self._seconds > now
        if is_new and counts[origin] == most:
            evicted = connection
        self.discard(evicted)
        return evicted

    def discard(self, connection: Key) -> None:
        """Removes a connection, if it is here."""
        self._arrived.pop(connection, None)
