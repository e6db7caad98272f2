"""Decides when a client gives up, as servers that it must reach have not answered for too long.

A server that lives and takes its time is waited for: others may have to push first. What counts is
that a call finds nobody, is made again, and again finds nobody. Sans-IO.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Final

_LONGEST_GAP: Final = 10.0
"""Seconds between two vain tries of one row; after more, this client slept or did not try."""


@dataclass(frozen=True, slots=True)
class _Vain:
    """Tries in a row that found nobody, with the times of the first and the last."""

    since: float
    last: float


class Patience:
    """The vain tries of one client.

    Args:
        limit: seconds of them after which it gives up.
    """

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self._vain: dict[Hashable, _Vain] = {}

    def answered(self, whom: Hashable) -> None:
        """Notes that somebody answered."""
        self._vain.pop(whom, None)

    def failed(self, whom: Hashable, now: float) -> bool:
        """Notes a try that found nobody; True if that is so for too long.

        Args:
            whom: a shard's number, or another name for who was to answer.
            now: seconds of any clock that only rises.
        """
        before = self._vain.get(whom)
        is_new = before is None or now - before.last > _LONGEST_GAP
        since = now if is_new or before is None else before.since
        self._vain[whom] = _Vain(since, now)
        return now - since >= self.limit
