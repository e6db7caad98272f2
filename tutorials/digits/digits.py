"""The data and the network: 8x8 scanned digits and a small convolutional classifier.

Nothing here knows that training is distributed. scikit-learn ships the 1 797
scans inside its package, so nothing is downloaded.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

_BRIGHTEST_PIXEL = 16.0
_TEST_SHARE = 0.2


@dataclass(frozen=True, slots=True)
class Digits:
    """Images of shape ``(count, 1, 8, 8)`` in 0..1, and the digit each one shows."""

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def shard(self, index: int, count: int) -> Digits:
        """Return every ``count``-th scan, beginning with number ``index``."""
        return Digits(self.images[index::count].clone(), self.labels[index::count].clone())


def load(seed: int) -> tuple[Digits, Digits]:
    """Return the scans, shuffled by ``seed`` and split into a training and a test set."""
    from sklearn.datasets import load_digits  # only the server loads the data

    scans = load_digits()
    images = torch.tensor(scans.images, dtype=torch.float32).unsqueeze(1) / _BRIGHTEST_PIXEL
    labels = torch.tensor(scans.target, dtype=torch.int64)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    test, training = order.tensor_split([int(len(order) * _TEST_SHARE)])
    return Digits(images[training], labels[training]), Digits(images[test], labels[test])


def network() -> nn.Module:
    """Return an untrained classifier: two convolutions and a linear layer, 6 090 weights."""
    return nn.Sequential(
        nn.Conv2d(1, 16, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 2 * 2, 10),
    )
