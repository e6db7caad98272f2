"""The driver's own state, which is backed up with stage 0, and the places of its loops."""

from __future__ import annotations

import pickle
import weakref
from dataclasses import dataclass
from typing import Final

from tensorwire.checkpoint import Stateful

OWN: Final = "pipeline's "
"""Begins the names of the states that a pipeline's scalers have."""


@dataclass(frozen=True, slots=True)
class Kept:
    """The driver's state at a cut.

    Args:
        steps: how many training steps were done.
        place: where in the data the loop was, and what else :meth:`Pipeline.batches` keeps.
    """

    steps: int
    place: bytes


class DriverPlaces:
    """Places in the data of a driver's loops, which are numbered in the order they begin.

    Attributes:
        now: the place of the loop that runs, pickled; empty before the first.
    """

    def __init__(self) -> None:
        self.now: bytes = b""
        self._loops = 0
        self._left: bytes | None = None
        self._made = 0
        self._own: weakref.WeakValueDictionary[str, Stateful] = weakref.WeakValueDictionary()

    def add(self, made: Stateful) -> None:
        """Has the state of something that belongs to the pipeline go with its place.

        It is known by how many there were before, which is the same in each life of the driver.
        """
        self._own[f"{OWN}{self._made}"] = made
        self._made += 1

    def own(self) -> dict[str, Stateful]:
        """The objects that were added, by the names of their states."""
        return dict(self._own)

    def next_loop(self) -> int:
        """Numbers a loop."""
        self._loops += 1
        return self._loops - 1

    def go_on_at(self, place: bytes) -> None:
        """Has the program's loops go on there."""
        self.now = place
        self.put(place or None)

    def put(self, place: bytes | None) -> None:
        """Says where the program's loops are to go on; None for nowhere."""
        self._left = place

    def take(self) -> bytes | None:
        """The place to which the program's loops go on, if an earlier life left one.

        It is handed out to the loops that come before it, too, and to none after it.
        """
        if self._left is None:
            return None
        loop: int = pickle.loads(self._left).loop
        left = self._left
        if loop < self._loops:
            self._left = None
        return left
