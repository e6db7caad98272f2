"""Decides which nodes give no sign of life any more. No I/O, and no clock but one's own.

Nodes count their signs of life. A node is timed from when *this* node saw its count change, so
clocks need not agree, and a node that slept itself gives the others that time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping


class Silence:
    """The signs of life that one node hears of the others.

    Args:
        seconds: without a sign of life after which a node counts as gone.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._heard: dict[int, tuple[int, float]] = {}
        self._proven: set[int] = set()
        self._asked: float | None = None

    def hear(self, now: float, beats: Mapping[int, int]) -> set[int]:
        """Takes note of the nodes' counts; returns those that are silent for too long."""
        asleep = 0.0
        if self._asked is not None:
            asleep = max(0.0, now - self._asked - self._seconds / 2)
        self._asked = now
        for node, count in beats.items():
            known, since = self._heard.get(node, (-1, now))
            if node in self._heard and count != known:
                self._proven.add(node)
            self._heard[node] = (count, now if count != known else since + asleep)
        for node in self._heard.keys() - beats.keys():
            del self._heard[node]
        self._proven &= beats.keys()
        return {n for n, (_, since) in self._heard.items() if now - since >= self._seconds}

    def has_heard(self, nodes: Iterable[int]) -> bool:
        """True if each of these nodes gave a sign of life since it was first asked about."""
        return self._proven.issuperset(nodes)
