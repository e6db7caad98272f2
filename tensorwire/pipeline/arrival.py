"""Lets a stage change in place what it is given, as a layer in one process may."""

from __future__ import annotations

from typing import Any, Final

import torch

from tensorwire.pipeline.trees import map_tensors


class _Arrived(torch.autograd.Function):
    """Passes tensors on. The result is no leaf of the graph, so torch allows it to be changed.

    It is no copy, and counts its changes together with what came in. So torch notices if a
    backward pass needs what was changed, also that of another stage of the same worker.
    """

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the same memory."""
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        """Returns the same gradient."""
        return gradients[0]


ARRIVED_NODE: Final[type] = _Arrived._backward_cls
"""Class of the nodes that this puts into graphs; each has one gradient, so they can be split."""


def changeable(value: Any) -> Any:
    """The same values in tensors that may be changed in place."""
    return map_tensors(value, _changeable)


def copied(value: Any) -> Any:
    """Copies of all tensors, which begin graphs of their own where the originals do."""
    return map_tensors(value, _copied)


def _changeable(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.requires_grad and tensor.is_leaf and torch.is_grad_enabled():
        arrived: torch.Tensor = _Arrived.apply(tensor)  # type: ignore[no-untyped-call]
        return arrived
    # Micro-batches are views of one batch; a change of one is none of the others.
    return tensor.data if tensor._is_view() and not tensor.requires_grad else tensor


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)
