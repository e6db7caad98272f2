"""Has a loader read files, and finds out which places its batches reach.

A ``DataLoader`` reads many files at a time; its data set says how far it is in each. A loader with
a state of its own reads one at a time, and its state is the position. A ``StatefulDataLoader`` of
torchdata counts as such if its data set has a state: otherwise it would go on by reading what was
trained once more, and counts it twice in its next state (seen with torchdata 0.11).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Final, Protocol, runtime_checkable

from torch.utils.data import DataLoader, IterableDataset

from tensorwire.parameter_server.client.file_reading import (
    FileToRead,
    Mark,
    Marked,
    Marking,
    Reading,
)
from tensorwire.parameter_server.client.positions import decode_position, encode_position
from tensorwire.parameter_server.declarations.arguments import instance
from tensorwire.parameter_server.opaque import UserValue

_AT_ONCE: Final = 64
"""Files that are given to a ``DataLoader`` before it begins anew."""


@runtime_checkable
class Stateful(Protocol):
    """A loader that can tell where it is, and go on from there."""

    def state_dict(self) -> object:
        """Returns the place that it has reached."""

    def load_state_dict(self, state: object) -> None:
        """Makes the next ``iter`` go on from there."""


class FileLoader(ABC):
    """Reads files with a loader of the program.

    Args:
        sampler: the name of the sampler, for errors.
        offer: is given the files that the data set is to read.

    Attributes:
        at_once: files that it can be given at a time.
        least: files at a time that keep it busy.
    """

    at_once = 1
    least = 1

    def __init__(self, sampler: str, offer: Callable[[Reading], object]) -> None:
        self._sampler = sampler
        self._offer = offer

    @abstractmethod
    def read(self, files: tuple[FileToRead, ...]) -> Iterator[tuple[UserValue, tuple[Mark, ...]]]:
        """Yields the batches of some files, and the places that they reach."""


class ByWorkers(FileLoader):
    """Reads with a ``DataLoader`` of a data set that sets positions.

    Args:
        sampler: see :class:`FileLoader`.
        offer: likewise.
        loader: the loader.
    """

    at_once = _AT_ONCE

    def __init__(
        self, sampler: str, offer: Callable[[Reading], object], loader: DataLoader[object]
    ) -> None:
        super().__init__(sampler, offer)
        self._loader = loader
        self.least = max(1, loader.num_workers)

    def read(self, files: tuple[FileToRead, ...]) -> Iterator[tuple[UserValue, tuple[Mark, ...]]]:
        """See :class:`FileLoader`."""
        reading, collate = Reading(files, self._sampler), self._loader.collate_fn
        self._offer(reading)
        self._loader.collate_fn = Marking(
            reading, collate, is_of_many=self._loader.batch_sampler is not None
        )
        try:
            batches = iter(self._loader)
        finally:
            self._loader.collate_fn = collate
        for marked in batches:
            if not isinstance(marked, Marked):
                raise RuntimeError(
                    f"sampler {self._sampler!r}: the loader {self._loader!r} yields a "
                    f"{type(marked).__name__} that its collate_fn has not made, so nobody can tell "
                    "which records are in it; what a batch needs to become belongs into "
                    "collate_fn, or into the loop over data.track(loader)"
                )
            batch, marks = marked
            yield batch, tuple((number, position) for number, position in marks)


class ByState(FileLoader):
    """Reads one file at a time with a loader that has a state.

    Args:
        sampler: see :class:`FileLoader`.
        offer: likewise.
        loader: the loader.
    """

    def __init__(
        self, sampler: str, offer: Callable[[Reading], object], loader: Iterable[object]
    ) -> None:
        super().__init__(sampler, offer)
        self._loader = loader

    def read(self, files: tuple[FileToRead, ...]) -> Iterator[tuple[UserValue, tuple[Mark, ...]]]:
        """See :class:`FileLoader`."""
        (file,) = files
        assert isinstance(self._loader, Stateful)
        self._offer(Reading((replace(file, position=None),), self._sampler))
        if file.position is not None:
            self._loader.load_state_dict(decode_position(file.position))
        for batch in self._loader:
            position = encode_position(self._loader.state_dict(), repr(file.source))
            yield batch, ((file.number, position),)


def file_loader(
    loader: Iterable[object], sampler: str, offer: Callable[[Reading], object]
) -> FileLoader:
    """The kind that fits a loader.

    Args:
        loader: the program's.
        sampler: see :class:`FileLoader`.
        offer: likewise.

    Raises:
        TypeError: it cannot be iterated over, or nobody could say how far its batches reach.
        ValueError: it would leave records out, or keep files that it was given before.
    """
    instance("track", "loader", loader, Iterable, "a DataLoader")
    if getattr(loader, "drop_last", False):
        raise ValueError(
            "track: the loader was made with drop_last=True, so that the last records of files "
            "would not be trained; use drop_last=False"
        )
    if getattr(loader, "persistent_workers", False):
        raise ValueError(
            "track: the loader was made with persistent_workers=True, so that its workers would "
            "not get to know their next files; use persistent_workers=False"
        )
    of_torch = loader if isinstance(loader, DataLoader) else None
    if isinstance(loader, Stateful) and (
        of_torch is None or isinstance(of_torch.dataset, Stateful)
    ):
        return ByState(sampler, offer, loader)
    if of_torch is not None and isinstance(of_torch.dataset, IterableDataset):
        return ByWorkers(sampler, offer, of_torch)
    raise TypeError(
        f"track: nobody can tell how far the batches of loader={loader!r} reach in their files; "
        "give a DataLoader of an IterableDataset that iterates over what cluster.samples(files=) "
        "has returned, or a loader with state_dict() and load_state_dict(), such as torchdata's "
        "StatefulDataLoader (pip install tensorwire[data]) of a data set with these methods"
    )
