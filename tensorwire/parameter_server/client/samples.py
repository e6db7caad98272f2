"""A sampler of batches of which each sample counts once, whoever dies, joins or leaves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Final

import numpy as np
from torch.utils.data import Sampler

from tensorwire.parameter_server.client.assignment import assignment
from tensorwire.parameter_server.client.counted import Counted
from tensorwire.parameter_server.client.permutation import Permutation
from tensorwire.parameter_server.client.tracking import Tracked, TrackedBatches
from tensorwire.parameter_server.declarations.arguments import instance
from tensorwire.parameter_server.declarations.samplers import SamplerSpec

if TYPE_CHECKING:
    from tensorwire.parameter_server.client.cluster import Cluster

_MOST_BATCHES: Final = 32
_MOST_SAMPLES: Final = 1 << 16
"""Batches and samples whose indices are computed together."""


@dataclass(frozen=True, slots=True)
class Position:
    """The place of a batch among all.

    Args:
        number: of the batch, counted over all epochs.
        epoch: its epoch.
        first: the first of its samples, in the order of the epoch.
        count: its samples.
    """

    number: int
    epoch: int
    first: int
    count: int


class Samples(Counted, Sampler[list[int]]):
    """Batches of indices, for ``DataLoader(batch_sampler=...)``. Made by ``Cluster.samples``.

    All trainers together go through the epochs once. Servers keep the account of the batches
    whose pushes are part of the state; it goes back, and is restored, with everything else.

    Args:
        cluster: the cluster.
        spec: what all trainers have agreed about.
        rank: this trainer's, if the assignment is static.
    """

    def __init__(self, cluster: Cluster, spec: SamplerSpec, rank: int = 0) -> None:
        Counted.__init__(self, cluster, spec, rank)
        self._tracked: TrackedBatches | None = None
        self._permutations: dict[int, Permutation] = {}

    def __repr__(self) -> str:
        return f"Samples({self.spec})"

    def __iter__(self) -> Iterator[list[int]]:
        """Yields indices of samples; for a loader that is tracked.

        Raises:
            RuntimeError: the loader is not tracked, so that nobody would know what was trained.
        """
        if self._tracked is None or not self._tracked.admits_a_reader():
            raise RuntimeError(
                f"sampler {self.spec.name!r}: iterate over data.track(loader), not over the "
                "loader, so that it is known which samples were trained"
            )
        return _Reading(self._tracked)

    def _offer(self, tracked: TrackedBatches) -> None:
        """Has iterations that begin from now on be those of one loop."""
        self._tracked = tracked

    def track(self, loader: Iterable[object]) -> Tracked:
        """The batches of a loader, each of which counts as trained with the next push.

        Yields this trainer's batches until all samples are trained, those of trainers that died
        included. While others have batches and this trainer has none it makes empty steps. After
        ``RolledBack``, which ``optimizer.step()`` raises, go on with the loop: it gets the
        dense parameters as they were there, and yields what is not trained from there on.

        Args:
            loader: a ``DataLoader`` whose ``batch_sampler`` this is.

        Returns:
            An iterable, for ``for`` or :func:`prefetch`.

        Raises:
            TypeError: it cannot be iterated over.
            ValueError: it has another batch sampler, or does not keep the order of batches.
        """
        instance("track", "loader", loader, Iterable, "a DataLoader")
        if getattr(loader, "batch_sampler", None) is not self:
            raise ValueError(
                f"track: the loader's batch_sampler is {getattr(loader, 'batch_sampler', None)!r}, "
                f"not this {self!r}; use DataLoader(dataset, batch_sampler=data)"
            )
        if not getattr(loader, "in_order", True):
            raise ValueError("track: the loader was made with in_order=False, so that it is not "
                             "known which batch is which; use in_order=True")  # fmt: skip
        assigned = assignment(self._cluster, self.spec, self._window, self._rank)
        many = max(1, min(_MOST_BATCHES, _MOST_SAMPLES // self.spec.batch_size))
        return TrackedBatches(
            self._cluster, self.spec.name, assigned, loader, self._indices_of, many, self._offer
        )

    @property
    def position(self) -> Position | None:
        """The place of the batch that :meth:`track` gave out last; None before the first."""
        number = -1 if self._tracked is None else self._tracked.last
        return None if number < 0 else Position(number, *self.spec.place_of(number))

    def _indices_of(self, numbers: list[int]) -> list[list[int]]:
        """The indices of the samples of some batches."""
        if not self.spec.shuffle:
            every = [self.spec.place_of(number) for number in numbers]
            return [list(range(first, first + count)) for _, first, count in every]
        batches: list[list[int]] = []
        for epoch, places in _by_epoch(self.spec, numbers):
            positions = [np.arange(first, first + count) for first, count in places]
            indices = self._order(epoch)(np.concatenate(positions)).tolist()
            ends = accumulate([count for _, count in places], initial=0)
            batches += [indices[begin:end] for begin, end in pairwise(ends)]
        return batches

    def _order(self, epoch: int) -> Permutation:
        if epoch not in self._permutations:
            order = Permutation(self.spec.length, self.spec.seed, epoch)
            self._permutations = {epoch: order}
        return self._permutations[epoch]


class _Reading:
    """The indices that a loader reads; may go on after it has ended, as more was given out."""

    def __init__(self, tracked: TrackedBatches) -> None:
        self._tracked = tracked

    def __iter__(self) -> Iterator[list[int]]:
        return self

    def __next__(self) -> list[int]:
        return self._tracked.next_indices()


def _by_epoch(spec: SamplerSpec, numbers: list[int]) -> Iterator[tuple[int, list[tuple[int, int]]]]:
    """First position and samples of each batch, those of one epoch together."""
    epoch, places = -1, list[tuple[int, int]]()
    for number in numbers:
        own, first, count = spec.place_of(number)
        if own != epoch and places:
            yield epoch, places
            places = []
        epoch = own
        places.append((first, count))
    if places:
        yield epoch, places
