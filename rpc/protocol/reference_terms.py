"""The words of the reference protocol: handles, failures, effects, counts.

Only values. What they mean for each other is decided in ``references``.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from rpc.ids import GlobalId, Life, Reference
from rpc.wire.control import ControlMessage


class Carrier(enum.Enum):
    """Kinds of messages that a reference is put into."""

    REQUEST = "request"
    """A reply will end it: references to the receiver's own values are borrowed."""
    REPLY = "reply"


class FailureKind(enum.Enum):
    """Errors that the use of a failed handle raises."""

    CREATION = "creation"
    """``RRefCreationError``: ``remote()`` failed or timed out."""
    STALE = "stale"
    """``StaleRRefError``: the value is gone, or belonged to an earlier life of its owner."""
    OWNER_LOST = "owner lost"
    """``WorkerLostError``"""
    DELETED = "deleted"
    """``RRefDeletedError``: this worker released its references."""


@dataclass(frozen=True, slots=True)
class Failure:
    """The reason why a handle cannot be used any more."""

    kind: FailureKind
    reason: str


class OwnerHandle(NamedTuple):
    """A handle at the value's owner; it counts as one local reference."""

    reference: Reference


class UserHandle(NamedTuple):
    """A handle anywhere else, which stands for its own fork."""

    reference: Reference
    fork: GlobalId


Handle: TypeAlias = OwnerHandle | UserHandle


@dataclass(frozen=True, slots=True)
class Send:
    """Effect: send ``message`` to that life of a worker."""

    to: Life
    message: ControlMessage


@dataclass(frozen=True, slots=True)
class FreeValue:
    """Effect, at the owner: nothing refers to the value any more."""

    rref: GlobalId


@dataclass(frozen=True, slots=True)
class FailValue:
    """Effect, at the owner: the value will never exist; tell everyone who waits for it."""

    rref: GlobalId
    reason: str


@dataclass(frozen=True, slots=True)
class HandleConfirmed:
    """Effect, at a user: the owner knows the fork."""

    fork: GlobalId


@dataclass(frozen=True, slots=True)
class HandleFailed:
    """Effect, at a user: the handle must not be used any more."""

    fork: GlobalId
    failure: Failure


Effect: TypeAlias = Send | FreeValue | FailValue | HandleConfirmed | HandleFailed


@dataclass(frozen=True, slots=True)
class Counts:
    """Counts of what a table holds, for ``debug_info`` and for waiting at shutdown.

    Args:
        num_user_rrefs: handles whose fork its owner has to know of.
        num_owner_rrefs: values kept for local or remote use, placeholders included.
        num_pending_users: of the user handles, those the owner has yet to confirm.
        num_forks: forks that users hold of this worker's values.
        num_pending_children: forks passed on that the receiver has yet to accept.
        num_borrows: references lent to calls that are not over.
    """

    num_user_rrefs: int
    num_owner_rrefs: int
    num_pending_users: int
    num_forks: int
    num_pending_children: int
    num_borrows: int


@dataclass(frozen=True, slots=True)
class Leak:
    """A value that its owner still has to keep because of the forks of ``users``."""

    rref: GlobalId
    users: tuple[Life, ...]
