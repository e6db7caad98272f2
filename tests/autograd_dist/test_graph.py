"""The autograd graph is read as torch reads it."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from autograd_dist.graph import edge_of, edges_own_graph, gradient_edges


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0] * 2


TENSORS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "a leaf": lambda x: x,
    "the result of an operator": lambda x: x * 2,
    "one of several results": lambda x: x.unbind()[1],
    "the result of a function in Python": Double.apply,
    "a sparse tensor": torch.Tensor.to_sparse,
}


@pytest.mark.parametrize("kind", TENSORS)
def test_the_edge_of_a_tensor_is_the_one_that_torch_gives(kind: str) -> None:
    x = torch.ones(2, requires_grad=True)
    tensor = TENSORS[kind](x)
    edge = edge_of(tensor)
    assert type(edge) is GradientEdge
    assert len(edge) == len(GradientEdge._fields)
    assert edge[:2] == get_gradient_edge(tensor)[:2]
    if edges_own_graph:
        del tensor
        gc.collect()
    gradient = torch.ones(2).to_sparse() if kind == "a sparse tensor" else None
    if kind == "one of several results":
        gradient = torch.ones(())
    elif gradient is None:
        gradient = torch.ones(2)
    torch.autograd.backward([edge], [gradient])
    assert x.grad is not None


def test_edges_are_given_to_the_engine_as_torch_makes_them() -> None:
    node = (torch.ones(2, requires_grad=True) * 2).grad_fn
    assert node is not None
    made = gradient_edges([(node, 0), (node, 1)])
    assert made == (GradientEdge(node, 0), GradientEdge(node, 1))
    assert {type(edge) for edge in made} == {GradientEdge}
