"""The ``.grad`` of leaves, used for a while for what others must not see there."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

import torch

_grad_of = attrgetter("grad")


class BorrowedGrads:
    """Leaves with their ``.grad`` set aside inside a block, put back whatever happens.

    Args:
        leaves: whose; nobody else uses their ``.grad`` meanwhile, which is the owner's to see to.
    """

    def __init__(self, leaves: Sequence[torch.Tensor]) -> None:
        self._leaves = leaves
        self._set_aside: list[torch.Tensor | None] = []

    def __enter__(self) -> BorrowedGrads:
        self._set_aside = list(map(_grad_of, self._leaves))
        for leaf in self._leaves:
            leaf.grad = None
        return self

    def take(self) -> list[torch.Tensor | None]:
        """Takes what accumulated in the meantime."""
        taken = list(map(_grad_of, self._leaves))
        for leaf in self._leaves:
            leaf.grad = None
        return taken

    def __exit__(self, *_: object) -> None:
        errors: list[RuntimeError] = []
        for leaf, gradient in zip(self._leaves, self._set_aside, strict=True):
            try:
                leaf.grad = gradient
            except RuntimeError as error:  # the leaf has another dtype, or shape, than before
                errors.append(error)
        if errors:
            raise errors[0]
