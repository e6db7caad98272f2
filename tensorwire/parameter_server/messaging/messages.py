"""The messages between trainers and servers. Plain data; tensors travel beside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor

from tensorwire.parameter_server.decisions import orders
from tensorwire.parameter_server.decisions.pushes import Push, Refusal
from tensorwire.parameter_server.decisions.reads import Pull
from tensorwire.parameter_server.decisions.records import (
    Assign,
    Heard,
    Import,
    Record,
    ReplicaState,
)
from tensorwire.parameter_server.decisions.samples import LeaseAsked
from tensorwire.parameter_server.decisions.views import Server
from tensorwire.parameter_server.declarations.dense_spec import PieceData
from tensorwire.parameter_server.declarations.wire import Packed
from tensorwire.parameter_server.kernels.arrays import Array, Ints
from tensorwire.parameter_server.opaque import Carried, Response
from tensorwire.parameter_server.pickled import PickledByArguments

CHANNEL: Final = "tensorwire.ps/view/"
"""Begins the name of the channel on which clients hear of views; the cluster's name follows."""


@dataclass(frozen=True, slots=True, eq=False)
class TableIds(PickledByArguments):
    """Ids of rows of several tables, which are as wide and are packed alike.

    Args:
        tables: their names.
        sizes: ids of each.
        ids: int64, those of one table after those of another, all different within a table.
    """

    tables: tuple[str, ...]
    sizes: tuple[int, ...]
    ids: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Known(PickledByArguments):
    """The changes of a shard up to which a trainer knows rows that it keeps.

    Args:
        life: of the shard's count of changes; 0 if it was never told.
        numbers: int64, of each id; or one for all of them. Negative: it does not keep the row.
    """

    life: int
    numbers: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Changed(PickledByArguments):
    """The rows in an answer to somebody who keeps rows: those that may be others than he knows.

    Args:
        life: of the shard's count of changes.
        number: up to this change all ids that were asked for are known now.
        which: bits in bytes, a bit for each id that was asked for: its row is in the answer.
    """

    life: int
    number: int
    which: Tensor


@dataclass(frozen=True, slots=True)
class TablePush(PickledByArguments):
    """Gradients of some rows.

    Args:
        rows: whose.
        grad: a row for each id, packed.
        hyper: the hyper-parameters of each table.
        pulled: number of the pull that asked for exactly these ids; -1 if none did.
    """

    rows: TableIds
    grad: Packed
    hyper: tuple[tuple[float, ...], ...]
    pulled: int = -1


@dataclass(frozen=True, slots=True)
class DensePush(PickledByArguments):
    """Gradients of the pieces of one shard.

    Args:
        grads: by dtype, packed.
        absent: parameters without a gradient.
        hyper: the hyper-parameters of each group.
    """

    grads: Mapping[torch.dtype, Packed]
    absent: frozenset[int]
    hyper: tuple[Mapping[str, object], ...]


@dataclass(frozen=True, slots=True)
class Load(PickledByArguments):
    """The gradients of one push for one shard.

    Args:
        tables: of rows; no table twice.
        dense: by the names of dense groups.
    """

    tables: tuple[TablePush, ...] = ()
    dense: Mapping[str, DensePush] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Ask(PickledByArguments):
    """The part of a pull that is for one shard.

    Args:
        trainer: who asks; -1 for who is none.
        worker: name of the worker that asks.
        number: of the pull, at this trainer.
        tables: ids of rows; no table twice.
        dense: names of dense groups.
        known: of each of ``tables`` what the asker knows; empty if it keeps no rows.
    """

    trainer: int
    worker: str
    number: int
    tables: tuple[TableIds, ...] = ()
    dense: tuple[str, ...] = ()
    known: tuple[Known, ...] = ()


@dataclass(frozen=True, slots=True)
class Exchange(PickledByArguments):
    """One message of a step: a push, a pull, or both."""

    cluster: str
    shard: int
    push: Push | None
    pull: Pull | None


@dataclass(frozen=True, slots=True)
class Reserve:
    """Keep room for a shard's part of a push. Answered with True, or :class:`Full`.

    Args:
        shard: which.
        trainer: who will push.
        number: of the push; that or a later one ends this.
        rows: by table, how many.
    """

    shard: int
    trainer: int
    number: int
    rows: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class PullReply(PickledByArguments):
    """The answer to a pull.

    Args:
        tables: rows, packed, as they were asked for.
        dense: by name and dtype, all elements of the shard's pieces; None if nobody has
            set them yet.
        safe: pushes of the asker that are safe.
        low: pushes of the slowest trainer.
        version: of the chain by which the head answers.
        room: bytes that the server had left for rows when a push came last; -1 if none did.
        changed: of each of ``tables`` which rows are there; empty if all that were asked for.
        time: pushes of the fastest trainer; under BSP the step that these rows are of.
        deals: changes whenever samples are given out anew.
    """

    tables: tuple[Packed, ...]
    dense: Mapping[str, Mapping[torch.dtype, Tensor] | None]
    safe: int
    low: int
    version: int
    room: int = -1
    changed: tuple[Changed, ...] = ()
    time: int = 0
    deals: int = 0


@dataclass(frozen=True, slots=True)
class Accepted(PickledByArguments):
    """The answer to a push without a pull: so many pushes of its sender are safe.

    Args:
        safe: how many.
        version: as in :class:`PullReply`.
        room: as in :class:`PullReply`.
        deals: likewise.
    """

    safe: int
    version: int
    room: int = -1
    deals: int = 0


@dataclass(frozen=True, slots=True)
class Denied:
    """The answer to what cannot be taken as it is."""

    reason: Refusal


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """The answer of a server that is not the head of that shard, or not the coordinator."""


@dataclass(frozen=True, slots=True)
class Full:
    """The answer to a push for which there is no memory."""

    text: str


@dataclass(frozen=True, slots=True)
class Unread:
    """The answer to a pull that a shard could not read, and why; the shard goes on.

    Args:
        text: why.
        safe: as in :class:`PullReply`.
    """

    text: str
    safe: int


@dataclass(frozen=True, slots=True)
class Broken:
    """The answer of a shard that cannot go on, and why."""

    text: str


Reply = PullReply | Accepted | Denied | Elsewhere | Full | Unread | Broken

# --- among servers, and from clients to the coordinator


@dataclass(frozen=True, slots=True)
class See:
    """News of a later view, as text."""

    view: str


@dataclass(frozen=True, slots=True)
class LatestView:
    """A newcomer's question for the view that a server knows; answered with its text, or None."""


@dataclass(frozen=True, slots=True)
class Poll:
    """A question for a vote, by a server that would take these lives out of a view.

    Answered with True once the server that was asked has heard of their end, too, or with
    ``Outdated``.
    """

    view: str
    suspects: frozenset[Server]


@dataclass(frozen=True, slots=True)
class Outdated:
    """News, instead of an answer, of a view in which the sender has another part or none."""

    view: str


@dataclass(frozen=True, slots=True)
class Command:
    """An order of the coordinator to a shard.

    Args:
        view: the coordinator's, as text.
        term: the coordinator's.
        shard: the shard.
        order: what to do.
    """

    view: str
    term: int
    shard: int
    order: orders.Order


@dataclass(frozen=True, slots=True)
class Asking:
    """A request to the coordinator; answered with ``Granted`` or ``Rejected``."""

    what: orders.Request


@dataclass(frozen=True, slots=True)
class Granted:
    """The answer to a request that is done."""

    result: Response


@dataclass(frozen=True, slots=True)
class Rejected:
    """The answer to one that cannot be done; without a reason, this server does not coordinate."""

    reason: str


@dataclass(frozen=True, slots=True)
class Logged:
    """A record of a shard's log, for the next server of the chain."""

    shard: int
    version: int
    position: int
    record: Record


@dataclass(frozen=True, slots=True)
class Bring:
    """Rows that a shard had until a cut.

    Args:
        shard: to which they go.
        version: of the chain of the shard that had them, as its head knows it.
        rows: the rows.
    """

    shard: int
    version: int
    rows: Import


@dataclass(frozen=True, slots=True)
class Telling:
    """News of how many pushes another shard has.

    Args:
        shard: which is told.
        version: of the chain of the shard that tells, as its head knows it.
        heard: how many.
    """

    shard: int
    version: int
    heard: Heard


@dataclass(frozen=True, slots=True)
class Values:
    """The values that an ``Assign`` sets: pieces of a dense group, by their places.

    Args:
        name: of the group.
        loader: the trainer that says so.
        data: the pieces.
        keeps_state: whether the state of the optimizer stays as it is.
    """

    name: str
    loader: int
    data: Mapping[int, PieceData]
    keeps_state: bool = False


@dataclass(frozen=True, slots=True)
class FirstRows:
    """The rows with which ids begin that have none yet; an ``Assign`` sets them.

    Args:
        table: its name.
        ids: int64, all different; a shard takes those that it keeps.
        rows: a row for each, float32.
    """

    table: str
    ids: Tensor
    rows: Tensor


@dataclass(frozen=True, slots=True)
class Setting:
    """Values of a dense group, or rows of a table."""

    shard: int
    values: Assign


@dataclass(frozen=True, slots=True)
class Getting:
    """A question for the pieces of a dense group that a shard keeps, with their state."""

    shard: int
    name: str


@dataclass(frozen=True, slots=True)
class CopyPiece:
    """Some rows of a shard that is being copied.

    Args:
        copy: names the copy: the shard, a number, and the life of the server that makes it.
        version: of the chain whose tail makes it.
        table: whose rows.
        rows: ids and columns.
    """

    copy: tuple[int, int, str]
    version: int
    table: str
    rows: tuple[Ints, Mapping[str, Array]]


@dataclass(frozen=True, slots=True)
class Install:
    """Become a backup of a shard: all but the rows, which came before.

    Args:
        copy: names the copy.
        shard: the shard.
        position: of the log.
        version: of the chain.
        state: the replica's.
        rest: what else the state holds.
    """

    copy: tuple[int, int, str]
    shard: int
    position: int
    version: int
    state: ReplicaState
    rest: Carried


@dataclass(frozen=True, slots=True)
class CountOf:
    """A question for how many pushes of a trainer were taken; None if that is not known here."""

    trainer: int


@dataclass(frozen=True, slots=True)
class AccountOf:
    """A question for the account of samples of a sampler.

    Answered with ``Counted``, once it is safe; with None if there is no such sampler.
    """

    shard: int
    sampler: str


@dataclass(frozen=True, slots=True)
class LeaseOf:
    """A trainer's question for batches of samples; answered with ``Leased`` or ``NoLessor``."""

    shard: int
    asked: LeaseAsked


@dataclass(frozen=True, slots=True)
class Describe:
    """A question for what this server can say of itself; answered with plain data."""


Message = (
    Exchange | Reserve | See | LatestView | Poll | Command | Asking | Logged | Bring | Telling
    | Setting | Getting | CopyPiece | Install | CountOf | AccountOf | LeaseOf | Describe
)  # fmt: skip
"""Any message to a server."""
