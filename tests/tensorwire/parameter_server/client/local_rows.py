"""Gradients of rows that no server takes, for tests of modules on tables."""

from __future__ import annotations

import torch
from torch import Tensor

from tensorwire.parameter_server.client.gradient import RowGradient


def dense_gradient(gradient: RowGradient, weight: Tensor) -> Tensor:
    """The sum that the pushes of a table of this weight would add up to."""
    taken = gradient.take()
    whole = torch.zeros_like(weight)
    if taken is not None:
        ids, grad = taken
        assert len(set(ids.tolist())) == len(ids)
        whole[ids] = grad
    return whole
