"""Rows are spread over a batch with the bits of torch's embedding, gradients included."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from tensorwire.parameter_server.client.lookup import spread


def _torchs(rows: Tensor, places: Tensor) -> Tensor:
    return functional.embedding(places, rows)


def _rows() -> Tensor:
    return torch.randn(5, 3, generator=torch.Generator().manual_seed(2)).requires_grad_()


def test_the_sum_of_a_single_negative_zero_is_torchs() -> None:
    places, grad = torch.tensor([4, 0, 3, 2, 1, 0]), torch.full((6, 3), -0.0)

    def bits(look_up: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        rows = _rows()
        look_up(rows, places).backward(grad)
        assert rows.grad is not None
        return rows.grad.view(torch.int32)

    assert torch.equal(bits(spread), bits(_torchs))


def test_gradients_that_lie_otherwise_in_memory_are_added_up() -> None:
    places, grad = torch.arange(10).reshape(2, 5) % 5, torch.randn(3, 5, 2).permute(2, 1, 0)
    mine, theirs = _rows(), _rows()
    spread(mine, places).backward(grad)
    _torchs(theirs, places).backward(grad)
    assert torch.equal(mine.grad, theirs.grad)  # type: ignore[arg-type]


def test_a_gradient_has_a_gradient() -> None:
    places = torch.tensor([0, 1, 1, 4, 3, 2])

    def second(look_up: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        rows = _rows()
        loss = look_up(rows, places).pow(3).sum()
        (first,) = torch.autograd.grad(loss, rows, create_graph=True)
        (found,) = torch.autograd.grad(first.pow(2).sum(), rows)
        return found

    assert torch.equal(second(spread), second(_torchs))
