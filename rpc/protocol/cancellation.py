"""Decides which requests that arrive were cancelled before they did. Sans-IO.

A caller that gives up says so in a control message, which may overtake the request.
A cancellation of a request that is not there is therefore remembered for a while;
most are of requests that were over already, so only the latest are kept.
"""

from __future__ import annotations

from collections.abc import Iterable

_KEPT = 4096


class EarlyCancellations:
    """Cancellations of requests that did not arrive yet.

    Attributes:
        noted: sender and correlation of each; empty most of the time.
    """

    def __init__(self, kept: int = _KEPT) -> None:
        self._kept = kept
        self.noted: dict[tuple[int, int], None] = {}

    def note(self, sender: int, correlations: Iterable[int]) -> None:
        """Notes that requests of ``sender`` which are not here were cancelled."""
        self.noted.update(dict.fromkeys((sender, each) for each in correlations))
        while len(self.noted) > self._kept:
            del self.noted[next(iter(self.noted))]

    def take(self, sender: int, correlation: int) -> bool:
        """Says of a request that arrived if it was cancelled before."""
        known = (sender, correlation) in self.noted
        if known:
            del self.noted[sender, correlation]
        return known

    def worker_lost(self, sender: int) -> None:
        """Forgets a worker that is gone; in its next life it counts its requests anew."""
        self.noted = {key: None for key in self.noted if key[0] != sender}
