"""The gradient of a table's rows, as torch knows gradients: the ``grad`` of one parameter.

The parameter stands for those rows that were used since the last step. So clipping, scaling and
``zero_grad`` do to rows what they do to any parameter. Rows of several tables that were fetched
together have one gradient, of which each table's is a part.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from tensorwire.parameter_server.client.distinct import distinct
from tensorwire.parameter_server.client.exchange import StepGradient
from tensorwire.parameter_server.messaging.messages import TableIds


class RowGradient:
    """The gradient of those rows of one table that were used since the last step.

    Args:
        dim: columns of the table.

    Attributes:
        parameter: its ``grad`` is the gradient, a row for each id. Its own values mean nothing.
        ids: of the rows.
        whole: the gradient of several tables that :attr:`part` is a part of; None if of none.
        part: what ``parameter.grad`` is as long as nobody has put another in its place.
    """

    def __init__(self, dim: int) -> None:
        self._no_rows = torch.empty(0, dim)
        self._no_ids = torch.empty(0, dtype=torch.int64)
        self.parameter = nn.Parameter(self._no_rows)
        self.ids = self._no_ids
        self.whole: StepGradient | None = None
        self.part: Tensor | None = None

    def add(self, ids: Tensor, grad: Tensor) -> None:
        """Adds a gradient to what is there.

        Args:
            ids: of the rows, all different.
            grad: a row for each id.
        """
        before = self.parameter.grad
        if before is not None:
            ids, grad = _sum(self.ids, before, ids, grad)
        self.set(ids, grad, _blank(grad), None)

    def set(self, ids: Tensor, grad: Tensor, blank: Tensor, whole: StepGradient | None) -> None:
        """Puts a gradient in the place of what is there.

        Args:
            ids: of the rows, all different.
            grad: a row for each id.
            blank: of the same shape.
            whole: what ``grad`` is a part of; None if of nothing.
        """
        self.ids, self.whole, self.part = ids, whole, grad
        parameter = self.parameter
        parameter.grad = None
        parameter.data = blank
        parameter.grad = grad

    def peek(self) -> tuple[Tensor, Tensor] | None:
        """Returns the ids and their gradient; None if there is none."""
        grad = self.parameter.grad
        return None if grad is None else (self.ids, grad)

    def take(self) -> tuple[Tensor, Tensor] | None:
        """Returns the ids and their gradient and forgets both; None if there is none."""
        taken = self.peek()
        self.clear()
        return taken

    def clear(self) -> None:
        """Forgets the gradient."""
        self.ids, self.whole, self.part = self._no_ids, None, None
        self.parameter.grad = None
        self.parameter.data = self._no_rows


class HasGradient(Protocol):
    """A table, as far as its gradient goes."""

    name: str
    gradient: RowGradient


def watch(gradients: Sequence[RowGradient], ids: TableIds, rows: Tensor) -> None:
    """Takes the gradient of some rows over as soon as ``backward`` has computed it.

    Args:
        gradients: of each table.
        ids: of the rows.
        rows: a leaf that requires a gradient, with a row for each id.
    """
    leaf: Any = rows
    leaf.register_post_accumulate_grad_hook(functools.partial(_arrive, gradients, ids))


def _arrive(gradients: Sequence[RowGradient], ids: TableIds, rows: Tensor) -> None:
    grad, rows.grad = rows.grad, None
    assert grad is not None
    whole = StepGradient(ids, grad)
    sizes = ids.sizes
    parts = zip(
        gradients,
        ids.ids.split_with_sizes(sizes),
        grad.split_with_sizes(sizes),
        _blank(grad).split_with_sizes(sizes),
        strict=True,
    )
    for gradient, own, part, blank in parts:
        if gradient.parameter.grad is None:
            gradient.set(own, part, blank, whole)
        else:
            gradient.add(own, part)


def _blank(grad: Tensor) -> Tensor:
    """A tensor of the same shape that takes no memory."""
    return grad.new_zeros(1, 1).expand_as(grad)


def gathered(tables: Iterable[HasGradient]) -> list[StepGradient]:
    """The gradients of tables: those of several together that are so there, and all others."""
    found: list[StepGradient] = []
    parts: dict[int, list[HasGradient]] = {}
    for table in tables:
        gradient = table.gradient
        grad = gradient.parameter.grad
        if grad is None:
            continue
        if gradient.whole is not None and grad is gradient.part:
            parts.setdefault(id(gradient.whole), []).append(table)
        else:
            found.append(_alone(table))
    for some in parts.values():
        whole = some[0].gradient.whole
        assert whole is not None
        found += [whole] if len(some) == len(whole.ids.tables) else [_alone(t) for t in some]
    return found


def _alone(table: HasGradient) -> StepGradient:
    ids, grad = table.gradient.ids, table.gradient.parameter.grad
    assert grad is not None
    return StepGradient(TableIds((table.name,), (len(ids),), ids), grad)


def _sum(ids: Tensor, grad: Tensor, more: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """The sum of two gradients: rows of both are added, in this order."""
    union, places = distinct(torch.cat((ids, more)))
    places = places.to(grad.device)
    total = grad.new_zeros(len(union), grad.shape[1])
    total[places[: len(ids)]] = grad
    total.index_add_(0, places[len(ids) :], other.to(grad))
    return union, total
