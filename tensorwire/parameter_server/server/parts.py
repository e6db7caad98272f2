"""The state of a shard on its way: to another shard, to a new backup, or to a file.

Plain records; ``state`` makes them and takes them in, ``writing`` writes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from tensorwire.parameter_server.decisions import orders
from tensorwire.parameter_server.decisions.samples import Account
from tensorwire.parameter_server.declarations.dense_spec import DenseSpec, PieceData
from tensorwire.parameter_server.kernels.arrays import Ints
from tensorwire.parameter_server.storage.changes import Gone
from tensorwire.parameter_server.storage.frozen import Frozen
from tensorwire.parameter_server.storage.row_store import Columns

Waiting: TypeAlias = tuple[Ints, Ints, Ints]
"""Ids that wait for a row, how often each was pushed, and when last."""


@dataclass(frozen=True, slots=True)
class MovedTable:
    """Rows of a table that go to another shard.

    Args:
        declared: the text by which the table was declared where they come from.
        ids: of the rows.
        columns: all that is kept for each row.
        candidates: ids that wait for a row.
        steps: updates of the table.
        gone: evicted ids that were to be published; None if none ever are.
    """

    declared: str
    ids: Ints
    columns: Columns
    candidates: Waiting | None
    steps: int
    gone: Gone | None = None


@dataclass(frozen=True, slots=True)
class MovedDense:
    """Pieces that go to another shard.

    Args:
        declared: the text by which the group was declared where they come from.
        data: the pieces.
        steps: updates of the group.
        is_loaded: whether a trainer has said how it begins.
    """

    declared: str
    data: Mapping[int, PieceData]
    steps: int
    is_loaded: bool


@dataclass(frozen=True, slots=True)
class Moved:
    """The data that one shard sends another at a cut.

    Args:
        tables: by name.
        dense: by name.
        chain: the chain of versions for which changes are noted; empty for none.
        version: the cut at which its last version was taken.
        accounts: of samples, as they are there.
    """

    tables: Mapping[str, MovedTable]
    dense: Mapping[str, MovedDense]
    chain: str = ""
    version: int = -1
    accounts: Mapping[str, Account] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class FrozenDense:
    """A dense group as it was at a cut.

    Args:
        spec: what it is.
        groups: the hyper-parameters of each group.
        data: its pieces.
        steps: how often it was updated.
        is_loaded: whether a trainer had said how it begins.
    """

    spec: DenseSpec
    groups: tuple[Mapping[str, object], ...]
    data: Mapping[int, PieceData]
    steps: int
    is_loaded: bool


@dataclass(frozen=True, slots=True)
class FrozenShard:
    """A shard as it was at a cut.

    Args:
        slots: the map.
        tables: by name.
        dense: by name.
        version: what is to be written of it; None for everything.
        gone: by table, evicted ids that are to be published.
    """

    slots: tuple[int, ...]
    tables: Mapping[str, Frozen]
    dense: Mapping[str, FrozenDense]
    version: orders.Version | None = None
    gone: Mapping[str, Ints] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CopiedTable:
    """The state of a table beside its rows.

    Args:
        hyper: its rule's.
        steps: how often it was updated.
        swept: when rows that are too old were last looked for.
        counts: rows evicted, pushes not admitted.
        candidates: ids that wait for a row.
        gone: evicted ids that were to be published; None if none ever are.
    """

    hyper: tuple[float, ...]
    steps: int
    swept: int
    counts: tuple[int, int]
    candidates: Waiting | None
    gone: Gone | None


@dataclass(frozen=True, slots=True)
class Copied:
    """A shard beside the rows of its tables, for a new backup.

    ``chain`` and ``version`` say for which chain changes are noted, and at which cut its last
    version was taken.
    """

    slots: tuple[int, ...]
    declared: Mapping[str, str]
    time: int
    updates: int
    tables: Mapping[str, CopiedTable]
    dense: Mapping[str, MovedDense]
    exports: Mapping[tuple[int, int], Moved]
    chain: str
    version: int
