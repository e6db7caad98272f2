"""Decides what is done to whom, and when. The same seed makes the same plan."""

from __future__ import annotations

import enum
import random
from collections.abc import Sequence
from dataclasses import dataclass


class Kind(enum.Enum):
    """Ways to hurt a worker."""

    KILL = "kill -9"
    STOP = "SIGSTOP"
    CUT = "cut off"
    """All its connections are broken off at once, while it lives."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that is done.

    Args:
        at: seconds after the start.
        kind: what.
        victim: to whom.
    """

    at: float
    kind: Kind
    victim: str


def plan(seed: int, seconds: float, victims: Sequence[str], pause: float) -> list[Fault]:
    """Faults, each some time after the one before, of all kinds in turn to all in turn.

    Args:
        seed: of the order and the pauses.
        seconds: when to end.
        victims: whom it may hit.
        pause: seconds between two faults, at least; at most half as much again.
    """
    chance = random.Random(seed)
    faults: list[Fault] = []
    pairs: list[tuple[Kind, str]] = []
    at = pause * chance.uniform(0.2, 0.5)
    while at + pause < seconds:
        if not pairs:
            pairs = [(kind, victim) for kind in Kind for victim in victims]
            chance.shuffle(pairs)
        faults.append(Fault(at, *pairs.pop()))
        at += pause * chance.uniform(1.0, 1.5)
    return faults
