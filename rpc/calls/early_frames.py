"""Holds back what arrives while the group, or a newcomer, is being made known.

Workers start to call each other as soon as they know the group, so the first
calls may arrive when this worker knows only some of the others. A handler that
ran then would not find the rest. A newcomer's frames, and the news that it is
lost, may come as soon as the transport knows it, and the group knows it later.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Arrival = Callable[[], None]
"""Takes what arrived; runs no handler on its thread, which might wait for what comes next."""


class EarlyFrames:
    """The frames, and the losses, that have to wait, if any have to.

    Attributes:
        held: what waits; None while nothing has to.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.held: list[Arrival] | None = None

    def keep(self, arrival: Arrival) -> bool:
        """Keeps something for later; False if it need not wait."""
        with self._lock:
            if self.held is None:
                return False
            self.held.append(arrival)
            return True

    @contextmanager
    def held_back(self) -> Iterator[None]:
        """Makes all wait until the end of the block, where it is delivered in order."""
        with self._lock:
            self.held = []
        try:
            yield
        finally:
            while held := self._take():
                for arrival in held:
                    arrival()

    def _take(self) -> list[Arrival]:
        with self._lock:
            held = self.held or []
            self.held = [] if held else None
            return held
