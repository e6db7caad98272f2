"""The data that a step sends and gets, for the whole cluster: before and after splitting."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from tensorwire.parameter_server.decisions.pushes import PushKind
from tensorwire.parameter_server.kernels.arrays import Bools, Ints
from tensorwire.parameter_server.messaging.messages import Known

if TYPE_CHECKING:
    from tensorwire.parameter_server.client.splitting import RowGradients, Split, WholeDense
    from tensorwire.parameter_server.decisions.samples import Batches
    from tensorwire.parameter_server.decisions.views import Server
    from tensorwire.parameter_server.messaging.messages import DensePush, PullReply, TableIds


Outcome = TypeVar("Outcome")


@dataclass(frozen=True)
class Gradients:
    """The gradients of one step.

    Args:
        tables: by name, ids that are all different and a row for each.
        dense: by name of a dense group, the gradient of each parameter, None where there is none.
    """

    tables: Mapping[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    dense: Mapping[str, list[Tensor | None]] = field(default_factory=dict)


@dataclass(frozen=True)
class PullRequest:
    """The rows and dense groups to pull.

    Args:
        tables: by name, ids that are all different.
        dense: names of dense groups.
    """

    tables: Mapping[str, Tensor] = field(default_factory=dict)
    dense: tuple[str, ...] = ()


@dataclass(frozen=True)
class Pulled:
    """The rows and dense groups that came.

    Args:
        tables: by name, a row for each id, in the order in which they were asked for.
        dense: by name, the values of each parameter; None if nobody has set them yet.
        low: pushes of the slowest trainer that are in it.
    """

    tables: Mapping[str, Tensor]
    dense: Mapping[str, list[Tensor] | None]
    low: int


@dataclass(frozen=True, slots=True)
class StepGradient:
    """The gradients of rows of one step.

    Args:
        ids: whose; of tables of one kind.
        grad: a row for each id.
    """

    ids: TableIds
    grad: Tensor


@dataclass(frozen=True, slots=True)
class Step:
    """The gradients of one step, put together and checked.

    Args:
        rows: no table twice.
        dense: by name of a dense group, the gradient of each parameter, None where there is none.
    """

    rows: Sequence[StepGradient]
    dense: Mapping[str, list[Tensor | None]] = field(default_factory=dict)


Share = tuple[int, int, "Server | None"]
"""The share of a push: the map's epoch, the shard and its head."""


@dataclass
class StepPush:
    """The push of one step, before it is split among shards."""

    kind: PushKind
    tables: Sequence[RowGradients] = ()
    dense: Mapping[str, WholeDense] = field(default_factory=dict)
    refused_by: set[int] = field(default_factory=set)
    """Shards that have no memory for it: they get an empty push in its place."""
    gathered: dict[Share, dict[str, DensePush]] = field(default_factory=dict)
    """Dense gradients that lie ready to be sent, once, to the head of a shard."""
    batches: Batches | None = None
    """The batches of samples from which it came, if these are counted."""


UNKNOWN: Final = -1
"""Stands for the number of a row that a trainer does not keep."""
UNDER_WAY: Final = -2
"""Stands for the number of a row that is in an answer which has not been taken in yet."""


@dataclass(frozen=True, slots=True)
class KnownRows:
    """The changes up to which this trainer knows rows that it keeps.

    Args:
        lives: by shard, the life of its count of changes.
        numbers: int64, of each id that is asked for, or ``UNKNOWN`` or ``UNDER_WAY``.
        promised: by shard, the change up to which rows under way will be known at least.
    """

    lives: Mapping[int, int]
    numbers: Ints
    promised: Mapping[int, int] = field(default_factory=dict)

    def at(self, shard: int, places: Ints | None) -> Known:
        """Returns what one shard is told of its ids, which have these places; None for all."""
        own = self.numbers if places is None else self.numbers[places]
        if self.promised:
            own = np.where(own == UNDER_WAY, self.promised.get(shard, UNKNOWN), own)
        if len(own) and (own[0] == own).all():
            own = own[:1]
        return Known(self.lives.get(shard, 0), torch.from_numpy(np.ascontiguousarray(own)))


@dataclass(frozen=True, slots=True)
class ShardChanges:
    """The answer of one shard about rows that this trainer keeps.

    Args:
        shard: its number.
        life: of its count of changes.
        number: up to this change all that it was asked for is known now.
        places: of its ids among those that were asked for; None for all.
        which: True for each of its ids whose row has come.
        rows: those rows.
    """

    shard: int
    life: int
    number: int
    places: Ints | None
    which: Bools
    rows: Tensor


class PendingPull:
    """A pull from the time it is sent until its answers are put together.

    Args:
        number: of the pull.
        tables: the ids of the rows that are wanted; no table twice.
        dense: names of dense groups.
        step: see ``decisions.reads.Pull``.
        known: of each of ``tables`` what is known here; empty if nothing is kept.
        is_aside: whether the step does not wait for it, and pushes nothing that it asks for.
    """

    def __init__(
        self,
        number: int,
        tables: Sequence[TableIds],
        dense: tuple[str, ...],
        step: int,
        known: Sequence[KnownRows] = (),
        is_aside: bool = False,
    ) -> None:
        self.number = number
        self.tables = tables
        self.dense = dense
        self.step = step
        self.known = known
        self.is_aside = is_aside
        self.epoch = -1
        self.slots: tuple[int, ...] = ()
        self.splits: list[Split] = []
        self.missing: set[int] = set()
        self.answers: dict[int, PullReply] = {}
        self.error: Exception | None = None

    @property
    def is_done(self) -> bool:
        """True if all is there, or never will be."""
        return not self.missing or self.error is not None


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a pull, put together.

    Args:
        rows: for each ``TableIds`` that was asked for, a row for each id.
        dense: by name, the values of each parameter; None if nobody has set them yet.
        low: pushes of the slowest trainer that are in it.
        changes: instead of ``rows``, if this trainer keeps rows: for each ``TableIds`` what each
            shard says.
        times: pushes of the fastest trainer, at the shard with the fewest and with the most.
    """

    rows: list[Tensor]
    dense: Mapping[str, list[Tensor] | None]
    low: int
    changes: list[list[ShardChanges]] = field(default_factory=list)
    times: tuple[int, int] = (0, 0)


class Exchanging(Generic[Outcome]):
    """An exchange that is under way.

    Args:
        finish: waits and puts the answer together.
    """

    def __init__(self, finish: Callable[[float | None], Outcome]) -> None:
        self._finish = finish
        self._lock = threading.Lock()
        self._done = False
        self._outcome: Outcome

    def wait(self, timeout: float | None = None) -> Outcome:
        """Waits until all servers have answered.

        Args:
            timeout: seconds; default none.

        Returns:
            A ``Pulled``, or None if nothing was asked for.

        Raises:
            TimeoutError: it takes longer.
            ParameterServerError: see ``errors``.
        """
        with self._lock:
            if not self._done:
                self._outcome = self._finish(timeout)
                self._done = True
        return self._outcome
