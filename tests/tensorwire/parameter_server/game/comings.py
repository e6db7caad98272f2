"""Trainers in a game that leave before all is trained, join again, and come while others train."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.tensorwire.parameter_server.game.cluster import Game
    from tests.tensorwire.parameter_server.game.trainers import TrainerProcess

_TRAINING = ("declare", "join", "start", "count", "work")


class Comings:
    """Draws who comes and who goes, with dice of its own.

    Args:
        game: its game.
        seed: of that.
    """

    def __init__(self, game: Game, seed: int) -> None:
        self._game = game
        self._dice = random.Random(f"comings {seed}")
        self._left = game.plan.comings
        self._came = 0

    def next(self) -> None:
        """Now and then has a trainer leave, or a new one come."""
        if not self._left or self._dice.random() >= 0.02:
            return
        at_work = [t for t in self._game.trainers if self._trains(t) and t.phase == "work"]
        if not at_work:
            return
        self._left -= 1
        if self._dice.random() < 0.4:
            self._came += 1
            self._game.start_trainer(f"late{self._came}")
        else:
            self._dice.choice(at_work).is_leaving = True

    def comes_back(self, trainer: TrainerProcess) -> bool:
        """True if a trainer that has left joins again; always if nobody else would train."""
        others = [each for each in self._game.trainers if each is not trainer]
        return self._dice.random() < 0.7 or not any(map(self._trains, others))

    def _trains(self, trainer: TrainerProcess) -> bool:
        is_here = self._game.is_healthy(trainer) and not trainer.asleep
        return is_here and trainer.phase in _TRAINING and not trainer.is_leaving
