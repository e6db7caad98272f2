"""Sans-IO: the copies of stages that one worker keeps for one pipeline, and whom it obeys.

A worker obeys the latest *epoch* it has heard of. An epoch is one formation of the pipeline under
one life of its driver; whatever comes from an earlier one, such as a copy sent by an owner that
slept while another took its stage, is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from tensorwire.pipeline.backups.places import Copy, Seat

C = TypeVar("C")


@dataclass(frozen=True, slots=True)
class Epoch:
    """Names a formation of a pipeline.

    Args:
        reign: rises with each driver of the pipeline's name.
        driver: names the driver's life.
        formation: rises with each formation under one driver.
    """

    reign: int
    driver: str
    formation: int

    def may_follow(self, known: Epoch | None) -> bool:
        """Says whether a worker that has heard of ``known`` obeys this one."""
        if known is None or self.reign != known.reign:
            return known is None or self.reign > known.reign
        return self.driver == known.driver and self.formation >= known.formation


class Shelf(Generic[C]):
    """The copies that one worker keeps for one pipeline."""

    def __init__(self) -> None:
        self.epoch: Epoch | None = None
        self._copies: dict[Copy, C] = {}

    def enter(self, epoch: Epoch) -> bool:
        """Obeys an epoch from now on; returns False if a later one is known."""
        if not epoch.may_follow(self.epoch):
            return False
        self.epoch = epoch
        return True

    def put(self, epoch: Epoch, seat: Seat, version: int, copy: C) -> bool:
        """Keeps a copy; returns False if a later epoch is known."""
        if not self.enter(epoch):
            return False
        self._copies[Copy(seat, version)] = copy
        return True

    def get(self, seat: Seat, version: int) -> C | None:
        """A copy, if it is here."""
        return self._copies.get(Copy(seat, version))

    def settle(self, epoch: Epoch, version: int) -> list[C]:
        """Drops and returns versions older than this one, which every seat has twice."""
        if not self.enter(epoch):
            return []
        return self._drop(lambda each: each.version < version)

    def go_back(self, epoch: Epoch, version: int) -> list[C]:
        """Drops and returns versions newer than this one, from which the pipeline goes on."""
        if not self.enter(epoch):
            return []
        return self._drop(lambda each: each.version > version)

    def clear(self, epoch: Epoch) -> bool:
        """Drops everything, as the pipeline begins anew; False if a later epoch is known."""
        if not self.enter(epoch):
            return False
        self._copies.clear()
        return True

    def copies(self) -> frozenset[Copy]:
        """The names of all copies here."""
        return frozenset(self._copies)

    def _drop(self, unwanted: Callable[[Copy], bool]) -> list[C]:
        gone = [each for each in self._copies if unwanted(each)]
        return [self._copies.pop(each) for each in gone]
