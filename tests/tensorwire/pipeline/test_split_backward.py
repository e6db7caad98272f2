"""The two parts of a split backward pass give the gradients of the whole one, bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from tensorwire.pipeline.split_backward import SplitBackward, run_backward


class _Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(6, 6), nn.Linear(6, 6, bias=False), nn.LayerNorm(6)
        self.scale = nn.Parameter(torch.rand(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.b(torch.relu(self.a(self.norm(x)))) * self.scale


class _TwoOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.aside = nn.Linear(6, 6), nn.Embedding(3, 6)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        left, right = self.a(x).chunk(2, dim=-1)
        return left, right.sin(), self.aside(torch.tensor([0, 2]))


class _UsedTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(torch.relu(self.a(x)))


class _Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: object, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0] * 2


class _Python(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        doubled: torch.Tensor = _Double.apply(self.a(x))
        return doubled


def _whole(module: nn.Module, x: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Outputs' gradients, and what plain autograd makes of them."""
    outputs = module(x)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    torch.manual_seed(1)
    gradients = [torch.rand_like(each) for each in outputs]
    torch.autograd.backward(outputs, gradients)
    found = [x.grad, *(each.grad for each in module.parameters())]
    return gradients, [each for each in found if each is not None]


@pytest.mark.parametrize(
    ("make", "is_split"),
    [
        (lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6)), True),
        (lambda: nn.Sequential(_Residual(), _Residual()), True),
        (lambda: nn.Sequential(nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 3, 3)), True),
        (lambda: nn.TransformerEncoderLayer(6, 2, 12, dropout=0.0, batch_first=True), True),
        (_TwoOutputs, True),
        (_UsedTwice, False),
        (_Python, False),
        (nn.Tanh, True),
    ],
    ids=["mlp", "residual", "conv", "transformer", "two", "used twice", "python", "no weights"],
)  # fmt: skip
def test_both_parts_together_give_what_the_whole_pass_gives(
    make: Callable[[], nn.Module], is_split: bool
) -> None:
    torch.manual_seed(0)
    module = make()
    parted = copy.deepcopy(module)
    x = torch.rand(4, 6, requires_grad=True)
    mine = x.detach().requires_grad_()
    gradients, expected = _whole(module, x)

    outputs = parted(mine)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    split = SplitBackward([get_gradient_edge(each) for each in outputs], [mine])
    (of_input,) = split.for_inputs(gradients)
    before = [each.grad for each in parted.parameters()]
    split.for_weights()

    assert split.is_split is is_split
    assert all(each is None for each in before) is is_split
    assert of_input is not None
    found = [of_input, *(each.grad for each in parted.parameters())]
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True) if a is not None)


def test_without_inputs_all_work_is_in_the_second_part() -> None:
    module = nn.Embedding(5, 3)
    output = module(torch.tensor([1, 4]))
    split = SplitBackward([get_gradient_edge(output)], [])
    assert split.for_inputs([torch.ones(2, 3)]) == ()
    assert module.weight.grad is None
    split.for_weights()
    assert module.weight.grad is not None
    assert module.weight.grad.sum() == 6


def test_an_output_without_a_gradient_is_left_out() -> None:
    x = torch.rand(4, 6, requires_grad=True)
    weight = torch.rand(6, requires_grad=True)
    outputs = [get_gradient_edge(x * 2), get_gradient_edge(x * weight)]
    split = SplitBackward(outputs, [x])
    (found,) = split.for_inputs([torch.ones(4, 6), None])
    split.for_weights()
    assert found is not None
    assert torch.equal(found, torch.full((4, 6), 2.0))
    assert weight.grad is None


def test_hooks_of_weights_run_once_and_gradients_add_up() -> None:
    module = nn.Sequential(nn.Linear(6, 6), nn.ReLU())
    calls: list[torch.Tensor] = []
    module[0].weight.register_post_accumulate_grad_hook(lambda weight: calls.append(weight))
    x = torch.rand(4, 6, requires_grad=True)
    for _ in range(2):
        split = SplitBackward([get_gradient_edge(module(x))], [x])
        split.for_inputs([torch.ones(4, 6)])
        split.for_weights()
    once = [each.grad / 2 for each in module.parameters() if each.grad is not None]
    module.zero_grad()
    run_backward([get_gradient_edge(module(x))], [x], [torch.ones(4, 6)])
    assert len(calls) == 3
    for a, b in zip(once, module.parameters(), strict=True):
        assert b.grad is not None
        assert torch.allclose(a, b.grad)
    assert x.grad is None
