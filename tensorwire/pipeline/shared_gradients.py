"""Gradients at the borders of a step: set aside before it, shared and added up after it.

A step adds to gradients of its own, which start from nothing. So a step that fails leaves
those of earlier steps as they were, and what tied weights and replicas exchange is the
step's part only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch.nn.parallel import DistributedDataParallel


class StepGradients:
    """The gradients of some parameters during one step.

    Args:
        parameters: all that the step may give gradients.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        unique = {id(each): each for each in parameters}
        self._before = [(each, each.grad) for each in unique.values()]
        for parameter, _ in self._before:
            parameter.grad = None

    def add(self) -> None:
        """Adds the step's gradients to those from before, which :meth:`drop` can still restore."""
        for parameter, before in self._before:
            if before is not None:
                now = parameter.grad
                parameter.grad = before if now is None else before + now

    def drop(self) -> None:
        """Puts the gradients from before back; those of the step are lost."""
        for parameter, before in self._before:
            parameter.grad = before


def total(contributions: Sequence[torch.Tensor | None], like: torch.Tensor) -> torch.Tensor | None:
    """Adds what the members of a sharing contribute, in their order, where ``like`` is."""
    sums: torch.Tensor | None = None
    for each in contributions:
        if each is not None:
            here = each.to(like.device)
            sums = here if sums is None else sums + here
    return sums


def average_over_ddp(module: DistributedDataParallel) -> None:
    """Averages the gradients of a module over its process group, as DDP itself would."""
    group = module.process_group
    size = torch.distributed.get_world_size(group)
    for parameter in module.parameters():
        if parameter.requires_grad:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            torch.distributed.all_reduce(parameter.grad, group=group)
            parameter.grad /= size
