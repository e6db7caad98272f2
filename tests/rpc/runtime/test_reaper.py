"""Dead handles are buried on the reaper's thread, and it knows when none is left."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator

import pytest

from rpc.runtime.reaper import Reaper


class Watched:
    """A reaper of numbers, whose burials can be held up."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.may_bury = threading.Event()
        self.quiet_when_told: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self.reaper: Reaper[int] = Reaper("reaper", self.bury, self.buried)

    def bury(self, dead: list[int]) -> None:
        assert self.may_bury.wait(10)
        self.batches.append(dead)

    def buried(self) -> None:
        self.quiet_when_told.put(self.reaper.quiet())


@pytest.fixture
def watched() -> Iterator[Watched]:
    watched = Watched()
    yield watched
    watched.may_bury.set()
    watched.reaper.stop()


def test_it_is_quiet_by_the_time_it_tells_of_the_last_burial(watched: Watched) -> None:
    watched.may_bury.set()
    watched.reaper.start()
    watched.reaper.put(1)
    assert watched.quiet_when_told.get(timeout=10)
    assert watched.batches == [[1]]


def test_it_is_not_quiet_while_anything_is_unburied(watched: Watched) -> None:
    assert watched.reaper.quiet()
    watched.reaper.put(1)
    assert not watched.reaper.quiet()
    watched.reaper.start()
    assert not watched.reaper.quiet()
    watched.may_bury.set()
    assert watched.quiet_when_told.get(timeout=10)


def test_what_died_before_the_start_is_buried_in_one_batch(watched: Watched) -> None:
    watched.may_bury.set()
    for number in range(5):
        watched.reaper.put(number)
    watched.reaper.start()
    assert watched.quiet_when_told.get(timeout=10)
    assert watched.batches == [[0, 1, 2, 3, 4]]


def test_handles_that_die_on_many_threads_are_all_counted(watched: Watched) -> None:
    watched.may_bury.set()
    watched.reaper.start()
    threads = [
        threading.Thread(target=lambda: [watched.reaper.put(n) for n in range(200)])
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    while not watched.reaper.quiet():
        watched.quiet_when_told.get(timeout=10)
    assert sum(map(len, watched.batches)) == 800
