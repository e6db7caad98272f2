"""Decides which workers to ask for a sign of life, and which have been silent too long. Sans-IO.

A worker is *watched* while somebody here depends on it: its calls are open, or it
is the next one on the ring of the living. So everybody is watched by one worker at
least, and what a worker does does not grow with the group. Whoever learns of a
loss tells its *fingers* (the workers 1, 2, 4, 8, … places on), who do the same, so
that all know after a few hops.

Time counts only while this worker is awake: when :meth:`Liveness.tick` comes late,
because this process was stopped or held the interpreter lock, the others are given
that time too. A loss is found within 0.8 of the bound after the last answer, and told
to the others 0.1 later. A worker that has lost more workers than it still reaches is likely
to be cut off itself, and tells nobody. One that reached less than half of the group when
another fell silent waits, and takes itself for lost if the other lives. Of two workers
between whom a connection broke, the one with the lower id speaks first.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Sequence, Set
from dataclasses import dataclass

from rpc.ids import Life

_TICKS_PER_BOUND = 5
_PATIENCE = 0.6
_MOST_ASKED = 32
_TICKS_WHEN_LATE = 4
"""Ticks in a period while an answer is late, as the question may have been lost on its way; else
one.
"""


@dataclass(frozen=True, slots=True)
class Ask:
    """Effect: ask this worker for a sign of life, unless it still owes one."""

    life: Life


@dataclass(frozen=True, slots=True)
class Forget:
    """Effect: this worker need not be watched any more."""

    life: Life


@dataclass(frozen=True, slots=True)
class Silent:
    """Effect: declare this worker lost, which has given no sign for ``seconds``."""

    life: Life
    seconds: float


Effect = Ask | Forget | Silent


class Liveness:
    """The signs of life that one worker has had from the others.

    Times are seconds on any monotonic clock, always passed in.

    Args:
        bound: seconds from the moment a worker falls silent until it is declared lost.

    Attributes:
        is_late: somebody's answer was late at the last tick.
    """

    def __init__(self, bound: float) -> None:
        self._bound = bound
        self._period = bound / _TICKS_PER_BOUND
        self._patience = bound * _PATIENCE
        self._asked: dict[Life, float] = {}  # since when an answer is due
        self._wanted: dict[Life, float] = {}  # when it was last watched
        self._due: float | None = None
        self.is_late = False

    def due(self, now: float) -> float:
        """Returns when :meth:`tick` should run next."""
        return now if self._due is None else self._due

    def answered(self, life: Life) -> None:
        """Notes a sign of life; to be told before the tick that follows."""
        self._asked.pop(life, None)

    def not_asked(self, life: Life) -> None:
        """Notes that this worker could not ask, so that no answer is due."""
        self._asked.pop(life, None)

    def tick(self, now: float, watched: Set[Life]) -> list[Effect]:
        """Decides whom to ask, and who was silent too long, among those ``watched``."""
        self._excuse_own_absence(now)
        effects: list[Effect] = []
        for life in sorted(self._wanted.keys() - watched):
            self._asked.pop(life, None)
            if now - self._wanted[life] >= self._bound:
                del self._wanted[life]
                effects.append(Forget(life))
        for life in sorted(watched):
            effects.append(self._look_at(life, now))
        earliest = min(self._asked.values(), default=now)
        self.is_late = now - earliest >= self._period
        pause = self._period / _TICKS_WHEN_LATE if self.is_late else self._period
        self._due = min(now + pause, earliest + self._patience)
        return effects

    def _look_at(self, life: Life, now: float) -> Ask | Silent:
        self._wanted[life] = now
        since = self._asked.setdefault(life, now)
        if now - since < self._patience:
            return Ask(life)
        del self._asked[life], self._wanted[life]
        return Silent(life, now - since)

    def _excuse_own_absence(self, now: float) -> None:
        late = 0.0 if self._due is None else now - self._due
        if late > self._period:
            self._asked = {life: since + late for life, since in self._asked.items()}


class Part(enum.Enum):
    """The part of its group that a worker reaches, itself included."""

    MOST = enum.auto()
    HALF = enum.auto()
    FEW = enum.auto()


class Reach:
    """Finds out which part of its group a worker reaches, while somebody's answer is late.

    If a network parts, workers on both sides declare lost those of the other side. Where it is
    back before they say so, those with most of the group behind them speak first.

    Args:
        most: the workers that are asked at most; of a larger group, some from all over it.
    """

    def __init__(self, most: int = _MOST_ASKED) -> None:
        self._most = most
        self._asked: set[Life] = set()
        self._answered: set[Life] = set()
        self._reached = 0

    def to_ask(self, is_late: bool, others: Sequence[Life]) -> list[Life]:
        """The lives to ask for a sign of life now; none while no answer is late."""
        self._reached = len(self._answered)
        if not is_late:
            self._asked, self._answered = set(), set()
        elif not self._asked:
            self._asked = {*others[:: -(-len(others) // self._most) or 1]}
        return sorted((self._asked - self._answered).intersection(others))

    @property
    def asks(self) -> bool:
        """True if it asked somebody when an answer was last late."""
        return bool(self._asked)

    def answered(self, life: Life) -> None:
        """Notes a sign of life."""
        if life in self._asked:
            self._answered.add(life)

    def part(self) -> Part:
        """The part of the group that it reached when it last asked.

        What came since is left out: a network that is back just now brings the answers of some
        earlier than those of others.
        """
        reached, everybody = 1 + self._reached, 1 + len(self._asked)
        if 2 * reached == everybody:
            return Part.HALF
        return Part.MOST if 2 * reached > everybody else Part.FEW


class Evidence(enum.Enum):
    """Ways in which a worker learns of a loss."""

    CLOSED = enum.auto()
    """A connection broke."""
    REFUSED = enum.auto()
    """The other worker answered that it has declared this one lost."""
    SILENT = enum.auto()
    TOLD = enum.auto()
    """Another worker said so."""


class Suspicion:
    """Decides when one worker may tell the others of a loss.

    Args:
        me: this worker.
        bound: the liveness timeout in seconds.
    """

    def __init__(self, me: int, bound: float) -> None:
        self._me = me
        self._bound = bound
        self._lost: deque[float] = deque()

    def delay(self, worker: int, evidence: Evidence, now: float) -> float:
        """Takes the loss of a worker; returns the seconds to wait before the others are told."""
        if evidence is Evidence.TOLD:
            return 0.0
        self._lost.append(now)
        if evidence is Evidence.REFUSED:  # the other speaks first, if it is not cut off itself
            return self._bound * 3 / 2
        if evidence is Evidence.SILENT or self._me < worker:
            return self._bound / 10
        return self._bound

    def is_cut_off(self, others: int, now: float) -> bool:
        """True if this worker lost more than it still reaches: ``others``, and itself."""
        while self._lost and self._lost[0] < now - 2 * self._bound:
            self._lost.popleft()
        return len(self._lost) > others + 1


def neighbour(me: int, living: Sequence[int]) -> int | None:
    """The next living worker on the ring of ids, or None if this one is alone."""
    others = sorted(worker for worker in living if worker != me)
    return next((worker for worker in others if worker > me), others[0]) if others else None


def fingers(me: int, living: Sequence[int]) -> list[int]:
    """The workers 1, 2, 4, 8, … places further on the ring: whom to tell of a loss."""
    ring = sorted({*living, me})
    here = ring.index(me)
    steps = (1 << power for power in range((len(ring) - 1).bit_length()))
    return [ring[(here + step) % len(ring)] for step in steps]
