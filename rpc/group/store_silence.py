"""Remembers for how long a store has left a worker without an answer. Sans-IO."""

from __future__ import annotations

from typing import Final, NamedTuple

_SHORTEST_SECONDS: Final = 0.2
"""Waits for an answer that are no longer are usual."""
_MOST_KEPT: Final = 32


class _Silence(NamedTuple):
    """A wait for an answer that is over."""

    ended: float
    seconds: float


class StoreSilence:
    """The long waits for an answer of the store, and the one that lasts, if one does.

    One thread asks the store and says so here; any thread may ask how long that took. Times are
    seconds on any monotonic clock.
    """

    __slots__ = ("_asked", "_silences")

    def __init__(self) -> None:
        self._asked: float | None = None
        self._silences: tuple[_Silence, ...] = ()

    def asked(self, now: float) -> None:
        """Notes that the store is asked."""
        self._asked = now

    def answered(self, now: float) -> None:
        """Notes that it has answered."""
        asked = self._asked
        if asked is not None and now - asked >= _SHORTEST_SECONDS:
            self._silences = (*self._silences[1 - _MOST_KEPT :], _Silence(now, now - asked))
        self._asked = None

    def lasted(self, seconds: float, within: float, now: float) -> bool:
        """True if it was silent for so many seconds.

        Args:
            seconds: the shortest silence that counts.
            within: seconds; the silence lasts, or ended in the last so many.
            now: the time.
        """
        asked = self._asked
        if asked is not None and now - asked >= seconds:
            return True
        return any(s.seconds >= seconds and s.ended >= now - within for s in self._silences)
