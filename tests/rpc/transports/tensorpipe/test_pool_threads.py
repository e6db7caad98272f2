"""Torch's threads, for which some of ours stand: what they run is seen, and can be ended."""

from __future__ import annotations

import threading
from collections.abc import Callable

from rpc.transports.tensorpipe.pool_threads import PoolThreads
from tests.waiting import until


def started(pool: PoolThreads, work: Callable[[], None]) -> threading.Thread:
    """A thread of the pool that works."""
    kept = threading.Event()

    def run() -> None:
        pool.keep()
        kept.set()
        try:
            work()
        finally:
            pool.let_go()

    thread = threading.Thread(target=run)
    thread.start()
    kept.wait()
    return thread


def test_those_that_run_something_are_known() -> None:
    pool, end = PoolThreads(1), threading.Event()
    thread = started(pool, lambda: end.wait() and None)
    assert pool.in_python() == {thread.ident}
    end.set()
    thread.join()
    assert pool.in_python() == set()


def test_what_runs_is_interrupted_but_for_that_of_other_threads() -> None:
    pool, end = PoolThreads(1), threading.Event()
    left: list[str] = []

    def run_on() -> None:
        try:
            while True:
                end.is_set()
        except SystemExit:
            left.append("the pool's")

    def another() -> None:
        while not end.is_set():
            pass
        left.append("another")

    other = threading.Thread(target=another)
    other.start()
    thread = started(pool, run_on)
    pool.interrupt()
    until(lambda: not thread.is_alive())
    assert left == ["the pool's"]
    end.set()
    other.join()
