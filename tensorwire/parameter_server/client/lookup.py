"""Spreads fetched rows over the places of a batch, and adds up their gradients in that order."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from tensorwire.parameter_server.kernels import kernels
from tensorwire.parameter_server.kernels.arrays import Array
from tensorwire.parameter_server.kernels.sharing import divide, share_out, shares_of


def spread(rows: Tensor, places: Tensor) -> Tensor:
    """Returns ``rows[places]``; its gradient has the bits of ``torch.nn.functional.embedding``'s.

    On the CPU the gradient is computed by one pass of a kernel, several times as fast as torch's.

    Args:
        rows: ``(n, dim)``.
        places: int64 of any shape, in which each of the ``n`` rows is named.
    """
    if rows.is_cpu and rows.dtype == torch.float32 and rows.requires_grad:
        spread_out: Tensor = _Spread.apply(rows, places)  # type: ignore[no-untyped-call]
        return spread_out
    return functional.embedding(places, rows)


class _Context(Protocol):
    """The context of ``_Spread``."""

    count: int
    saved_tensors: tuple[Tensor, ...]

    def save_for_backward(self, *tensors: Tensor) -> None: ...


class _Spread(torch.autograd.Function):
    """``spread`` with its own backward."""

    @staticmethod
    def forward(ctx: _Context, rows: Tensor, places: Tensor) -> Tensor:
        """See :func:`spread`."""
        ctx.save_for_backward(places)
        ctx.count = len(rows)
        return _looked_up(rows, places)

    @staticmethod
    def backward(ctx: _Context, *grads: Tensor) -> tuple[Tensor, None]:
        """The sum of the gradients of each row's places."""
        (places,) = ctx.saved_tensors
        (grad,) = grads
        if torch.is_grad_enabled():  # a gradient of the gradient is wanted
            backward = torch.ops.aten.embedding_dense_backward
            return backward(grad, places, ctx.count, -1, False), None
        return summed(grad, places, ctx.count), None


def _looked_up(rows: Tensor, places: Tensor) -> Tensor:
    """Returns ``rows[places]``."""
    dim, k = rows.shape[1], kernels()
    if k.NAME != "numba" or not dim:
        return functional.embedding(places, rows)
    output = torch.empty(*places.shape, dim)
    source, where = rows.detach().numpy(), np.ascontiguousarray(places.reshape(-1).numpy())
    out = output.view(-1, dim).numpy()
    divide(len(where), out.nbytes, lambda a, b: k.gather(source, where[a:b], out[a:b]))
    return output


def summed(grad: Tensor, places: Tensor, count: int) -> Tensor:
    """Gradients of the same row added up, in the order in which they come.

    Args:
        grad: ``(*places.shape, dim)``, float32, on the CPU.
        places: which row each belongs to; none of the ``count`` rows is left out.
        count: of rows.
    """
    dim = grad.shape[-1]
    total = torch.empty(count, dim)
    flat = np.ascontiguousarray(grad.detach().reshape(-1, dim).numpy())
    where = np.ascontiguousarray(places.reshape(-1).numpy())
    k, seen, out = kernels(), np.zeros(count, np.uint8), total.numpy()
    shares = shares_of(flat.nbytes) if k.NAME == "numba" else 1
    parts = 1 << (shares.bit_length() - 1)
    if parts == 1:
        k.segment_sum(flat, where, seen, out)
    else:
        share_out([_sums(k, (flat, where, seen, out), part, parts) for part in range(parts)])
    return total


def _sums(k: ModuleType, arrays: tuple[Array, ...], part: int, parts: int) -> Callable[[], None]:
    return lambda: k.share_of_sums(*arrays, part, parts)
