"""Decides when a pull may be answered: not before the trainers it depends on are far enough.

Not part of the log: a pull changes nothing, and is asked again of a new head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from tensorwire.parameter_server.decisions.clock import Clock
from tensorwire.parameter_server.decisions.consistency import UNBOUNDED
from tensorwire.parameter_server.decisions.pushes import Refusal
from tensorwire.parameter_server.opaque import Carried
from tensorwire.parameter_server.pickled import PickledByArguments

AT_ONCE: Final = 0
"""The step of a pull that waits for nobody."""


@dataclass(frozen=True, slots=True)
class Pull(PickledByArguments):
    """A question for rows.

    Args:
        step: pushes that its sender has made, or ``AT_ONCE``.
        epoch: of the map by which it was split.
        ask: who asks for what; not looked at here.
    """

    step: int
    epoch: int
    ask: Carried


@dataclass(frozen=True, slots=True)
class Answer:
    """The state, as it is now, answers this pull."""

    pull: Pull


@dataclass(frozen=True, slots=True)
class Turn:
    """This pull must be split again, or its asker has come to the wrong place."""

    pull: Pull
    reason: Refusal


class Reads:
    """The pulls that wait at one shard.

    Args:
        staleness: steps that a pull may be ahead of the slowest trainer, or ``UNBOUNDED``.
    """

    def __init__(self, staleness: int) -> None:
        self._staleness = staleness
        self._waiting: list[Pull] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def park(self, pull: Pull) -> None:
        """Keeps a pull that nothing may be answered to yet."""
        self._waiting.append(pull)

    def clear(self) -> list[Pull]:
        """Forgets all; returns them."""
        waiting, self._waiting = self._waiting, []
        return waiting

    def ask(self, pull: Pull, clock: Clock) -> list[Answer | Turn]:
        """Takes a pull; returns what can be answered now."""
        self._waiting.append(pull)
        return self.due(clock)

    def due(self, clock: Clock) -> list[Answer | Turn]:
        """Returns what can be answered since the clock went on."""
        if not self._waiting:
            return []
        effects: list[Answer | Turn] = []
        waiting, self._waiting = self._waiting, []
        for pull in waiting:
            if pull.epoch < clock.epoch:
                effects.append(Turn(pull, Refusal.MOVED))
            elif self._may_be_answered(pull, clock):
                effects.append(Answer(pull))
            else:
                self._waiting.append(pull)
        return effects

    def _may_be_answered(self, pull: Pull, clock: Clock) -> bool:
        if pull.epoch > clock.epoch or not clock.is_open:
            return False
        low = clock.low
        return self._staleness == UNBOUNDED or low is None or low >= pull.step - self._staleness
