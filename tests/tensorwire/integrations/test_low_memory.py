"""Optimizers with little state move parameters as their papers say."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tensorwire.integrations.low_memory import AdaLomo, GaLoreAdamW, Lomo


def _parameter(rows: int, columns: int) -> tuple[nn.Parameter, Tensor, Tensor]:
    parameter = nn.Parameter(torch.rand(rows, columns))
    grad = torch.rand(rows, columns) - 0.5
    parameter.grad = grad.clone()
    return parameter, parameter.detach().clone(), grad


def _require_the_same_steps(ours: Optimizer, theirs: Optimizer, steps: int) -> None:
    """Steps both with the same gradients, after which their parameters must be alike."""
    mine, others = ([*each.param_groups[0]["params"]] for each in (ours, theirs))
    for _ in range(steps):
        for one, other in zip(mine, others, strict=True):
            one.grad = torch.rand_like(one) - 0.5
            other.grad = one.grad.clone()
        ours.step()
        theirs.step()
    for one, other in zip(mine, others, strict=True):
        torch.testing.assert_close(one, other)


def test_lomo_goes_down_the_clipped_gradient_and_keeps_nothing() -> None:
    parameter, value, grad = _parameter(4, 3)
    optimizer = Lomo([parameter], lr=0.5, weight_decay=0.1, clip_grad_value=0.2)
    optimizer.step()
    expected = value - 0.5 * 0.1 * value - 0.5 * grad.clamp(-0.2, 0.2)
    torch.testing.assert_close(parameter.detach(), expected)
    assert not optimizer.state


def test_adalomo_moves_as_adafactor_and_keeps_two_vectors_of_a_matrix() -> None:
    mine = [nn.Parameter(torch.rand(6, 5)), nn.Parameter(torch.rand(5))]
    others = [nn.Parameter(each.detach().clone()) for each in mine]
    ours = AdaLomo(mine, lr=0.1)
    theirs = torch.optim.Adafactor(others, lr=0.1)  # its rate falls from the 100th step on only
    _require_the_same_steps(ours, theirs, 4)
    assert ours.state[mine[0]]["rows"].shape == (6,)
    assert ours.state[mine[0]]["columns"].shape == (5,)


def test_galore_is_adamw_in_the_space_of_the_largest_directions() -> None:
    parameter, value, grad = _parameter(4, 9)
    optimizer = GaLoreAdamW([parameter], lr=0.1, rank=2, scale=0.5, weight_decay=0.1)
    optimizer.step()
    left = torch.linalg.svd(grad)[0][:, :2]
    low = nn.Parameter(torch.zeros(2, 9))
    low.grad = left.T @ grad
    torch.optim.AdamW([low], lr=1.0, weight_decay=0.0).step()
    expected = value * (1 - 0.1 * 0.1) + 0.1 * 0.5 * (left @ low.detach())
    torch.testing.assert_close(parameter.detach(), expected)
    state = optimizer.state[parameter]
    assert state["mean"].shape == state["squares"].shape == (2, 9)
    assert state["projection"].shape == (4, 2)


def test_galore_leaves_small_matrices_and_vectors_to_adamw() -> None:
    mine = [nn.Parameter(torch.rand(3, 9)), nn.Parameter(torch.rand(5))]
    others = [nn.Parameter(each.detach().clone()) for each in mine]
    ours = GaLoreAdamW(mine, lr=0.1, rank=3, weight_decay=0.1)
    theirs = torch.optim.AdamW(others, lr=0.1, weight_decay=0.1)
    _require_the_same_steps(ours, theirs, 3)


def test_a_tall_matrix_is_projected_on_its_other_side() -> None:
    wide, value, grad = _parameter(4, 9)
    tall = nn.Parameter(value.T.clone())
    tall.grad = grad.T.clone()
    GaLoreAdamW([wide], lr=0.1, rank=2).step()
    GaLoreAdamW([tall], lr=0.1, rank=2).step()
    torch.testing.assert_close(tall.detach().T, wide.detach())
