"""The orders of a coordinator to shards, and what others ask of a coordinator."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from tensorwire.parameter_server.decisions import pushes
from tensorwire.parameter_server.decisions.samples import Account
from tensorwire.parameter_server.decisions.views import Client, Server, Snapshot

# --- to a shard, answered once it is done, and safe at all of its chain


@dataclass(frozen=True, slots=True)
class Query:
    """Ask for the clock's ``Status``; answered with None if the shard was not primed yet."""


@dataclass(frozen=True, slots=True)
class Hold:
    """Stand still; answered with the clock's ``Status``."""

    change: int


@dataclass(frozen=True, slots=True)
class Release:
    """Go on, as a change was given up."""

    change: int


@dataclass(frozen=True, slots=True)
class Go:
    """Go on up to a cut; answered, when it is reached, with the accounts of samples there."""

    cut: pushes.Cut


@dataclass(frozen=True, slots=True)
class Silence:
    """Take nothing more of a lost trainer; answered with how much is here, or None."""

    trainer: int


@dataclass(frozen=True, slots=True)
class Settle:
    """Count so much of a lost trainer."""

    trainer: int
    keep: int


@dataclass(frozen=True, slots=True)
class Prime:
    """Begin, as a shard that is made at a cut or restored.

    Args:
        counts: by trainer, pushes that are in the state.
        time: pushes of the fastest.
        epoch: of the map.
        slots: the map.
        awaited: shards whose rows come first.
        declared: tables and dense groups, as in the view.
        folder: the snapshot to begin from; empty for none.
        accounts: of samples, by the name of the sampler; those of a shard that awaits rows come
            with them.
    """

    counts: Mapping[int, int]
    time: int
    epoch: int
    slots: tuple[int, ...]
    awaited: frozenset[int] = frozenset()
    declared: Mapping[str, str] = field(default_factory=dict)
    folder: str = ""
    accounts: Mapping[str, Account] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Open:
    """Wait for all rows that a shard awaits; answered when they are there."""


@dataclass(frozen=True, slots=True)
class Declare:
    """Make a table or dense group of that name."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class Copy:
    """Make that server your backup, as the tail. Answered with True once it has everything."""

    to: Server


@dataclass(frozen=True, slots=True)
class Write:
    """Write the rows as they were at a cut.

    Answered with the shard's number, or what was ``Written`` for a version; with a text that says
    why not, or None if it does not know them; with ``Unmarked`` if it does not know what changed.
    """

    change: int
    folder: str


@dataclass(frozen=True, slots=True)
class Unmarked:
    """The answer of a shard that did not note what changed since the last version of that chain."""


@dataclass(frozen=True, slots=True)
class Published:
    """Note that the version taken at a cut is whole: what it holds need not be written again."""

    change: int


Order = (
    Query | Hold | Release | Go | Silence | Settle | Prime | Open | Declare | Copy | Write
    | Published
)  # fmt: skip


class Extent(enum.Enum):
    """The rows that a version holds."""

    ALL = enum.auto()
    CHANGES = enum.auto()
    """Those that have changed since the version before."""


# --- the actions of cuts


@dataclass(frozen=True, slots=True)
class Version:
    """The part of a cut that is to be written in a chain of published versions.

    Args:
        chain: names the chain; rows that change are noted for one at a time.
        extent: which rows.
        with_state: what training goes on from beside the rows: their state and ages, and ids that
            wait for a row.
        precision: name of the ``Precision`` to which rows are rounded; empty for as they are.
    """

    chain: str
    extent: Extent
    with_state: bool
    precision: str = ""


@dataclass(frozen=True, slots=True)
class Freeze:
    """Remember the rows as they are at this cut, for a ``Write``.

    Args:
        version: what a version of a chain holds of them; None for a snapshot, which has all.
    """

    version: Version | None = None


@dataclass(frozen=True, slots=True)
class EndMarks:
    """Note no longer which rows change; nobody publishes them.

    Args:
        chain: of versions, for which they were noted; nothing is to be done if it is another now.
    """

    chain: str


@dataclass(frozen=True, slots=True)
class Move:
    """Send rows where this map wants them."""

    slots: tuple[int, ...]


# --- of a coordinator


@dataclass(frozen=True, slots=True)
class Join:
    """A trainer wants to push. Answered with its number.

    Args:
        client: the trainer.
        started: trainers that had been started by the time it was.
    """

    client: Client
    started: int = 1


@dataclass(frozen=True, slots=True)
class Leave:
    """A trainer has finished, in that generation of the cluster.

    Args:
        trainer: its number.
        generation: of the cluster.
        begin: number of its first push.
        end: number behind its last one.
    """

    trainer: int
    generation: int
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Announce:
    """Make a table or dense group known everywhere. Answered with its description."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class CountSamples:
    """Open an account of the samples of a sampler. Answered with the sampler's description.

    Args:
        name: of the sampler.
        text: what it is.
    """

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class TakeSnapshot:
    """Write everything into a folder. Answered with the ``Snapshot``.

    Args:
        folder: where the snapshot will be.
        draft: where it is written until it is whole.
        extra: what else the manifest holds.
        overwrite: whether a snapshot that is there is replaced.
        asker: who wants it.
        step: pushes that the asker has made; -1 if it is no trainer.
    """

    folder: str
    draft: str
    extra: object = None
    overwrite: bool = False
    asker: Client | None = None
    step: int = -1


@dataclass(frozen=True, slots=True)
class Written:
    """The files that a shard wrote of a version.

    Args:
        shard: its number.
        files: by name, size in bytes and checksum.
    """

    shard: int
    files: Mapping[str, tuple[int, str]]


@dataclass(frozen=True, slots=True)
class Since:
    """The conditions under which a version is told as changes of the one before.

    Args:
        generation: of the cluster.
        kept: names of tables and dense groups that nobody has declared yet.
    """

    generation: int
    kept: frozenset[str]


@dataclass(frozen=True, slots=True)
class CutOfVersion:
    """The cut of which a version is.

    Args:
        change: its number.
        counts: by trainer, how many of its pushes are in the version.
        time: pushes of the fastest trainer.
        left: numbers of trainers that had left before.
        accounts: of samples, by the name of the sampler.
    """

    change: int
    counts: Mapping[int, int]
    time: int
    left: frozenset[int]
    accounts: Mapping[str, Account] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class VersionTaken:
    """All shards have written their parts of a version.

    Args:
        folder: where.
        at: the cut.
        since: for the next version.
        parts: of all shards.
    """

    folder: str
    at: CutOfVersion
    since: Since
    parts: tuple[Written, ...]


@dataclass(frozen=True, slots=True)
class TakeVersion:
    """Write a version into a draft, in a folder of its own.

    Answered with ``VersionTaken``, or None if only a base can be written.

    Args:
        version: what is written.
        draft: the folder of the draft.
        asker: who wants it.
        since: of the version before, if this is told as its changes; None for a base.
    """

    version: Version
    draft: str
    asker: Client
    since: Since | None = None


@dataclass(frozen=True, slots=True)
class Commit:
    """A version is whole: shards may forget what it holds. Answered with None.

    Args:
        at: its cut.
        since: as it was taken.
        snapshot: where it is, if the cluster can go back to it.
    """

    at: CutOfVersion
    since: Since
    snapshot: Snapshot | None = None


@dataclass(frozen=True, slots=True)
class EndPublishing:
    """No more versions of a chain follow: shards need not note what changes. Answered with None.

    Args:
        chain: names it, see ``Version``.
    """

    chain: str


@dataclass(frozen=True, slots=True)
class Resize:
    """Keep the state on these servers."""

    servers: tuple[Server, ...]


@dataclass(frozen=True, slots=True)
class Arrive:
    """A server is there, and keeps nothing yet."""

    server: Server


Request = (
    Join | Leave | Announce | CountSamples | TakeSnapshot | TakeVersion | Commit | EndPublishing
    | Resize | Arrive
)  # fmt: skip
