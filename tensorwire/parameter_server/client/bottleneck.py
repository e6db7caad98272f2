"""Notices that one server answers later than the others, and says why. No I/O, no clock."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Final

from tensorwire.parameter_server.opaque import Json

_ANSWERS: Final = 200
_MOST: Final = 10 * _ANSWERS
_TIMES: Final = 2.0
_SECONDS: Final = 0.005


class Watch:
    """The times that servers take to answer one worker."""

    def __init__(self) -> None:
        self._seconds: dict[str, list[float]] = {}
        self._told: set[str] = set()

    def answered(self, server: str, seconds: float) -> tuple[str, float, float] | None:
        """Notes that a server has answered.

        Returns:
            A server that is the bottleneck, with its seconds and those of the others; each
            server only once. None if there is no news.
        """
        mine = self._seconds.setdefault(server, [])
        mine.append(seconds)
        if len(self._seconds) < 2 or min(map(len, self._seconds.values())) < _ANSWERS:
            if len(mine) > _MOST:  # it is alone, or another is gone
                self._seconds.clear()
            return None
        medians = {name: statistics.median(each) for name, each in self._seconds.items()}
        self._seconds.clear()
        slowest = max(medians, key=lambda name: medians[name])
        others = statistics.median(medians[name] for name in medians if name != slowest)
        excess = medians[slowest] - others
        if slowest in self._told or excess < _SECONDS or medians[slowest] < _TIMES * others:
            return None
        self._told.add(slowest)
        return slowest, medians[slowest], others


def reason(described: Mapping[str, Json]) -> str:
    """The reason for which a server is slow, from what it says of itself."""
    shards = described["shards"].values()
    stages: dict[str, float] = {}
    for shard in shards:
        for stage, seconds in shard["seconds"].items():
            stages[stage] = stages.get(stage, 0.0) + seconds
    busy = sum(stages.values()) / max(described["age"], 1e-9)
    rows = sum(table["rows"] for shard in shards for table in shard["tables"].values())
    if busy < 0.5:
        return f"it works {busy:.0%} of the time only: its machine or its network is slow"
    stage = max(stages, key=lambda name: stages[name])
    return f"it works {busy:.0%} of the time, most of it on {stage}; it keeps {rows} rows"
