"""Learning rate schedulers of torch's that act on a distributed optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from optim_dist.state import StateAcrossOwners

S = TypeVar("S")


def lr_scheduler(
    scheduler_class: Callable[..., S], optimizer: StateAcrossOwners, *args: Any, **kwargs: Any
) -> S:
    """Makes a scheduler whose changes reach every owner with the next step.

    Args:
        scheduler_class: of ``torch.optim.lr_scheduler``, or one like it.
        optimizer: the distributed optimizer.
        args: further positional arguments of ``scheduler_class``.
        kwargs: its keyword arguments.

    Returns:
        The scheduler; its ``step``, ``state_dict`` and the like work as ever.

    Raises:
        ValueError: the owners' optimizers have different numbers of groups.

    Example::

        scheduler = optim_dist.lr_scheduler(
            torch.optim.lr_scheduler.CosineAnnealingLR, optimizer, T_max=1000)
        optimizer.step(context_id)
        scheduler.step()
    """
    return scheduler_class(optimizer.placeholder(), *args, **kwargs)
