"""Generated clicks: who saw which item, where and when, and who clicked.

Users and items have tastes, vectors that nobody sees; the more a user's and an item's agree, the
likelier is a click. So the true chance of each click is known, and with it the largest area under
the ROC curve that any model can reach: the yardstick of this tutorial.

Ids are as in real logs: numbers from all over int64, few of them often, most of them rarely.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from tensorwire import parameter_server as ps

SIZES: Final = {"user": 5000, "item": 2000, "place": 50, "hour": 24}
"""The number of different ids that each field has. The model does not know."""

NUMBERS: Final = 4
"""The count of numbers known besides, such as prices and ages."""

_TASTES: Final = 4


@dataclass(frozen=True, slots=True)
class Batch:
    """Some impressions.

    Args:
        ids: by field, one id for each impression: ``(n, 1)``.
        numbers: ``(n, NUMBERS)``.
        clicked: 1 or 0.
        chance: the true chance of each click, which no model sees.
        page: number of the batch: ``(1,)``.
    """

    ids: dict[str, Tensor]
    numbers: Tensor
    clicked: Tensor
    chance: Tensor
    page: Tensor


class World:
    """The source of impressions.

    Args:
        seed: of everything in it.
    """

    def __init__(self, seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        self._seed = seed
        self._tastes = [torch.randn(SIZES[who], _TASTES, generator=draw) for who in SIZES][:2]
        self._habits = [0.4 * torch.randn(size, generator=draw) for size in SIZES.values()]
        self._effects = 0.4 * torch.randn(NUMBERS, generator=draw)
        self._ids = [
            torch.randint(-(1 << 62), 1 << 62, (size,), generator=draw) for size in SIZES.values()
        ]
        self._weights = [torch.arange(1.0, size + 1) ** -0.8 for size in SIZES.values()]

    def batch(self, number: int, size: int) -> Batch:
        """Draws a batch, the same one for the same number.

        Args:
            number: of the batch; use negative ones to test.
            size: how many impressions.
        """
        draw = torch.Generator().manual_seed(hash((self._seed, number)) % (1 << 62))
        places = [torch.multinomial(each, size, True, generator=draw) for each in self._weights]
        numbers = torch.randn(size, NUMBERS, generator=draw)
        users, items = places[:2]
        agreement = (self._tastes[0][users] * self._tastes[1][items]).sum(1)
        habits = sum(habit[each] for habit, each in zip(self._habits, places, strict=True))
        chance = torch.sigmoid(0.8 * agreement + habits + numbers @ self._effects - 1)
        ids = {
            field: names[each].unsqueeze(1)
            for field, names, each in zip(SIZES, self._ids, places, strict=True)
        }
        clicked = torch.bernoulli(chance, generator=draw)
        return Batch(ids, numbers, clicked, chance, torch.tensor([number]))

    def batches(self, trainer: int, trainers: int, steps: int, size: int) -> Iterator[Batch]:
        """One trainer's share of all batches.

        Args:
            trainer: its number.
            trainers: how many there are.
            steps: how many batches each gets.
            size: of each.
        """
        for step in range(steps):
            yield self.batch(step * trainers + trainer, size)


class Log(Dataset[Batch]):
    """The log of a world, page by page; a page is a batch.

    Args:
        world: what is logged.
        pages: how many there are.
        size: impressions on each.
    """

    def __init__(self, world: World, pages: int, size: int) -> None:
        self._world = world
        self._pages = pages
        self._size = size

    def __len__(self) -> int:
        return self._pages

    def __getitem__(self, number: int) -> Batch:
        return self._world.batch(number, self._size)


class LogFiles(IterableDataset[Batch]):
    """The log of a world in files, each of which is a range of pages.

    Args:
        world: what is logged.
        files: of ``Cluster.samples``, which says which this trainer reads, and from where on.
        size: impressions on each page.
    """

    def __init__(self, world: World, files: ps.Files, size: int) -> None:
        self._world = world
        self._files = files
        self._size = size

    def __iter__(self) -> Iterator[Batch]:
        for file in self._files:
            for number in file.counted(range(*file.source)):
                yield self._world.batch(number, self._size)


def area_under_curve(score: Tensor, clicked: Tensor) -> float:
    """The chance that an impression with a click has a higher score than one without.

    Args:
        score: higher for likelier clicks.
        clicked: 1 or 0.
    """
    order = torch.argsort(score)
    rank = torch.empty(len(order), dtype=torch.float64)
    rank[order] = torch.arange(1.0, len(order) + 1, dtype=torch.float64)
    clicks = clicked > 0.5
    yes, no = int(clicks.sum()), int((~clicks).sum())
    return (rank[clicks].sum().item() - yes * (yes + 1) / 2) / (yes * no)
