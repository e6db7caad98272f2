"""Files that a data set reads, and the places that its batches reach."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from torch.utils.data import IterableDataset

from tensorwire.parameter_server.client.file_reading import File, FileToRead, Marking, Reading
from tensorwire.parameter_server.client.positions import decode_position, encode_position


class Records(IterableDataset[int]):
    def __init__(self, files: Any) -> None:
        self.files = files

    def __iter__(self) -> Iterator[int]:
        for file in self.files:
            yield from file.counted(range(*file.source))


def _reading() -> Reading:
    begun = encode_position(2, "'a'")
    files = (FileToRead(3, 0, (0, 5), begun), FileToRead(4, 0, (5, 5), None))
    return Reading((*files, FileToRead(7, 1, (8, 9), None)), "a")


def _places(marks: Any) -> list[tuple[int, Any]]:
    return [(file, None if data is None else decode_position(data)) for file, data in marks]


def _take(marking: Marking, records: Iterator[int], count: int) -> tuple[Any, list[Any]]:
    batch, marks = marking([next(records) for _ in range(count)])
    return batch, _places(marks)


def test_batches_tell_the_places_that_they_reach() -> None:
    reading = _reading()
    marking, records = Marking(reading, list), iter(Records(reading))
    assert _take(marking, records, 2) == ([2, 3], [(3, 4)])
    assert _take(marking, records, 2) == ([4, 8], [(3, None), (4, None), (7, 1)])
    assert next(records, None) is None


def test_counted_goes_on_from_a_number_of_records_only() -> None:
    file = File(FileToRead(0, 0, "a", encode_position("here", "'a'")))
    with pytest.raises(TypeError, match="position in file 'a' is 'here', and no number of"):
        next(file.counted([1]))
