"""Optimizers of a Trainer under DistributedDataParallel: rank 0's is at the servers.

DistributedDataParallel leaves the same mean gradients on every rank. Rank 0 pushes them and gets
the new parameters, which it hands on to the others. These never speak to the servers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor
from torch import distributed as dist

from tensorwire import parameter_server as ps

_FINE: Final = 0
_FAILED: Final = 1


class LeadingOptimizer(ps.Optimizer):
    """The optimizer of rank 0, which hands on what each step brings. Made by ``wrap``."""

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Pushes the gradients, and gets and hands on the new parameters.

        Args:
            closure: computes the loss and its gradients, once. Default none.
        """
        with telling_others(parameters_of(self)):
            return super().step(closure)


class FollowingOptimizer(torch.optim.Optimizer):
    """The optimizer of another rank: a step waits for what rank 0 has got.

    Args:
        local: whose groups it has; its state is at the servers.
    """

    _step_supports_amp_scaling = True

    def __init__(self, local: torch.optim.Optimizer) -> None:
        super().__init__([{"params": [torch.empty(0)]}], dict(local.defaults))
        local.state.clear()
        self.local = local
        self.param_groups = local.param_groups

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Waits for the parameters.

        Args:
            closure: computes the loss and its gradients, once. Default none.

        Raises:
            RolledBack: rank 0 was told so.
            RuntimeError: rank 0 failed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        hear(parameters_of(self))
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Sets the hyper-parameters; rank 0 sets the state, at the servers.

        Args:
            state_dict: of this optimizer, or of a local one of the same class.
        """
        self.local.load_state_dict(state_dict)
        self.local.state.clear()
        self.param_groups = self.local.param_groups


def parameters_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """All parameters, in the order of the groups."""
    return [each for group in optimizer.param_groups for each in group["params"]]


@contextmanager
def telling_others(parameters: Sequence[Tensor]) -> Iterator[None]:
    """Hands the parameters on to the other ranks afterwards, or the error that came instead."""
    state = torch.tensor([_FINE], device=parameters[0].device)
    try:
        yield
    except BaseException as error:
        dist.broadcast(state.fill_(_FAILED), 0)
        dist.broadcast_object_list([_as_data(error)], 0)
        raise
    dist.broadcast(state, 0)
    for some in _alike(parameters):
        dist.broadcast(torch.cat([each.detach().reshape(-1) for each in some]), 0)


@torch.no_grad()
def hear(parameters: Sequence[Tensor]) -> None:
    """Sets the parameters to those of rank 0.

    Raises:
        RolledBack: rank 0 was told so.
        RuntimeError: rank 0 failed.
    """
    state = torch.tensor([_FINE], device=parameters[0].device)
    dist.broadcast(state, 0)
    if int(state):
        heard: list[Any] = [None]
        dist.broadcast_object_list(heard, 0)
        raise _from_data(heard[0])
    for some in _alike(parameters):
        flat = torch.empty(sum(each.numel() for each in some), dtype=some[0].dtype,
                           device=some[0].device)  # fmt: skip
        dist.broadcast(flat, 0)
        pieces = torch.split(flat, [each.numel() for each in some])
        for parameter, piece in zip(some, pieces, strict=True):
            parameter.copy_(piece.view_as(parameter))


def _alike(parameters: Sequence[Tensor]) -> list[list[Tensor]]:
    """The parameters by dtype, in an order that all ranks have."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for each in parameters:
        by_dtype.setdefault(each.dtype, []).append(each)
    return list(by_dtype.values())


def _as_data(error: BaseException) -> tuple[Any, ...]:
    if isinstance(error, ps.RolledBack):
        return error.step, error.lost, error.snapshot
    return (f"rank 0 failed: {type(error).__name__}: {error}",)


def _from_data(data: tuple[Any, ...]) -> Exception:
    return ps.RolledBack(*data) if len(data) == 3 else RuntimeError(data[0])
