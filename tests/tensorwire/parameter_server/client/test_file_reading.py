"""Files that a data set reads, and the places that its batches reach."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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


class Late(Records):
    """Sets the position behind each ``yield``."""

    def __iter__(self) -> Iterator[int]:
        for file in self.files:
            for each in range(*file.source):
                yield each
                file.position = each


class Each(Records):
    """Yields what is in each file as one record, whose position nobody needs."""

    def __iter__(self) -> Iterator[int]:
        for file in self.files:
            yield file.source[0]


def _some_times(reading: Reading, times: Callable[[int], int]) -> Iterator[int]:
    """Makes no, one or several records of each record of a file."""
    for file in reading:
        for each in file.counted(range(*file.source)):
            yield from [each] * times(each)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("kind", [Late, Each])
def test_positions_that_are_set_late_or_never_are_noticed_with_the_first_batch(
    kind: type[Records], size: int
) -> None:
    files = tuple(FileToRead(n, 0, (n * 10, n * 10 + 3), None) for n in range(6))
    reading = Reading(files, "a")
    with pytest.raises(RuntimeError, match=r"set file\.position") as caught:
        _take(Marking(reading, list), iter(kind(reading)), size)
    if size > 1:
        set_in_time = size - 1 if kind is Late else 0
        said = f"yielded {size} records and set {set_in_time} positions"
        assert said in str(caught.value)


def test_a_batch_may_leave_records_out_and_not_have_several_of_one_place() -> None:
    files = (FileToRead(0, 0, (0, 40), None),)
    reading = Reading(files, "a")
    marking, records = Marking(reading, list), _some_times(reading, lambda each: each % 2)
    assert _take(marking, records, 2) == ([1, 3], [(0, 4)])
    assert _take(marking, records, 2) == ([5, 7], [(0, 8)])
    reading = Reading(files, "a")
    with pytest.raises(RuntimeError, match="yielded 3 records and set 2 positions"):
        _take(Marking(reading, list), _some_times(reading, lambda _: 2), 3)


def test_a_data_set_may_make_the_batches() -> None:
    reading = Reading((FileToRead(0, 0, (0, 40), None),), "a")
    record = next(iter(Records(reading)))
    assert _places(Marking(reading, list, is_of_many=False)([record, record]).marks) == [(0, 1)]


def test_counted_goes_on_from_a_number_of_records_only() -> None:
    file = File(FileToRead(0, 0, "a", encode_position("here", "'a'")))
    with pytest.raises(TypeError, match="position in file 'a' is 'here', and no number of"):
        next(file.counted([1]))
