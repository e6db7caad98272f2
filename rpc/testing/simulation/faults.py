"""What befalls workers that watch each other, as data, and how a seed chooses it.

Times are in bounds: 1.0 is the liveness timeout.
"""

from __future__ import annotations

import enum
import random
from dataclasses import dataclass

LASTING = 1.4
"""Silence of so many bounds must be noticed."""
BRIEF = 0.3
"""Silence of so many bounds, or less, must not."""
_GAP = 5.0
_SOON = 0.6
_RETURN_AFTER = 3.0


class Ill(enum.Enum):
    """What may befall a worker."""

    FREEZE = "is stopped"
    HOLD = "holds its interpreter's lock"
    """It answers questions for signs of life, and does nothing else."""
    KILL = "dies"
    """Its connections close."""
    VANISH = "vanishes"
    """Its host is gone: nobody is told, and no connection closes."""
    CUT = "is cut off"
    """Nothing passes from or to it, for a while."""
    UNPLUG = "loses all its connections"
    PART = "loses its connection to"
    CALL = "calls"
    """It depends on the other, for a while."""
    RETURN = "returns"
    """Its next life joins, if this one is over."""


ENDS_BY_ITSELF = (Ill.FREEZE, Ill.HOLD, Ill.CUT)


@dataclass(frozen=True, slots=True)
class Mishap:
    """One of them.

    Args:
        at: when.
        ill: what.
        who: whom it befalls.
        seconds: how long it lasts, if it ends.
        other: whom else it is about.
    """

    at: float
    ill: Ill
    who: int
    seconds: float = 0.0
    other: int = -1

    def __str__(self) -> str:
        about = f" w{self.other}" if self.other >= 0 else ""
        length = f" for {self.seconds:.2f}" if self.seconds else ""
        return f"{self.at:7.3f}  w{self.who} {self.ill.value}{about}{length}"


@dataclass(frozen=True, slots=True)
class Plan:
    """All that a run needs.

    Args:
        seed: of the delays.
        size: workers at the start.
        dynamic: the group has a store that lists its members.
        paired: two mishaps at about the same time; otherwise one after the other.
        mishaps: what happens, by time.
    """

    seed: int
    size: int
    dynamic: bool
    paired: bool
    mishaps: tuple[Mishap, ...]

    @property
    def end(self) -> float:
        """When everything is over and found out."""
        last = max((m.at + m.seconds for m in self.mishaps), default=0.0)
        return last + _GAP


def draw_plan(seed: int) -> Plan:
    """The plan of a seed."""
    draw = random.Random(seed)
    paired = draw.random() < 0.3
    size = draw.randint(5, 7) if paired else draw.choice((2, 3, 3, 4, 5, 6, 9))
    dynamic = paired or draw.random() < 0.6
    mishaps: list[Mishap] = []
    at = draw.uniform(0.2, 1.2)
    for _ in range(draw.choice((1, 1, 2, 3))):
        victims = draw.sample(range(size), 2 if paired else 1)
        for victim in victims:
            mishap = _draw_mishap(draw, at, victim, size)
            mishaps += (mishap, *_calls(draw, mishap, size))
            if dynamic:
                mishaps.append(Mishap(at + mishap.seconds + _RETURN_AFTER, Ill.RETURN, victim))
            at += draw.uniform(0, _SOON) if paired else 0
        at += _GAP + 2 * _RETURN_AFTER + draw.uniform(0, 1)
    ordered = tuple(sorted(mishaps, key=lambda mishap: mishap.at))
    return Plan(seed, size, dynamic, paired, ordered)


def _draw_mishap(draw: random.Random, at: float, victim: int, size: int) -> Mishap:
    ill = draw.choice([ill for ill in Ill if ill not in (Ill.CALL, Ill.RETURN)])
    seconds = 0.0
    if ill in ENDS_BY_ITSELF:
        seconds = draw.choice((draw.uniform(0.01, BRIEF), draw.uniform(LASTING, 4)))
    others = [worker for worker in range(size) if worker != victim]
    other = draw.choice(others) if ill is Ill.PART else -1
    return Mishap(at, ill, victim, seconds, other)


def _calls(draw: random.Random, mishap: Mishap, size: int) -> list[Mishap]:
    """Calls to and from whom it befalls, begun before, while it lasts, or after."""
    calls = []
    for _ in range(draw.choice((0, 1, 2, 4))):
        other = draw.choice([worker for worker in range(size) if worker != mishap.who])
        one, two = draw.choice(((other, mishap.who), (other, mishap.who), (mishap.who, other)))
        begin = max(0.0, mishap.at + draw.choice((-0.5, -0.1, 0.1, 0.9, 2.5)))
        calls.append(Mishap(begin, Ill.CALL, one, draw.uniform(0.1, 4), two))
    return calls
