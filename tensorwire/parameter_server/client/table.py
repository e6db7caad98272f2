"""A table as a client sees it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tensorwire.parameter_server.client.exchange import Gradients, Pulled, Wanted
from tensorwire.parameter_server.client.splitting import distinct, summed
from tensorwire.parameter_server.rules import Rule
from tensorwire.parameter_server.spec import TableSpec

if TYPE_CHECKING:
    from tensorwire.parameter_server.client.cluster import Cluster


@dataclass(frozen=True)
class Use:
    """Rows that a forward pass has used; after ``backward`` their gradients are in ``rows.grad``.

    Args:
        ids: all different.
        rows: a leaf of the graph, one row for each id.
    """

    ids: Tensor
    rows: Tensor


class Table:
    """A table of rows that servers keep. Made by ``Cluster.table``.

    Attributes:
        name: unique in the cluster.
        dim: columns of a row.
        cluster: where it is.
        rule: how rows move from now on; changed by schedulers of an optimizer.
        uses: what forward passes have used since the last step.
        next_ids: different ids that the next forward pass will want; the next step of the
            optimizer pulls them in its one message.
    """

    def __init__(self, cluster: Cluster, spec: TableSpec, cache: Any) -> None:
        self.cluster = cluster
        self.spec = spec
        self.name = spec.name
        self.dim = spec.dim
        self.rule: Rule = spec.rule
        self.cache = cache
        self.uses: list[Use] = []
        self.next_ids: Tensor | None = None
        self.cache_of_rows: Any = None
        self.feedback: Any = None
        self.used: Callable[[], object] = _nothing
        self._fetched: tuple[Tensor, Tensor, int] | None = None

    def __repr__(self) -> str:
        return f"Table({self.name!r}, dim={self.dim}, optimizer={self.rule!r})"

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
        self._check_ids(ids)
        unique, inverse = distinct(ids)
        rows = self.fetch(unique)
        return rows[inverse].view(*ids.shape, self.dim)

    def fetch(self, ids: Tensor) -> Tensor:
        """The rows of ids that are all different: of the last exchange, or pulled now.

        Args:
            ids: int64, ``(n,)``.

        Returns:
            ``(n, dim)``, float32, the caller's own.
        """
        fetched = self._fetched
        if fetched is not None and fetched[2] == self.cluster.step:
            self._fetched = None
            if ids is fetched[0] or torch.equal(ids, fetched[0]):
                return fetched[1]
        if self.cache_of_rows is not None:
            rows: Tensor = self.cache_of_rows.fetch(self, ids)
            return rows
        return self.fetch_now(ids)

    def fetch_now(self, ids: Tensor) -> Tensor:
        """As :meth:`fetch`, from the servers always."""
        pulled: Pulled = self.cluster.exchange(None, Wanted({self.name: ids})).wait()
        return pulled.tables[self.name]

    def bring(self, ids: Tensor, rows: Tensor) -> None:
        """Rows came that the next :meth:`fetch` of these ids may have, in this step."""
        self._fetched = (ids, rows, self.cluster.step)

    def use(self, ids: Tensor, rows: Tensor) -> None:
        """A forward pass uses these rows, whose gradients are to be pushed with the next step.

        Args:
            ids: int64, all different.
            rows: a leaf that requires gradients, one row for each id.
        """
        self.uses.append(Use(ids, rows))
        self.used()

    def take_gradient(self) -> tuple[Tensor, Tensor] | None:
        """All gradients since the last step: ids that are all different, and a row for each."""
        uses = [use for use in self.uses if use.rows.grad is not None]
        self.uses.clear()
        self.used()
        if not uses:
            return None
        grads = [use.rows.grad for use in uses if use.rows.grad is not None]
        if len(uses) == 1:
            return uses[0].ids, grads[0].to("cpu", torch.float32).contiguous()
        ids = torch.cat([use.ids for use in uses])
        unique, inverse = distinct(ids)
        return unique, summed(torch.cat([g.to("cpu", torch.float32) for g in grads]), inverse,
                              len(unique))  # fmt: skip

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
        self._check_ids(ids)
        if not isinstance(grad, Tensor) or grad.dtype != torch.float32:
            kind = grad.dtype if isinstance(grad, Tensor) else type(grad).__name__
            raise TypeError(f"table {self.name!r}: grad is {kind}, not torch.float32")
        if tuple(grad.shape) != (*ids.shape, self.dim):
            raise ValueError(
                f"table {self.name!r}: grad has shape {tuple(grad.shape)}, not "
                f"{(*ids.shape, self.dim)}"
            )
        unique, inverse = distinct(ids)
        return unique, summed(grad.detach(), inverse, len(unique))

    def _check_ids(self, ids: Tensor) -> None:
        if not isinstance(ids, Tensor) or ids.dtype != torch.int64:
            kind = ids.dtype if isinstance(ids, Tensor) else type(ids).__name__
            raise TypeError(f"table {self.name!r}: ids are {kind}, not torch.int64")
        if ids.device.type != "cpu":
            raise ValueError(f"table {self.name!r}: ids are on {ids.device}, not on the CPU")

    def gradients(self, ids: Tensor, grad: Tensor) -> Gradients:
        """As a step."""
        return Gradients({self.name: self.gradient_of(ids, grad)})


def _nothing() -> None:
    pass
