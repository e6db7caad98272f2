"""Pushes, cuts and what a shard's clock answers to them.

Only data: ``clock`` decides, and opens with how pushes are numbered and what a cut is.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from tensorwire.parameter_server.decisions.samples import Account, Batches
from tensorwire.parameter_server.opaque import Carried
from tensorwire.parameter_server.pickled import PickledByArguments


class PushKind(enum.Enum):
    """The kinds of numbered messages of a trainer."""

    UPDATE = enum.auto()
    SKIP = enum.auto()
    """Counts as a step, but has no gradients."""
    FINISH = enum.auto()
    """The trainer's last: from here on nobody waits for it."""


class Refusal(enum.Enum):
    """The reasons for which a push or a pull is not taken."""

    MOVED = enum.auto()
    """It was split by the map of an earlier epoch, and must be split again, under its number."""
    UNKNOWN = enum.auto()
    """Its sender is not, or no longer, a trainer of this cluster."""


@dataclass(frozen=True, slots=True)
class Push(PickledByArguments):
    """One numbered message of a trainer to one shard.

    Args:
        trainer: its number in the cluster; never given twice.
        number: counts the trainer's pushes, from its start.
        epoch: of the map by which it was split.
        kind: see :class:`PushKind`.
        load: the gradients; the clock does not look at them.
        batches: the batches of samples from which they came; None if that is not counted.
    """

    trainer: int
    number: int
    epoch: int
    kind: PushKind = PushKind.UPDATE
    load: Carried = None
    batches: Batches | None = None


@dataclass(frozen=True, slots=True)
class Cut:
    """A point in everybody's pushes, and what happens there.

    Args:
        change: numbers the cuts of a cluster; a later one has a higher number.
        vector: by trainer, how many of its pushes lie before the cut.
        joins: by trainer that joins here, the number of its first push.
        epoch: of the map that is valid from here on; None if it stays.
        awaited: by shard that keeps anything from here on, if the epoch changes: the shards
            whose rows must arrive before it goes on.
        action: what else happens; the clock does not look at it.
        time: pushes of the fastest trainer.
        trainers: all from here on.
        samplers: of these there is an account of samples from here on.
    """

    change: int
    vector: Mapping[int, int]
    joins: Mapping[int, int] = field(default_factory=dict)
    epoch: int | None = None
    awaited: Mapping[int, frozenset[int]] = field(default_factory=dict)
    action: object = None
    time: int = 0
    trainers: frozenset[int] = frozenset()
    samplers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Apply:
    """These pushes are one update, in this order.

    Args:
        pushes: one for each trainer that takes part.
        time: see :attr:`.clock.Clock.time`; this update included.
    """

    pushes: tuple[Push, ...]
    time: int


@dataclass(frozen=True, slots=True)
class Taken:
    """This push is part of the state, now or since earlier."""

    trainer: int
    number: int


@dataclass(frozen=True, slots=True)
class Refused:
    """A push that was split under ``epoch`` is not taken."""

    trainer: int
    number: int
    epoch: int
    reason: Refusal


@dataclass(frozen=True, slots=True)
class Reached:
    """Everything before the cut is applied, and nothing behind it.

    Args:
        cut: the cut.
        accounts: of samples, by the name of the sampler.
    """

    cut: Cut
    accounts: Mapping[str, Account] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Ready:
    """So many pushes of each trainer are here, applied or held, without a gap.

    Args:
        epoch: of the map by which they were split.
        reach: by trainer.
        others: the shards that must know.
    """

    epoch: int
    reach: Mapping[int, int]
    others: frozenset[int] = frozenset()


Effect = Apply | Taken | Refused | Reached | Ready


@dataclass(frozen=True, slots=True)
class Status:
    """The status that a coordinator asks a shard for.

    Args:
        counts: by trainer, how many of its pushes were taken.
        time: see :attr:`.clock.Clock.time`.
        epoch: of the map that is valid.
        holding: the change for which the clock stands still, or None.
        cut: the cut that is ahead, or else the last that was reached.
        reached: whether the latter.
        awaited: shards whose rows have not arrived yet.
        members: the trainers that are waited for; one that has finished is none.
    """

    counts: Mapping[int, int]
    time: int
    epoch: int
    holding: int | None
    cut: Cut | None
    reached: bool
    awaited: frozenset[int]
    members: frozenset[int]
