"""The gradient of a table's rows, as torch knows gradients: the ``grad`` of one parameter.

The parameter stands for those rows that were used since the last step. So clipping, scaling and
``zero_grad`` do to rows what they do to any parameter.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from tensorwire.parameter_server.client.distinct import distinct


class RowGradient:
    """The gradient of those rows of one table that were used since the last step.

    Args:
        dim: columns of the table.

    Attributes:
        parameter: its ``grad`` is the gradient, a row for each id. Its own values mean nothing.
    """

    def __init__(self, dim: int) -> None:
        self.parameter = nn.Parameter(torch.empty(0, dim))
        self._ids = torch.empty(0, dtype=torch.int64)

    def watch(self, ids: Tensor, rows: Tensor) -> None:
        """Takes the gradient of some rows over as soon as ``backward`` has computed it.

        Args:
            ids: of the rows, all different.
            rows: a leaf that requires a gradient, with a row for each id.
        """
        leaf: Any = rows
        leaf.register_post_accumulate_grad_hook(functools.partial(self._arrive, ids))

    def _arrive(self, ids: Tensor, rows: Tensor) -> None:
        grad, rows.grad = rows.grad, None
        assert grad is not None
        self.add(ids, grad)

    def add(self, ids: Tensor, grad: Tensor) -> None:
        """Adds a gradient to what is there.

        Args:
            ids: of the rows, all different.
            grad: a row for each id.
        """
        before = self.parameter.grad
        if before is not None:
            ids, grad = _sum(self._ids, before, ids, grad)
        self._set(ids, grad)

    def _set(self, ids: Tensor, grad: Tensor | None) -> None:
        dim = self.parameter.shape[1]
        self._ids = ids
        self.parameter.grad = None
        like = torch.empty(0) if grad is None else grad
        self.parameter.data = like.new_zeros(1, 1).expand(len(ids), dim)
        self.parameter.grad = grad

    def peek(self) -> tuple[Tensor, Tensor] | None:
        """Returns the ids and their gradient; None if there is none."""
        grad = self.parameter.grad
        return None if grad is None else (self._ids, grad)

    def take(self) -> tuple[Tensor, Tensor] | None:
        """Returns the ids and their gradient and forgets both; None if there is none."""
        taken = self.peek()
        self._set(torch.empty(0, dtype=torch.int64), None)
        return taken


def _sum(ids: Tensor, grad: Tensor, more: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """The sum of two gradients: rows of both are added, in this order."""
    union, places = distinct(torch.cat((ids, more)))
    places = places.to(grad.device)
    total = grad.new_zeros(len(union), grad.shape[1])
    total[places[: len(ids)]] = grad
    total.index_add_(0, places[len(ids) :], other.to(grad))
    return union, total
