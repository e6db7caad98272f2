"""Rows of whole numbers of eight bits with a scale for each row, in versions for readers.

A row is divided by its scale, a 127th of its largest magnitude, and rounded to the nearest whole
number. Each number then reads within half a scale, a 254th of the row's largest magnitude, of what
it was, apart from float32's own rounding. A row of zeros has the scale 0. Infinite numbers count as
the largest finite one; a row with a NaN reads as NaN everywhere.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

SCALE: Final = "scale"
"""The name of the column of scales."""
_MOST: Final = 127
_LARGEST: Final = torch.finfo(torch.float32).max * (1 - 2**-20)
"""127 times its scale is finite, however the scale was rounded."""


def quantised(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rounds rows.

    Args:
        rows: float32, ``(n, dim)``.

    Returns:
        int8, ``(n, dim)``, and the scales, float32, ``(n, 1)``.
    """
    rows = rows.clamp(-_LARGEST, _LARGEST)
    scale = rows.abs().amax(1, keepdim=True) / _MOST
    whole = torch.nan_to_num(rows / scale).round().clamp(-_MOST, _MOST)
    return whole.to(torch.int8), scale


def widened(whole: Tensor, scale: Tensor) -> Tensor:
    """The rows that were rounded, float32, ``(n, dim)``.

    Args:
        whole: int8, ``(n, dim)``.
        scale: float32, ``(n, 1)``.
    """
    return whole.float() * scale
