"""The faults of workers that watch each other, as data, and how a seed chooses them.

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


class FaultKind(enum.Enum):
    """Kinds of faults."""

    FREEZE = "is stopped"
    """Its clock goes on, and tells it when it wakes."""
    PAUSE = "is stopped with its clock"
    """A pause like a virtual machine's: when the worker wakes, no time has passed for it."""
    STOP_BEFORE_SENDING = "is stopped before it sends anything more"
    """Between a decision and what follows from it, which it sends when it wakes."""
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


ENDS_BY_ITSELF = (
    FaultKind.FREEZE,
    FaultKind.PAUSE,
    FaultKind.STOP_BEFORE_SENDING,
    FaultKind.HOLD,
    FaultKind.CUT,
)


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault.

    Args:
        at: when.
        kind: what.
        who: whom it befalls.
        seconds: how long it lasts, if it ends.
        other: whom else it is about.
    """

    at: float
    kind: FaultKind
    who: int
    seconds: float = 0.0
    other: int = -1

    def __str__(self) -> str:
        about = f" w{self.other}" if self.other >= 0 else ""
        length = f" for {self.seconds:.2f}" if self.seconds else ""
        return f"{self.at:7.3f}  w{self.who} {self.kind.value}{about}{length}"


@dataclass(frozen=True, slots=True)
class Plan:
    """The group of a run and its faults.

    Args:
        seed: of the delays.
        size: workers at the start.
        dynamic: the group has a store that lists its members.
        paired: two faults at about the same time; otherwise one after the other.
        faults: what happens, by time.
    """

    seed: int
    size: int
    dynamic: bool
    paired: bool
    faults: tuple[Fault, ...]

    @property
    def end(self) -> float:
        """The time when everything is over and found out."""
        last = max((m.at + m.seconds for m in self.faults), default=0.0)
        return last + _GAP


def draw_plan(seed: int) -> Plan:
    """The plan of a seed."""
    draw = random.Random(seed)
    paired = draw.random() < 0.3
    size = draw.randint(5, 7) if paired else draw.choice((2, 3, 3, 4, 5, 6, 9))
    dynamic = paired or draw.random() < 0.6
    faults: list[Fault] = []
    at = draw.uniform(0.2, 1.2)
    for _ in range(draw.choice((1, 1, 2, 3))):
        victims = draw.sample(range(size), 2 if paired else 1)
        for victim in victims:
            fault = _draw_fault(draw, at, victim, size)
            faults += (fault, *_calls(draw, fault, size))
            if dynamic:
                faults.append(Fault(at + fault.seconds + _RETURN_AFTER, FaultKind.RETURN, victim))
            at += draw.uniform(0, _SOON) if paired else 0
        at += _GAP + 2 * _RETURN_AFTER + draw.uniform(0, 1)
    ordered = tuple(sorted(faults, key=lambda fault: fault.at))
    return Plan(seed, size, dynamic, paired, ordered)


def _draw_fault(draw: random.Random, at: float, victim: int, size: int) -> Fault:
    kind = draw.choice(
        [kind for kind in FaultKind if kind not in (FaultKind.CALL, FaultKind.RETURN)]
    )
    seconds = 0.0
    if kind in ENDS_BY_ITSELF:
        seconds = draw.choice((draw.uniform(0.01, BRIEF), draw.uniform(LASTING, 4)))
    others = [worker for worker in range(size) if worker != victim]
    other = draw.choice(others) if kind is FaultKind.PART else -1
    return Fault(at, kind, victim, seconds, other)


def _calls(draw: random.Random, fault: Fault, size: int) -> list[Fault]:
    """Calls to and from whom it befalls, begun before, while it lasts, or after."""
    calls = []
    for _ in range(draw.choice((0, 1, 2, 4))):
        other = draw.choice([worker for worker in range(size) if worker != fault.who])
        one, two = draw.choice(((other, fault.who), (other, fault.who), (fault.who, other)))
        begin = max(0.0, fault.at + draw.choice((-0.5, -0.1, 0.1, 0.9, 2.5)))
        calls.append(Fault(begin, FaultKind.CALL, one, draw.uniform(0.1, 4), two))
    return calls
