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
                file.position = each + 1


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


def test_counted_notices_that_records_are_gone() -> None:
    file = File(FileToRead(0, 0, "a", encode_position(3, "'a'")))
    assert list(file.counted(range(3))) == []
    with pytest.raises(RuntimeError, match="file 'a' has 2 records, of which 3 were trained"):
        next(file.counted(range(2)))


class Early(Records):
    """Sets where each file begins, behind a header, and then the position behind each ``yield``."""

    header = 0

    def __iter__(self) -> Iterator[int]:
        for file in self.files:
            file.position = first = file.position or self.header
            for each in range(first, file.source[1]):
                yield each
                file.position = each + 1


def test_a_position_that_is_set_before_the_first_record_is_noticed() -> None:
    """At once, or where a file has a header, as soon as somebody goes on in it."""
    said = "in file .0, 9. is where the reading of it begins, and behind no record"
    with pytest.raises(ValueError, match=f"position=0 {said}"):
        next(iter(Early(Reading((FileToRead(0, 0, (0, 9), None),), "a"))))
    reading = Reading((FileToRead(0, 0, (0, 9), None),), "a")
    data = Early(reading)
    data.header = 4
    _, marks = _take(Marking(reading, list), iter(data), 2)
    assert marks == [(0, 5)]  # one behind, which the next to read the file cannot miss
    again = FileToRead(0, 0, (0, 9), encode_position(5, "'a'"))
    with pytest.raises(ValueError, match=f"position=5 {said}"):
        next(iter(Early(Reading((again,), "a"))))


@pytest.mark.parametrize("kept", [None, 5])
def test_a_position_does_not_go_back_to_the_beginning(kept: int | None) -> None:
    file = File(FileToRead(0, 0, "a", kept and encode_position(kept, "'a'")))
    file.position = 6
    file.position = 6  # as of a record that was left out
    with pytest.raises(ValueError, match="position=None in file 'a' is where the reading"):
        file.position = None
