"""A watch over keys of a store that tells of changes when a test says so."""

from __future__ import annotations

from collections.abc import Callable

from rpc.group.store_watch import ToldWatch


class StandingWatch(ToldWatch):
    """Tells of each change, which is a test's to say."""

    def __init__(self, told: Callable[[], None]) -> None:
        super().__init__(told)
        self._stands = True
