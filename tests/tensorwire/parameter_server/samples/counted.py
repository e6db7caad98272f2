"""Samples that are counted, for processes: batches of indices, and records of files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from tensorwire import parameter_server as ps

SAMPLES = 400
EPOCHS = 2
_FILE = 57
"""Records of a file, but for the last."""


class Records(IterableDataset[int]):
    """The ids of the records of files, each of which is a range of them."""

    def __init__(self, files: Any) -> None:
        self.files = files

    def __iter__(self) -> Iterator[int]:
        for file in self.files:
            yield from file.counted(range(*file.source))


def batches(cluster: ps.Cluster) -> Iterable[Tensor]:
    """Batches of the indices of all samples."""
    data = cluster.samples(SAMPLES, batch_size=4, shuffle=True, seed=3, epochs=EPOCHS)
    return data.track(DataLoader(range(SAMPLES), batch_sampler=data))


def records(cluster: ps.Cluster) -> Iterable[Tensor]:
    """Batches of records of files."""
    begins = range(0, SAMPLES, _FILE)
    files = [(begin, min(begin + _FILE, SAMPLES)) for begin in begins]
    data = cluster.samples(files=files, shuffle=True, seed=3, epochs=EPOCHS)
    return data.track(DataLoader(Records(data), batch_size=4))
