"""A table as a client sees it."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from tensorwire.parameter_server.client.cache import Cache, RowCache
from tensorwire.parameter_server.client.distinct import distinct
from tensorwire.parameter_server.client.exchange import Gradients
from tensorwire.parameter_server.client.feedback import Feedback
from tensorwire.parameter_server.client.gradient import RowGradient
from tensorwire.parameter_server.client.lookup import summed
from tensorwire.parameter_server.decisions.records import Assign
from tensorwire.parameter_server.declarations.rules import Rule
from tensorwire.parameter_server.declarations.spec import TableSpec
from tensorwire.parameter_server.messaging.messages import FirstRows, Setting, TableIds
from tensorwire.parameter_server.opaque import Function

if TYPE_CHECKING:
    from tensorwire.parameter_server.client.cluster import Cluster


TableKind = tuple[int, str, bool]
"""Width of rows, their type on the wire, and whether trainers keep some of them."""

_PIECE: Final = 1 << 18
"""Rows that one message sets."""


class Table:
    """A table of rows that servers keep. Made by ``Cluster.table``.

    Attributes:
        name: unique in the cluster.
        dim: columns of a row.
        cluster: where it is.
        hyper: its hyper-parameters, which travel with each push.
        gradient: of the rows that were used since the last step.
        kind: tables of the same kind are as wide, and travel and are kept at trainers alike.
        order: tables of one kind that move alike have the same.
        cache: the rows that this worker keeps; None if it keeps none.
        ignored: hyper-parameters of a group that the rule cannot take over; each was told once.
        feedback: what packing has left out of gradients; None if it leaves nothing out.
    """

    def __init__(self, cluster: Cluster, spec: TableSpec, cache: Cache | None) -> None:
        self.cluster = cluster
        self.spec = spec
        self.name = spec.name
        self.dim = spec.dim
        self.rule = spec.rule
        self.gradient = RowGradient(spec.dim, self)
        self.cache = None if cache is None else RowCache(cache, spec.dim)
        kind = spec.wire.push
        self.feedback = None if kind.is_exact else Feedback(kind, spec.dim)
        self.kind: TableKind = (spec.dim, repr(spec.wire), cache is not None)
        self.order = repr(spec.rule)
        self.ignored: set[str] = set()

    def __repr__(self) -> str:
        return f"Table({self.name!r}, dim={self.dim}, optimizer={self.rule!r})"

    def __deepcopy__(self, memo: object) -> Table:
        """Returns the same table: its rows are at the servers, and are not copied."""
        return self

    def __reduce__(self) -> tuple[Function, tuple[object, ...]]:
        from tensorwire.parameter_server.client import connecting  # which knows tables

        cache = None if self.cache is None else self.cache.rules
        return connecting.unpickled, (self.cluster.name, self.spec, cache)

    @property
    def rule(self) -> Rule:
        """The update rule from now on; schedulers of an optimizer change it."""
        return self._rule

    @rule.setter
    def rule(self, rule: Rule) -> None:
        self._rule = rule
        self.hyper = rule.hyper()

    def forget(self) -> None:
        """Forgets what was kept here, as after a roll-back."""
        if self.cache is not None:
            self.cache.clear()
        if self.feedback is not None:
            self.feedback.clear()

    def pull(self, ids: Tensor) -> Tensor:
        """The rows of ids as they are now; ids without a row read their initial values.

        Moves no clock, so that it may be called at any time, by anybody.

        Args:
            ids: int64, of any shape, on the CPU.

        Returns:
            ``(*ids.shape, dim)``, float32.

        Raises:
            TypeError: ``ids`` are not int64.
            RolledBack: see there.
        """
        self.check_ids(ids)
        unique, inverse = distinct(ids)
        return self.fetch(unique)[inverse]

    def fetch(self, ids: Tensor) -> Tensor:
        """The rows of ids that are all different: prefetched, kept here, or pulled now.

        Args:
            ids: int64, ``(n,)``, on the CPU.

        Returns:
            ``(n, dim)``, float32, the caller's own.
        """
        return self.cluster.rows.fetch(TableIds((self.name,), (len(ids),), ids))

    def fill(self, ids: Tensor, rows: Tensor) -> None:
        """Gives rows to ids that have none yet, such as trained ones; moves no clock.

        Args:
            ids: int64, ``(n,)``, all different, on the CPU.
            rows: ``(n, dim)``, float32.

        Raises:
            TypeError: ``ids`` are not int64, or ``rows`` not float32.
            ValueError: the shapes do not fit.
        """
        self.check(ids, rows)
        if ids.dim() != 1 or len(distinct(ids)[0]) != len(ids):
            raise ValueError(f"table {self.name!r}: fill: ids must be (n,), all different")
        for begin in range(0, len(ids), _PIECE):
            own = ids[begin : begin + _PIECE].clone(), rows[begin : begin + _PIECE].clone()
            values = Assign(FirstRows(self.name, *own))
            self.cluster.session.servers.ask_heads(partial(_setting, values))

    def push(self, ids: Tensor, grad: Tensor) -> None:
        """Pushes gradients of rows: one step of this trainer, for this table alone.

        Args:
            ids: int64, of any shape; gradients of the same id are added up.
            grad: ``(*ids.shape, dim)``, float32.

        Raises:
            TypeError: ``ids`` are not int64, or ``grad`` is not float32.
            ValueError: the shapes do not fit.
            GradientError: ``grad`` is not finite; see ``NanPolicy``.
            OutOfMemoryError: a server has no room for these rows.
        """
        self.cluster.push({self: (ids, grad)})

    def gradient_of(self, ids: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        """Ids that are all different, and a row for each; checks what a user gave."""
        self.check(ids, grad)
        unique, inverse = distinct(ids)
        return unique, summed(grad.detach(), inverse, len(unique))

    def check(self, ids: Tensor, grad: Tensor) -> None:
        """Refuses gradients that are none of this table's.

        Args:
            ids: as in :meth:`push`.
            grad: as in :meth:`push`.

        Raises:
            TypeError: ``ids`` are not int64, or ``grad`` is not float32.
            ValueError: the shapes do not fit.
        """
        self.check_ids(ids)
        if not isinstance(grad, Tensor) or grad.dtype != torch.float32:
            kind = grad.dtype if isinstance(grad, Tensor) else type(grad).__name__
            raise TypeError(f"table {self.name!r}: grad is {kind}, not torch.float32")
        if grad.layout != torch.strided:
            raise ValueError(f"table {self.name!r}: grad is {grad.layout}, not dense")
        if tuple(grad.shape) != (*ids.shape, self.dim):
            raise ValueError(
                f"table {self.name!r}: grad has shape {tuple(grad.shape)}, not "
                f"{(*ids.shape, self.dim)}"
            )

    def check_ids(self, ids: Tensor) -> None:
        """Refuses what are no ids.

        Args:
            ids: as in :meth:`pull`.

        Raises:
            TypeError: they are not int64.
            ValueError: they are sparse, or not on the CPU.
        """
        if not isinstance(ids, Tensor) or ids.dtype != torch.int64:
            kind = ids.dtype if isinstance(ids, Tensor) else type(ids).__name__
            raise TypeError(f"table {self.name!r}: ids are {kind}, not torch.int64")
        if ids.device.type != "cpu":
            raise ValueError(f"table {self.name!r}: ids are on {ids.device}, not on the CPU")
        if ids.layout != torch.strided:
            raise ValueError(f"table {self.name!r}: ids are {ids.layout}, not dense")

    def gradients(self, ids: Tensor, grad: Tensor) -> Gradients:
        """The gradients as a step."""
        return Gradients({self.name: self.gradient_of(ids, grad)})


def _setting(values: Assign, shard: int) -> Setting:
    return Setting(shard, values)
