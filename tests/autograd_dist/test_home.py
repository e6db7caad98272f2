"""``autograd_dist.home``: one thread does the work of a pass, and sleeps in between."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from autograd_dist.home import Home
from rpc import extend
from rpc.extend import Worker
from rpc.testing import as_worker, local_group
from tests import waiting

SECONDS = 10.0


def on_another_thread(*deeds: Callable[[], None]) -> None:
    def act() -> None:
        for deed in deeds:
            deed()

    thread = threading.Thread(target=act)
    thread.start()
    thread.join(SECONDS)
    assert not thread.is_alive()


@pytest.fixture
def worker() -> Iterator[Worker]:
    with local_group("alone") as (agent,), as_worker(agent):
        yield extend.worker()


@pytest.fixture
def home(worker: Worker) -> Home[str]:
    return Home(worker)


def test_what_others_leave_is_done_here_in_order_until_the_result(home: Home[str]) -> None:
    done: list[tuple[int, int]] = []

    def work(number: int) -> Callable[[], None]:
        return lambda: done.append((number, threading.get_ident()))

    on_another_thread(lambda: home.leave(work(1)), lambda: home.leave(work(2)))
    home.leave(work(3))
    home.close("over")
    home.leave(work(4))
    assert home.work() == "over"
    assert done == [(number, threading.get_ident()) for number in (1, 2, 3)]


def test_it_waits_for_what_is_still_to_come(worker: Worker) -> None:
    results: list[str] = []
    homes: list[Home[str]] = []
    ready = threading.Event()

    def run() -> None:
        homes.append(Home(worker))
        ready.set()
        results.append(homes[0].work())

    thread = threading.Thread(target=run)
    thread.start()
    assert ready.wait(SECONDS)
    for _ in range(3):
        done = threading.Event()
        homes[0].leave(done.set)
        assert done.wait(SECONDS)
    homes[0].close("over")
    thread.join(SECONDS)
    assert results == ["over"]


def test_what_was_done_without_waiting_does_not_end_a_later_wait(home: Home[str]) -> None:
    done: list[int] = []
    for number in range(3):
        home.leave(lambda number=number: done.append(number))  # type: ignore[misc]

    def finish() -> None:
        waiting.until(lambda: len(done) == 3, SECONDS)
        home.leave(lambda: done.append(3))
        home.close("over")

    thread = threading.Thread(target=finish)
    thread.start()
    assert home.work() == "over"
    thread.join(SECONDS)
    assert done == [0, 1, 2, 3]


def test_its_thread_is_the_one_that_made_it(home: Home[str]) -> None:
    elsewhere: list[int] = []
    on_another_thread(lambda: elsewhere.append(threading.get_ident()))
    assert home.thread == threading.get_ident()
    assert elsewhere != [home.thread]
