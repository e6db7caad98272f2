"""Makes a script that breaks a rule short, by leaving out what does not matter."""

from __future__ import annotations

from dataclasses import replace

from tests.simulation.group.rules import Rule
from tests.simulation.group.runs import Script, replay
from tests.simulation.group.steps import Step
from tests.simulation.group.worker import Machines

_MOST_REPLAYS = 2000


class _Shrinker:
    """Delta debugging: leaves out ever smaller pieces while the same rule breaks."""

    def __init__(self, script: Script, rule: Rule, machines: Machines) -> None:
        self._script = script
        self._rule = rule
        self._machines = machines
        self._replays = 0

    def fails(self, steps: tuple[Step, ...]) -> bool:
        """True if what is left of the script still breaks the rule."""
        self._replays += 1
        broken = replay(replace(self._script, steps=steps), self._machines).broken
        return broken is not None and broken.rule is self._rule

    def run(self) -> Script:
        """The shortest script found; no single step of it can be left out."""
        steps = self._script.steps
        piece = max(1, len(steps) // 2)
        while self._replays < _MOST_REPLAYS:
            shorter = self._without_pieces(steps, piece)
            if len(shorter) == len(steps) and piece == 1:
                break
            piece = max(1, min(piece // 2, len(shorter) // 2))
            steps = shorter
        return replace(self._script, steps=steps)

    def _without_pieces(self, steps: tuple[Step, ...], piece: int) -> tuple[Step, ...]:
        end = len(steps)
        while end > 0 and self._replays < _MOST_REPLAYS:
            start = max(0, end - piece)
            shorter = steps[:start] + steps[end:]
            if self.fails(shorter):
                steps = shorter
            end = start
        return steps


def shrink(script: Script, rule: Rule, machines: Machines) -> Script:
    """A part of ``script`` that breaks ``rule``, too."""
    return _Shrinker(script, rule, machines).run()
