"""Optimizers whose state or gradients take little memory: ``Lomo``, ``AdaLomo``, ``GaLoreAdamW``.

They are plain optimizers of torch, and mostly of use at parameter servers: there a gradient that
is pushed during backward is applied at once, and state is kept apart from the trainer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["AdaLomo", "GaLoreAdamW", "Lomo"]


class Lomo(torch.optim.Optimizer):
    """LOMO (arXiv:2306.09782): gradient descent without any state.

    Args:
        params: parameters or groups of them.
        lr: learning rate.
        weight_decay: of weights, decoupled from the gradient.
        clip_grad_value: the largest magnitude of an element of a gradient. Default without bound.

    Example::

        Trainer(..., optimizer_cls_and_kwargs=(Lomo, {"lr": 1e-2}),
                callbacks=[ParameterServerCallback(servers, mode="backward")])
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        weight_decay: float = 0.0,
        clip_grad_value: float | None = None,
    ) -> None:
        hyper = {"lr": lr, "weight_decay": weight_decay, "clip_grad_value": clip_grad_value}
        super().__init__(params, hyper)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Moves the parameters that have gradients.

        Args:
            closure: computes the loss and its gradients. Default none.

        Returns:
            What ``closure`` returned, or None.
        """
        loss = _evaluate(closure)
        for group, parameter, grad in _with_gradients(self):
            if group["clip_grad_value"] is not None:
                grad = grad.clamp(-group["clip_grad_value"], group["clip_grad_value"])
            value = parameter.float() * (1 - group["lr"] * group["weight_decay"])
            parameter.copy_(value.add_(grad, alpha=-group["lr"]))
        return loss


class AdaLomo(torch.optim.Optimizer):
    """AdaLomo (arXiv:2310.10195): a learning rate for each element from factored squares.

    Of a matrix it keeps two vectors. Unlike the authors' class it needs no GPU.

    Args:
        params: parameters or groups of them.
        lr: learning rate, relative to each parameter's root mean square.
        weight_decay: of weights, decoupled from the gradient.
        decay_rate: the mean of squares after step t forgets with 1 - t ** decay_rate.
        clip_threshold: the largest root mean square of an update, before ``lr``.
        eps: added to squares, and the least root mean square of a parameter.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        weight_decay: float = 0.0,
        decay_rate: float = -0.8,
        clip_threshold: float = 1.0,
        eps: tuple[float, float] = (1e-30, 1e-3),
    ) -> None:
        hyper = {"lr": lr, "weight_decay": weight_decay, "decay_rate": decay_rate}
        super().__init__(params, {**hyper, "clip_threshold": clip_threshold, "eps": eps})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Moves the parameters that have gradients.

        Args:
            closure: computes the loss and its gradients. Default none.

        Returns:
            What ``closure`` returned, or None.
        """
        loss = _evaluate(closure)
        for group, parameter, grad in _with_gradients(self):
            state = self.state[parameter]
            state["step"] = state.get("step", 0) + 1
            keep = 1 - state["step"] ** group["decay_rate"]
            update = grad * _inverse_root(state, grad.square() + group["eps"][0], keep)
            update /= (_rms(update) / group["clip_threshold"]).clamp(min=1.0)
            value = parameter.float()
            rate = float(group["lr"] * _rms(value).clamp(min=group["eps"][1]))
            value = value * (1 - rate * group["weight_decay"])
            parameter.copy_(value.add_(update, alpha=-rate))
        return loss


class GaLoreAdamW(torch.optim.Optimizer):
    """GaLore (arXiv:2403.03507): AdamW of matrices' gradients in a space of low rank.

    Matrices with more rows and columns than ``rank`` are projected; others are as under AdamW.

    Args:
        params: parameters or groups of them.
        lr: learning rate.
        betas: of the means of gradients and of their squares.
        eps: added to the root of the mean of squares.
        weight_decay: of weights, decoupled from the gradient.
        rank: of the projection.
        update_gap: steps until the projection is computed anew, from a gradient.
        scale: of the update of a matrix that is projected.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        rank: int = 128,
        update_gap: int = 200,
        scale: float = 0.25,
    ) -> None:
        hyper = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**hyper, "rank": rank, "update_gap": update_gap, "scale": scale})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Moves the parameters that have gradients.

        Args:
            closure: computes the loss and its gradients. Default none.

        Returns:
            What ``closure`` returned, or None.
        """
        loss = _evaluate(closure)
        for group, parameter, grad in _with_gradients(self):
            state = self.state[parameter]
            done = state.get("step", 0)
            state["step"] = done + 1
            is_projected = grad.dim() == 2 and min(grad.shape) > group["rank"]
            if is_projected and done % group["update_gap"] == 0:
                state["projection"] = _projection(grad, group["rank"])
            low = _project(grad, state["projection"]) if is_projected else grad
            update = _adam(state, low, group)
            if is_projected:
                update = _project_back(update, state["projection"], grad) * group["scale"]
            value = parameter.float() * (1 - group["lr"] * group["weight_decay"])
            parameter.copy_(value.add_(update, alpha=-group["lr"]))
        return loss


def _evaluate(closure: Callable[[], Any] | None) -> Any:
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def _with_gradients(
    optimizer: torch.optim.Optimizer,
) -> list[tuple[dict[str, Any], Tensor, Tensor]]:
    """The parameters that have gradients, these in float32, each with its group."""
    return [
        (group, parameter, parameter.grad.float())
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.grad is not None
    ]


def _rms(tensor: Tensor) -> Tensor:
    root: Tensor = tensor.norm() / tensor.numel() ** 0.5
    return root


def _inverse_root(state: dict[str, Any], squares: Tensor, keep: float) -> Tensor:
    """Updates means of squares, by row and column of a matrix; returns 1 / their root."""
    if squares.dim() < 2:
        mean: Tensor = state.setdefault("squares", torch.zeros_like(squares))
        return mean.lerp_(squares, 1 - keep).rsqrt()
    rows: Tensor = state.setdefault("rows", torch.zeros_like(squares[..., 0]))
    columns: Tensor = state.setdefault("columns", torch.zeros_like(squares[..., 0, :]))
    rows.lerp_(squares.mean(-1), 1 - keep)
    columns.lerp_(squares.mean(-2), 1 - keep)
    by_row = (rows / rows.mean(-1, keepdim=True)).rsqrt().unsqueeze(-1)
    return by_row * columns.rsqrt().unsqueeze(-2)


def _projection(grad: Tensor, rank: int) -> Tensor:
    """An orthonormal basis, on the shorter side, of where a gradient is largest."""
    left, _, right = torch.linalg.svd(grad, full_matrices=False)
    basis: Tensor = left[:, :rank] if len(grad) <= grad.shape[1] else right[:rank]
    return basis.clone()


def _project(grad: Tensor, projection: Tensor) -> Tensor:
    if len(grad) <= grad.shape[1]:
        return projection.T @ grad
    return grad @ projection.T


def _project_back(low: Tensor, projection: Tensor, grad: Tensor) -> Tensor:
    return projection @ low if len(grad) <= grad.shape[1] else low @ projection


def _adam(state: dict[str, Any], grad: Tensor, group: dict[str, Any]) -> Tensor:
    """The update of Adam, before the learning rate."""
    first, second = group["betas"]
    mean: Tensor = state.setdefault("mean", torch.zeros_like(grad)).lerp_(grad, 1 - first)
    squares: Tensor = state.setdefault("squares", torch.zeros_like(grad))
    squares.mul_(second).addcmul_(grad, grad, value=1 - second)
    root = (squares / (1 - second ** state["step"])).sqrt_().add_(group["eps"])
    update: Tensor = mean / (1 - first ** state["step"]) / root
    return update
