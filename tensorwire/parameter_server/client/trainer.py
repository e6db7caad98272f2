"""The count of one trainer's pushes, and what a roll-back makes of it. Sans-IO."""

from __future__ import annotations

from dataclasses import dataclass

from tensorwire.parameter_server.decisions.reads import AT_ONCE
from tensorwire.parameter_server.decisions.views import Client, Snapshot, View


@dataclass(frozen=True, slots=True)
class Undone:
    """The part that a roll-back has undone of one trainer.

    Args:
        generation: to which the cluster went back.
        trainer: its number.
        pushes: how many of its pushes are lost.
    """

    generation: int
    trainer: int
    pushes: int


@dataclass(slots=True)
class Trainer:
    """One worker as a trainer. The session's lock guards it.

    Args:
        number: the trainer's number in the cluster; -1 while it is no trainer.
        next: the number of its next push.
        first: the number of the first push which it made, or makes again.
        is_finishing: its last push is under way.
    """

    number: int = -1
    next: int = 0
    first: int = 0
    is_finishing: bool = False

    def begin(self, number: int, count: int) -> None:
        """Makes it a trainer, whose first push has this number."""
        self.number = number
        self.next = self.first = count
        self.is_finishing = False

    def take(self) -> int:
        """The number of a push that is made now."""
        self.next += 1
        return self.next - 1

    @property
    def reads(self) -> int:
        """The step whose rows it wants; see ``decisions.reads.Pull``."""
        return self.next if self.number >= 0 and not self.is_finishing else AT_ONCE

    def go_back(self, client: Client, view: View, snapshot: Snapshot) -> Undone | None:
        """Notes that the cluster went back to a snapshot.

        Args:
            client: this life of the worker.
            view: the one that says so.
            snapshot: with which the cluster began again.

        Returns:
            The part that it has undone here; None if the view knows no such trainer.
        """
        trainer = view.trainer(client)
        if self.number < 0 or trainer is None:  # it may not have heard yet that it is one
            return None if trainer is None else Undone(view.generation, trainer.number, 0)
        known = [snapshot.counts[t.number] for t in view.trainers if t.number in snapshot.counts]
        start = min(known, default=snapshot.time)
        before, self.next = self.next, snapshot.counts.get(self.number, start)
        lost = max(0, before - max(self.next, self.first))
        self.first = min(self.first, self.next)
        self.is_finishing = False
        return Undone(view.generation, self.number, lost)
