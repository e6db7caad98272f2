"""The norm of gradients that are spread over workers, and clipping by it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

import autograd_dist
import rpc
from optim_dist.failures import from_each


def clip_grad_norm_(
    context_id: int,
    params_rref: Iterable[rpc.RRef[Any]],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """Clips the gradients in an autograd context by their norm over all owners.

    As ``torch.nn.utils.clip_grad_norm_``; call it between the backward pass and the step.

    Args:
        context_id: of the context that the backward pass ran in.
        params_rref: references to the parameters, owned by any number of workers.
        max_norm: gradients are scaled such that their norm is no more than this.
        norm_type: which norm.
        error_if_nonfinite: raise an error if the norm is infinite or no number.

    Returns:
        The norm of all gradients together, before they were clipped.

    Raises:
        RuntimeError: the norm is infinite or no number, and ``error_if_nonfinite`` is set;
            there is no such context; or ``backward_and_step()`` stepped in it.

    Example::

        autograd_dist.backward(context_id, [loss])
        optim_dist.clip_grad_norm_(context_id, model.remote_parameters(), 1.0)
        optimizer.step(context_id)
    """
    if autograd_dist._retrieve_context(context_id).sequels:
        raise RuntimeError(
            f"the gradients of context {context_id} were used by backward_and_step() already; to "
            "clip them, call backward(), clip_grad_norm_() and step()"
        )
    by_owner: dict[rpc.WorkerInfo, list[tuple[int, rpc.RRef[Any]]]] = {}
    for position, rref in enumerate(params_rref):
        by_owner.setdefault(rref.owner(), []).append((position, rref))
    by_position: dict[int, torch.Tensor] = {}
    for norms in from_each(
        "measuring gradients",
        by_owner,
        lambda owner: rpc.rpc_async(owner, _norms, (context_id, by_owner[owner], norm_type)),
    ):
        by_position.update(norms)
    total = total_norm(
        [by_position[each] for each in sorted(by_position)], norm_type, error_if_nonfinite
    )
    factor = float((max_norm / (total + 1e-6)).clamp(max=1.0))
    from_each(
        "clipping gradients",
        by_owner,
        lambda owner: rpc.rpc_async(owner, _scale, (context_id, by_owner[owner], factor)),
    )
    return total


def total_norm(
    norms: Sequence[torch.Tensor], norm_type: float, error_if_nonfinite: bool
) -> torch.Tensor:
    """The norm of all gradients together, from the norm of each.

    Computed as ``torch.nn.utils.get_total_norm`` does, from norms of the same kind.

    Raises:
        RuntimeError: it is infinite or no number, and ``error_if_nonfinite`` is set.
    """
    total = torch.tensor(0.0)
    if norms:
        total = torch.linalg.vector_norm(torch.stack(list(norms)), norm_type)
    if error_if_nonfinite and not torch.isfinite(total):
        raise RuntimeError(
            f"The total norm of order {norm_type} for gradients is non-finite, so it cannot be "
            "clipped. To disable this error and scale the gradients by the non-finite norm "
            "anyway, set error_if_nonfinite=False"
        )
    return total


# At the owners


def _norms(
    context_id: int, parameters: Sequence[tuple[int, rpc.RRef[Any]]], norm_type: float
) -> dict[int, torch.Tensor]:
    """The norm of each parameter's gradient, by its position; of those that have one."""
    gradients = autograd_dist.get_gradients(context_id)
    norms = {}
    for position, rref in parameters:
        gradient = gradients.get(rref.local_value())
        if gradient is not None:
            values = gradient.coalesce().values() if gradient.is_sparse else gradient
            norms[position] = torch.linalg.vector_norm(values, norm_type).cpu()
    return norms


def _scale(context_id: int, parameters: Sequence[tuple[int, rpc.RRef[Any]]], factor: float) -> None:
    """Multiplies the parameters' gradients, in place."""
    gradients = autograd_dist.get_gradients(context_id)
    unique = {id(rref.local_value()): rref.local_value() for _, rref in parameters}
    for parameter in unique.values():
        gradient = gradients.get(parameter)
        if gradient is not None:
            gradient.mul_(factor)
