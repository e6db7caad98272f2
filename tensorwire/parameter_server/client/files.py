"""Files of which each record counts once, whoever dies, joins or leaves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from tensorwire.parameter_server.client.assignment import assignment
from tensorwire.parameter_server.client.counted import Counted
from tensorwire.parameter_server.client.file_loading import file_loader
from tensorwire.parameter_server.client.file_reading import File, Reading
from tensorwire.parameter_server.client.file_tracking import TrackedFiles
from tensorwire.parameter_server.client.permutation import Permutation
from tensorwire.parameter_server.client.tracking import Tracked
from tensorwire.parameter_server.declarations.samplers import SamplerSpec

if TYPE_CHECKING:
    from tensorwire.parameter_server.client.cluster import Cluster


class Files(Counted):
    """Files for an ``IterableDataset``. Made by ``Cluster.samples(files=...)``.

    A data set iterates over this in its ``__iter__``, and gets one :class:`File` after the other
    that is this trainer's, and this ``DataLoader`` worker's if there are several. Servers keep the
    account of what was trained: of the files that are done, and of the position in each that is
    begun.

    Args:
        cluster: the cluster.
        spec: what all trainers have agreed about.
        sources: the files.
        rank: this trainer's, if the assignment is static.
    """

    def __init__(
        self, cluster: Cluster, spec: SamplerSpec, sources: Sequence[object], rank: int = 0
    ) -> None:
        super().__init__(cluster, spec, rank)
        self._sources = sources
        self._reading: Reading | None = None

    def __repr__(self) -> str:
        return f"Files({self.spec})"

    def __iter__(self) -> Iterator[File]:
        """Yields files that this trainer is to read; for a data set whose loader is tracked.

        Raises:
            RuntimeError: the loader is not tracked, so that nobody would know what was trained;
                or these files are read already.
        """
        return iter(self._offered())

    def __reduce__(self) -> tuple[object, ...]:
        """Pickles what a loader's worker process needs: only the files that it is to read."""
        return _same, (self._offered(),)

    def _offered(self) -> Reading:
        if self._reading is None:
            raise RuntimeError(
                f"sampler {self.spec.name!r}: iterate over data.track(loader), not over the loader "
                "or its data set, so that it is known which records were trained"
            )
        return self._reading

    def track(self, loader: Iterable[object]) -> Tracked:
        """The batches of a loader, each of which counts as trained with the next push.

        Yields this trainer's batches until all files are trained, those of trainers that died
        included, from where the last push that is part of the state has left off. While others
        have files and this trainer has none it makes empty steps. After ``RolledBack``, which
        ``optimizer.step()`` raises, go on with the loop: it gets the dense parameters as they were
        there, and yields what is not trained from there on.

        Args:
            loader: a ``DataLoader`` of an ``IterableDataset`` that iterates over this and says
                how far it is (:attr:`File.position`, :meth:`File.counted`), with any number of
                workers; or a loader with ``state_dict`` and ``load_state_dict``, such as
                torchdata's ``StatefulDataLoader`` of a data set that has these methods, too. It
                gets one file at a time: its state after a batch is the position.

        Returns:
            An iterable, for ``for`` or :func:`prefetch`.

        Raises:
            TypeError: it cannot be iterated over, or nobody could say how far its batches reach.
            ValueError: it drops last batches, or has workers that outlive an iteration.
        """
        reader = file_loader(loader, self.spec.name, self._offer)
        assigned = assignment(self._cluster, self.spec, self._window, self._rank, reader.least)
        return TrackedFiles(
            self._cluster, self.spec.name, assigned, self._window, reader, self._source
        )

    def _offer(self, reading: Reading) -> None:
        self._reading = reading

    def _source(self, number: int) -> tuple[int, object]:
        """The epoch of a file, and the file."""
        epoch, place, _ = self.spec.place_of(number)
        if self.spec.shuffle:
            order = Permutation(self.spec.length, self.spec.seed, epoch)
            place = int(order(np.array([place]))[0])
        return epoch, self._sources[place]


def _same(reading: Reading) -> Reading:
    return reading
