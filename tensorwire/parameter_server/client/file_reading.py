"""Reads files in a data set's ``__iter__``, which may run in a worker process of a ``DataLoader``.

The trainer gives some files at a time to its loader. The data set asks for one after the other and
says how far it has read; whatever makes a batch of records takes these positions along, from the
process that has read them to the trainer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from numbers import Real
from typing import NamedTuple, TypeVar

from torch.utils.data import get_worker_info

from tensorwire.parameter_server.client.positions import decode_position, encode_position
from tensorwire.parameter_server.opaque import UserValue

Record = TypeVar("Record")

Mark = tuple[int, "bytes | None"]
"""The number of a file, and the position that is reached in it; None at its end."""


@dataclass(frozen=True, slots=True)
class FileToRead:
    """A file that is this trainer's.

    Args:
        number: of the file, in all epochs.
        epoch: of it.
        source: as the program gave it.
        position: from where to read on; None from its beginning.
    """

    number: int
    epoch: int
    source: UserValue
    position: bytes | None


class File:
    """One file that a data set is to read. Made by iterating over what ``Cluster.samples`` returns.

    Attributes:
        source: as it was given to ``Cluster.samples``.
        epoch: from 0.
    """

    def __init__(self, told: FileToRead) -> None:
        self.source = told.source
        self.epoch = told.epoch
        self._number = told.number
        self._begin = told.position
        self._position = None if told.position is None else decode_position(told.position)
        self._is_told = False
        self._positions_set = 0
        self._is_over = False

    def __repr__(self) -> str:
        return f"File({self.source!r}, epoch={self.epoch}, position={self._position!r})"

    @property
    def position(self) -> UserValue:
        """The place from which to read on: None at the beginning, else what was set last.

        Set it before each record is yielded, to the place behind that record. Plain data of at
        most 16 KiB; a number must not fall.

        Raises:
            RuntimeError: set when the data set has gone on to another file.
            ValueError: a number that is less than before, or first the place where the reading
                begins, behind which there is no record.
        """
        return self._position

    @position.setter
    def position(self, position: UserValue) -> None:
        if self._is_over:
            raise RuntimeError(
                f"samples: file {self.source!r} is another trainer's, or done: the data set has "
                "gone on to the next file, and cannot set a position in this one"
            )
        if position is None or not self._positions_set:
            self._require_record(position)
        before = self._position
        if isinstance(position, Real) and isinstance(before, Real) and position < before:
            raise ValueError(
                f"samples: position={position!r} in file {self.source!r} is less than "
                f"{before!r}, which it was before"
            )
        self._position, self._is_told = position, True
        self._positions_set += 1

    def _require_record(self, position: UserValue) -> None:
        """Refuses, as the first position, the place where the reading begins.

        A data set that sets it there and then behind each ``yield`` is always one record behind.
        """
        begin = self._begin
        is_begin = position is None or (begin is None and _is_zero(position))
        if begin is not None and not is_begin:
            is_begin = encode_position(position, repr(self.source)) == begin
        if is_begin:
            raise ValueError(
                f"samples: position={position!r} in file {self.source!r} is where the reading of "
                "it begins, and behind no record; set file.position before each yield alone, to "
                "the place behind that record"
            )

    def counted(self, records: Iterable[Record]) -> Iterator[Record]:
        """Yields the records that were not trained yet, and keeps their number as the position.

        Args:
            records: all of the file, always in the same order.

        Raises:
            TypeError: the position that was kept is no number of records.
            RuntimeError: there are fewer records than were trained.
        """
        done = 0 if self._position is None else self._position
        if not isinstance(done, int):
            raise TypeError(
                f"samples: the position in file {self.source!r} is {done!r}, and no number of "
                "records, so that counted() cannot go on from it"
            )
        every = iter(records)
        skipped = sum(1 for _ in islice(every, done))
        if skipped < done:
            raise RuntimeError(
                f"samples: file {self.source!r} has {skipped} records, of which {done} were "
                "trained; it must have the same records in the same order whenever it is read"
            )
        for number, record in enumerate(every, done + 1):
            self.position = number
            yield record


def _is_zero(position: UserValue) -> bool:
    return isinstance(position, Real) and position == 0


class Reading:
    """Some files that a loader reads, until all are read.

    Args:
        files: in order; with worker processes, each of these has its share.
        sampler: the name of the sampler, for errors.
    """

    def __init__(self, files: tuple[FileToRead, ...], sampler: str) -> None:
        self._files = files
        self._sampler = sampler
        self._ended: list[int] = []
        self._current: File | None = None
        self._is_begun = False
        self._records = 0
        """Records in the batches up to now."""
        self._positions_set = 0
        """Positions that were set in the files that have ended."""

    def __iter__(self) -> Iterator[File]:
        """Yields files; the one before ends when the next is asked for.

        Raises:
            RuntimeError: these files are read already.
        """
        if self._is_begun:
            raise RuntimeError(
                f"sampler {self._sampler!r}: the data set iterates over its files a second time; "
                "read each of them once in __iter__, to its end"
            )
        self._is_begun = True
        worker = get_worker_info()
        first, every = (worker.id, worker.num_workers) if worker is not None else (0, 1)
        for told in self._files[first::every]:
            self._current = File(told)
            yield self._current
            self._current._is_over = True
            self._positions_set += self._current._positions_set
            self._ended.append(told.number)
            self._current = None

    def marks(self, records: int) -> tuple[Mark, ...]:
        """The places that the records of the next batch reach.

        Args:
            records: how many it has.

        Raises:
            RuntimeError: nobody has said how far a file was read, or of which records it was, or
                no file was read.
        """
        marks: list[Mark] = [(number, None) for number in self._ended]
        current, self._ended = self._current, []
        if current is not None and current._is_told:
            position = encode_position(current.position, repr(current.source))
            marks.append((current._number, position))
            current._is_told = False
        elif not marks:
            what = "of no file" if current is None else f"of {current!r}, which says no position"
            raise RuntimeError(
                f"sampler {self._sampler!r}: the loader has made a batch {what}; its data set must "
                "iterate over what cluster.samples(files=) has returned, and set file.position, "
                "or take its records from file.counted(records)"
            )
        self._require_positions(records)
        return tuple(marks)

    def _require_positions(self, records: int) -> None:
        """Refuses a batch of which some records came without a position: it would reach less far.

        A data set that sets a position behind each ``yield`` is always one behind.
        """
        self._records += records
        positions = self._positions_set
        positions += 0 if self._current is None else self._current._positions_set
        if positions < self._records:
            raise RuntimeError(
                f"sampler {self._sampler!r}: the data set has yielded {self._records} records and "
                f"set {positions} positions, so that the last records of the batch would be "
                "trained once more by whoever continues the file; set file.position before each "
                "yield, to the place behind that record"
            )


class Marked(NamedTuple):
    """A batch, and the places that it reaches; a loader that pins memory keeps the kind."""

    batch: UserValue
    marks: tuple[Mark, ...]


class Marking:
    """Makes batches as a loader's ``collate_fn`` does, and adds the places that they reach.

    Args:
        reading: what the data set reads, in the process in which this is called.
        collate: the loader's own.
        is_of_many: it is given a list of records, not the one thing that the data set has yielded.
    """

    def __init__(
        self,
        reading: Reading,
        collate: Callable[[UserValue], UserValue],
        is_of_many: bool = True,
    ) -> None:
        self._reading = reading
        self._collate = collate
        self._is_of_many = is_of_many

    def __call__(self, records: UserValue) -> Marked:
        """The batch of some records, and where it ends in its files."""
        count = len(records) if self._is_of_many else 1
        return Marked(self._collate(records), self._reading.marks(count))
