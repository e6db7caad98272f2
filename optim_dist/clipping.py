"""The norm of gradients that are spread over workers, and clipping by it."""

from __future__ import annotations

from collections.abc import Sequence

import torch


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
