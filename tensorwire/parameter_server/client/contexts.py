"""Steps within a context of distributed autograd, whose backward passes leave ``grad`` as it is."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

import autograd_dist
from autograd_dist.contexts import current_context_id


def require_gradients_here(name: str, parameters: Sequence[Tensor]) -> None:
    """Refuses a step whose gradients are in the context that this runs in, and not in ``grad``.

    Args:
        name: of the dense parameters.
        parameters: that servers move with their ``grad``.

    Raises:
        RuntimeError: the context has a gradient of a parameter that has none itself.
    """
    context_id = current_context_id()
    if context_id is None:
        return
    held = autograd_dist.get_gradients(context_id)
    for place, parameter in enumerate(parameters):
        if parameter.grad is None and parameter in held:
            raise RuntimeError(
                f"parameter {place} of {name!r} has no grad, as autograd_dist.backward leaves "
                "gradients in its context; before the step, say: for parameter, grad in "
                "autograd_dist.get_gradients(context_id).items(): parameter.grad = grad"
            )
