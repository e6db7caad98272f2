"""Adds up the rows of the bags of many features in one go, and their gradients.

A forward pass is one call of a kernel, a backward pass another, for any number of features. Both
have the bits of ``torch.nn.functional.embedding_bag``, called for each feature by itself: torch
sorts the ids of a feature before it adds gradients up, and adds them in the order that its sort
leaves; so that order is torch's own.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from tensorwire.parameter_server.client.features import FeatureIds
from tensorwire.parameter_server.kernels import kernels

_RADIX: int = 32768
"""Ids from which torch sorts by another algorithm if they are one row, and not many."""


@dataclass(slots=True)
class Pooling:
    """The bags of features whose rows were fetched together.

    Args:
        features: their ids.
        places: for each id its place among the rows.
        means: for each feature whether its sums are divided by the number of ids.
        columns: the first column of each feature in what comes out.
        covers: whether every row is named by one of these ids.
    """

    features: Sequence[FeatureIds]
    places: Tensor
    means: Sequence[bool]
    columns: Sequence[int]
    covers: bool
    _order: Tensor | None = None

    @property
    def batch(self) -> int:
        """The number of bags of each feature."""
        return self.features[0].batch

    def order(self) -> Tensor:
        """The ids of each feature in the order in which torch adds their gradients up."""
        if self._order is None:
            self._order = _sorted(self.features)
        return self._order

    def bags(self) -> tuple[Tensor, Tensor]:
        """The end of each bag, ``(features, batch)``, and the bag of each id."""
        each = {feature.each for feature in self.features}
        (one,) = each if len(each) == 1 else (None,)
        if one is not None:
            return _even(len(self.features), self.batch, one)
        lengths = torch.stack([feature.sizes() for feature in self.features])
        bags = torch.arange(self.batch).repeat(len(self.features))
        ends = lengths.reshape(-1).cumsum(0).view(lengths.shape)
        return ends, bags.repeat_interleave(lengths.reshape(-1))

    def weights(self) -> Tensor:
        """``(ids, 1)``, the factor of each id; ``(0, 1)`` if no feature has any."""
        return _column([feature.weights for feature in self.features], self.features)

    def factors(self) -> Tensor:
        """``(ids, 1)``, the factor of each id's gradient; ``(0, 1)`` if all are one."""
        factors = [
            _shares(feature) if mean else feature.weights
            for feature, mean in zip(self.features, self.means, strict=True)
        ]
        return _column(factors, self.features)


def _column(parts: list[Tensor | None], features: Sequence[FeatureIds]) -> Tensor:
    if parts.count(None) == len(parts):
        return torch.empty(0, 1)
    whole = [
        torch.ones(len(feature.ids)) if part is None else part.detach().float()
        for part, feature in zip(parts, features, strict=True)
    ]
    return torch.cat(whole).unsqueeze(1)


def _shares(feature: FeatureIds) -> Tensor | None:
    """One divided by the number of ids of the bag of each id; None if that is one everywhere."""
    if feature.each == 1:
        return None
    lengths = feature.sizes()
    return (1.0 / lengths.double()).float().repeat_interleave(lengths)


@functools.lru_cache(maxsize=16)
def _even(features: int, batch: int, each: int) -> tuple[Tensor, Tensor]:
    ends = torch.arange(1, features * batch + 1).mul_(each).view(features, batch)
    bags = torch.arange(batch).repeat_interleave(each).repeat(features)
    return ends, bags


def _sorted(features: Sequence[FeatureIds]) -> Tensor:
    size = features[0].ids.numel()
    alike = {feature.ids.numel() for feature in features} == {size}
    if alike and 0 < size < _RADIX:
        rows = torch.stack([feature.ids for feature in features])
        begins = torch.arange(0, len(features) * size, size).unsqueeze(1)
        return (torch.sort(rows, dim=1).indices + begins).view(-1)
    begin, parts = 0, []
    for feature in features:
        parts.append(torch.sort(feature.ids).indices + begin)
        begin += len(feature.ids)
    return torch.cat(parts)


def pooled(poolings: Sequence[Pooling], rows: Sequence[Tensor], columns: int) -> Tensor:
    """One row for each bag of each feature, features side by side.

    Args:
        poolings: those of rows that were fetched together.
        rows: of each, ``(n, dim)``, float32, on the CPU.
        columns: of what comes out.

    Returns:
        ``(batch, columns)``.
    """
    output: Tensor = _Pool.apply(poolings, columns, *rows)  # type: ignore[no-untyped-call]
    return output


class _Context(Protocol):
    """The context of ``_Pool`` and ``_PoolBack``."""

    poolings: Sequence[Pooling]
    columns: int
    counts: Sequence[tuple[int, ...]]


class _Pool(torch.autograd.Function):
    """``pooled`` with its own backward."""

    @staticmethod
    def forward(ctx: _Context, poolings: Sequence[Pooling], columns: int, *rows: Tensor) -> Tensor:
        """See :func:`pooled`."""
        ctx.poolings, ctx.columns = poolings, columns
        ctx.counts = [tuple(each.shape) for each in rows]
        return _forward(poolings, rows, columns)

    @staticmethod
    def backward(ctx: _Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """The sum of the gradients of each row's bags."""
        (grad,) = grads
        if torch.is_grad_enabled():  # a gradient of the gradient is wanted
            args = ctx.poolings, ctx.counts, ctx.columns, grad
            return (None, None, *_PoolBack.apply(*args))  # type: ignore[no-untyped-call]
        return (None, None, *_backward(ctx.poolings, ctx.counts, grad))


class _PoolBack(torch.autograd.Function):
    """The backward pass of ``_Pool``, whose own is the forward pass."""

    @staticmethod
    def forward(
        ctx: _Context,
        poolings: Sequence[Pooling],
        counts: Sequence[tuple[int, ...]],
        columns: int,
        grad: Tensor,
    ) -> tuple[Tensor, ...]:
        """See :class:`_Pool`."""
        ctx.poolings, ctx.columns = poolings, columns
        return tuple(_backward(poolings, counts, grad))

    @staticmethod
    def backward(ctx: _Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Does what the forward pass does, as that is linear."""
        return None, None, None, pooled(ctx.poolings, grads, ctx.columns)


def _forward(poolings: Sequence[Pooling], rows: Sequence[Tensor], columns: int) -> Tensor:
    out = torch.empty(poolings[0].batch, columns)
    for pooling, own in zip(poolings, rows, strict=True):
        ends, _ = pooling.bags()
        kernels().pool(
            own.detach().contiguous().numpy(),
            pooling.places.numpy(),
            ends.numpy(),
            np.array(pooling.columns),
            np.array(pooling.means, np.uint8),
            pooling.weights().numpy(),
            out.numpy(),
        )
    return out


def _backward(
    poolings: Sequence[Pooling], shapes: Sequence[tuple[int, ...]], grad: Tensor
) -> list[Tensor]:
    flat = grad.detach().contiguous().numpy()
    gradients = []
    for pooling, shape in zip(poolings, shapes, strict=True):
        total = torch.empty(shape) if pooling.covers else torch.zeros(shape)
        _, bags = pooling.bags()
        ends = np.cumsum([feature.ids.numel() for feature in pooling.features])
        kernels().pool_back(
            flat,
            pooling.order().numpy(),
            pooling.places.numpy(),
            bags.numpy(),
            ends,
            np.array(pooling.columns),
            pooling.factors().numpy(),
            np.zeros(shape[0], np.uint8),
            total.numpy(),
        )
        gradients.append(total)
    return gradients
