"""The state of the reference protocol: handles of this worker, holds, and values it owns."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import NamedTuple

from rpc.ids import GlobalId, Life
from rpc.protocol.reference_terms import Failure, UserHandle
from rpc.wire.control import Passage


class ForkState(enum.Enum):
    """The states of a user, by whether the owner knows its fork."""

    CREATING = enum.auto()
    """The reply of ``remote()`` has not come."""
    REGISTERING = enum.auto()
    """REGISTER was sent and not answered."""
    CONFIRMED = enum.auto()
    GONE = enum.auto()
    """The owner does not know the fork, or will not once the DELETE sent arrives."""


@dataclass(slots=True)
class User:
    """A handle of this worker to a value of another."""

    handle: UserHandle
    state: ForkState
    failure: Failure | None = None
    dropped: bool = False
    held_for: set[GlobalId] = field(default_factory=set)


class Hold(NamedTuple):
    """A reason to keep a user's fork: it was passed to ``to`` and is not settled there."""

    user: GlobalId
    to: Life
    passage: Passage


@dataclass(slots=True)
class ValueEntry:
    """A value of this worker, or the placeholder for one whose creation was overtaken.

    ``deleted_early`` has the creator's fork, if its DELETE overtook its creation.
    """

    awaits_creation: bool = False
    deleted_early: frozenset[GlobalId] = frozenset()
    forks: dict[GlobalId, Life] = field(default_factory=dict)
    local_references: int = 0


def is_pending(user: User) -> bool:
    """True if a user waits for its owner: to register, or to create unless that was given up."""
    if user.state is ForkState.CREATING:
        return user.failure is None
    return user.state is ForkState.REGISTERING
