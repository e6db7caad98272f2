"""A DLRM: rows of tables and a small net for numbers meet pair by pair. Nothing distributed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tutorials.parameter_server.clicks import NUMBERS


class DLRM(nn.Module):
    """Guesses clicks, after "Deep Learning Recommendation Model", Naumov and others, 2019.

    Args:
        bags: gives each field of an impression a vector; its ``values()`` are those of all fields
            side by side.
        fields: how many there are.
        dim: length of these vectors.
    """

    def __init__(self, bags: nn.Module, fields: int, dim: int) -> None:
        super().__init__()
        self.bags = bags
        count = fields + 1
        self._dim = dim
        self._first, self._second = torch.triu_indices(count, count, 1)
        self.bottom = nn.Sequential(nn.Linear(NUMBERS, 32), nn.ReLU(), nn.Linear(32, dim))
        self.top = nn.Sequential(
            nn.Linear(count * dim + len(self._first), 64), nn.ReLU(), nn.Linear(64, 1)
        )

    def forward(self, ids: Mapping[str, Tensor], numbers: Tensor) -> Tensor:
        """Returns the log-odds of a click for each impression."""
        found: Any = self.bags(ids)
        vectors = found.values().unflatten(1, (-1, self._dim))
        every = torch.cat((self.bottom(numbers).unsqueeze(1), vectors), 1)
        agreement = torch.bmm(every, every.transpose(1, 2))[:, self._first, self._second]
        odds: Tensor = self.top(torch.cat((every.flatten(1), agreement), 1))
        return odds.squeeze(1)
