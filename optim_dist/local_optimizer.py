"""One owner's share of a distributed optimizer: a ``torch.optim`` optimizer and its step.

Decides how gradients that are not in ``.grad`` reach an optimizer that looks
only there. It knows neither RPC nor autograd contexts.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.optim import Optimizer


class LocalOptimizer:
    """A ``torch.optim`` optimizer that is stepped with gradients from elsewhere.

    Args:
        optimizer_class: a subclass of ``torch.optim.Optimizer``.
        parameters: what it optimizes.
        args: its further positional arguments.
        kwargs: its keyword arguments.
        grad_fields: whoever uses ``.grad`` of parameters on this worker for a
            purpose of its own holds this lock meanwhile; so do steps.
    """

    def __init__(
        self,
        optimizer_class: Callable[..., Optimizer],
        parameters: Sequence[torch.Tensor],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        grad_fields: AbstractContextManager[object],
    ) -> None:
        self.optim = optimizer_class(parameters, *args, **kwargs)
        self._grad_fields = grad_fields

    def step(self, gradients: Mapping[torch.Tensor, torch.Tensor]) -> None:
        """Steps the optimizer; parameters without a gradient stay as they are.

        Args:
            gradients: by parameter; those of other tensors are ignored.
        """
        # The lock spans the optimizer's code because that is what it is for: nobody else may
        # see, or set, the borrowed fields or the optimizer's state in the meantime.
        with self._grad_fields, _lent(self._parameters(), gradients):
            self.optim.step()

    def _parameters(self) -> list[torch.Tensor]:
        return [p for group in self.optim.param_groups for p in group["params"]]


@contextlib.contextmanager
def _lent(
    parameters: Sequence[torch.Tensor], gradients: Mapping[torch.Tensor, torch.Tensor]
) -> Iterator[None]:
    """Puts the gradients into ``.grad``, and afterwards back what was there."""
    set_aside = [parameter.grad for parameter in parameters]
    try:
        for parameter in parameters:
            parameter.grad = gradients.get(parameter)
        yield
    finally:
        for parameter, gradient in zip(parameters, set_aside, strict=True):
            parameter.grad = gradient


def require_usable_class(optimizer_class: object) -> None:
    """Checks that a class can be made and stepped by a distributed optimizer.

    Raises:
        TypeError: it is no class of optimizers.
        ValueError: its ``step`` insists on a closure.
    """
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, Optimizer)):
        raise TypeError(
            "optimizer_class must be a subclass of torch.optim.Optimizer, but got "
            f"{optimizer_class!r}"
        )
    _, *parameters = inspect.signature(optimizer_class.step).parameters.values()
    needed = [p.name for p in parameters if p.default is p.empty and p.kind not in _VARIADIC]
    if needed:
        raise ValueError(
            f"{optimizer_class.__name__}.step needs {' and '.join(needed)}, to evaluate the loss "
            "again within one step; a distributed optimizer cannot do that, so choose another one"
        )


_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
