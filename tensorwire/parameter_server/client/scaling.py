"""Refuses gradients that a ``GradScaler`` has scaled where nobody can take the scale out again."""

from __future__ import annotations

import gc
from typing import Final

import torch

NOT_WITH_BACKWARD: Final = (
    "GradScaler: with pushing=ps.Pushing.BACKWARD gradients leave as soon as they are there, with "
    "their scale; use ps.Pushing.STEP, or bfloat16, which needs no scaler"
)


class Watch:
    """Looks, once, for a scaler that has scaled a loss."""

    def __init__(self) -> None:
        self._has_looked = False

    def require_plain(self) -> None:
        """Checks the first gradient; to be called with it.

        Raises:
            ValueError: there is such a scaler in this process.
        """
        if self._has_looked:
            return
        if any(map(_has_scaled, gc.get_objects())):
            raise ValueError(NOT_WITH_BACKWARD)
        self._has_looked = True


def _has_scaled(each: object) -> bool:
    is_scaler = issubclass(type(each), torch.amp.GradScaler)
    # It makes the tensor with its scale when it scales its first loss.
    return is_scaler and getattr(each, "_scale", None) is not None
