"""The records of a shard's log, and what a server of the shard is to do. Sans-IO.

Everything that changes a shard's state is a record, which runs in the same order at the head and
at the backups: ``Run`` says how. ``Read`` is for the head only, between two runs. ``Respond``
answers a call.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tensorwire.parameter_server.decisions import orders, pushes
from tensorwire.parameter_server.decisions.leases import Renewal
from tensorwire.parameter_server.decisions.pushes import Push, Ready
from tensorwire.parameter_server.decisions.reads import Pull
from tensorwire.parameter_server.decisions.replication import Forward
from tensorwire.parameter_server.decisions.samples import Account, LeaseAsked
from tensorwire.parameter_server.decisions.views import Server
from tensorwire.parameter_server.opaque import Carried

# --- records besides pushes and orders


@dataclass(frozen=True, slots=True)
class Import:
    """Rows that another shard had until a cut, and its accounts of samples at that cut."""

    source: int
    epoch: int
    load: Carried = None
    accounts: Mapping[str, Account] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Exported:
    """A shard has what was to be sent to it."""

    target: int
    epoch: int


@dataclass(frozen=True, slots=True)
class Assign:
    """Values to be set, not added to: of a dense group."""

    load: Carried = None


@dataclass(frozen=True, slots=True)
class Heard:
    """Another shard has so many pushes."""

    source: int
    ready: Ready


@dataclass(frozen=True, slots=True)
class After:
    """A record, and what the head had heard of other shards before it.

    News alone is no record: if it is lost with the head, the other shards tell the next one.
    """

    news: tuple[Heard, ...]
    record: Record


Record = Push | orders.Order | Import | Exported | Assign | Renewal | LeaseAsked | After

# --- what is to be done


@dataclass(frozen=True, slots=True)
class Run:
    """Change the state by this."""

    what: (
        pushes.Apply | pushes.Reached | orders.Prime | orders.Declare | orders.Published
        | Import | Exported | Assign
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Read:
    """Answer this pull from the state as it is now.

    Args:
        pull: the pull.
        time: by which rows are too old.
        low: pushes of the slowest trainer.
        version: of the chain.
    """

    pull: Pull
    time: int
    low: int
    version: int


@dataclass(frozen=True, slots=True)
class Respond:
    """Answer a call."""

    call: object
    answer: object


@dataclass(frozen=True, slots=True)
class ReplicaState:
    """The part of a replica that its copy begins with.

    Args:
        clock: what the clock has dumped.
        is_primed: whether it has begun.
        stash: rows that came before the cut at which they are taken, by the shard they come from.
    """

    clock: Mapping[str, object]
    is_primed: bool
    stash: Mapping[int, Import]


@dataclass(frozen=True, slots=True)
class StartCopy:
    """Copy the state as it is now to a new backup; then call ``copied``."""

    heir: Server
    position: int
    version: int
    state: ReplicaState


@dataclass(frozen=True, slots=True)
class Inform:
    """Tell other shards how many pushes are safe here, until they say that they know."""

    ready: Ready


@dataclass(frozen=True, slots=True)
class NotHead:
    """The answer of a server that is not, or no longer, the head of this shard."""


@dataclass(frozen=True, slots=True)
class Counted:
    """The account of samples of a sampler, and the clock's ``deals``."""

    account: Account
    deals: int


@dataclass(frozen=True, slots=True)
class Safe:
    """The answer to a record: all before this position are safe from here on."""

    position: int


Effect = Run | Read | Respond | Forward[Record] | StartCopy | Inform
