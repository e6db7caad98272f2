"""Holds back what arrives while the group is being made known.

Workers start to call each other as soon as they know the group, so the first
calls may arrive when this worker knows only some of the others. A handler that
ran then would not find the rest.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rpc.transports.base import Frame

Deliver = Callable[[int, Frame], None]


class EarlyFrames:
    """The frames that have to wait, if any have to.

    Args:
        deliver: takes a frame when its time has come.
    """

    def __init__(self, deliver: Deliver) -> None:
        self._deliver = deliver
        self._lock = threading.Lock()
        self._held: list[tuple[int, Frame]] | None = None

    def keep(self, sender: int, frame: Frame) -> bool:
        """Keeps a frame for later; False if it need not wait."""
        return self._held is not None and self._append(sender, frame)

    def _append(self, sender: int, frame: Frame) -> bool:
        with self._lock:
            if self._held is None:
                return False
            self._held.append((sender, frame))
            return True

    @contextmanager
    def held_back(self) -> Iterator[None]:
        """Makes frames wait until the end of the block, where they are delivered in order."""
        with self._lock:
            self._held = []
        try:
            yield
        finally:
            while held := self._take():
                for sender, frame in held:
                    self._deliver(sender, frame)

    def _take(self) -> list[tuple[int, Frame]]:
        with self._lock:
            held = self._held or []
            self._held = [] if held else None
            return held
