"""Many calls at once, between processes: right before shutdown, and of handlers that wait."""

from __future__ import annotations

import itertools
import operator
import threading
from collections.abc import Callable, Iterator

import pytest

import rpc
from tests.rpc.worker_processes import WorkerProcess, call, joined_pair, leave

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("process_server"), pytest.mark.timeout(400)]

CALLS = 10_000


_counter = itertools.count()


def count() -> None:
    next(_counter)


def counted() -> int:
    """Counts the calls of ``count`` that ran in this process. Looks once: looking counts."""
    return next(_counter)


def call_and_leave(to: str) -> int:
    """Returns how many of the calls were answered, all of which are made just before."""
    futures = [rpc.rpc_async(to, count, timeout=0) for _ in range(CALLS)]
    rpc.shutdown(graceful=True)
    return sum(future.done() and future.value() is None for future in futures)


MEETING = 40
_gate = threading.Event()


def meet(number: int) -> int:
    """Returns when the last handler of the meeting has come."""
    if number == MEETING - 1:
        _gate.set()
    assert _gate.wait(60)
    return number


def call_those_who_meet(to: str) -> list[int]:
    """Calls, closely one after another, handlers that wait for the last of them."""
    futures = [rpc.rpc_async(to, meet, args=(number,)) for number in range(MEETING)]
    return [future.wait() for future in futures]


def wait_in_callbacks(to: str) -> list[int]:
    """Calls whose replies come together, and have callbacks that wait for each other."""
    futures: list[rpc.Future[int]] = []
    all_sent = threading.Event()

    def wait_for_the_next(done: rpc.Future[int]) -> int:
        number = done.value()
        assert all_sent.wait(60)
        return number if number == MEETING - 1 else futures[number + 1].wait() - 1

    for number in range(MEETING):
        futures.append(rpc.rpc_async(to, meet, args=(number,)).then(wait_for_the_next))
    all_sent.set()
    return [future.wait() for future in futures]


FLOOD = 200
NARROW = {"num_worker_threads": 1, "max_bytes_in_flight": 64 << 10}


def call_back(number: int) -> int:
    return rpc.rpc_sync("worker0", operator.neg, args=(number,))


def flood(to: str) -> list[int]:
    """Calls many times more than may be under way, handlers that call this worker."""
    futures = [rpc.rpc_async(to, call_back, args=(number,)) for number in range(FLOOD)]
    return [future.wait() for future in futures]


async def negated(number: int) -> int:
    return -number


async def call_coroutine_back(number: int) -> int:
    return await rpc.rpc_async("worker0", negated, args=(number,))


async def flood_from_coroutine(to: str) -> list[int]:
    """Does as :func:`flood`, and all that runs here runs on one thread."""
    futures = [rpc.rpc_async(to, call_coroutine_back, args=(number,)) for number in range(FLOOD)]
    return [await future for future in futures]


@pytest.fixture(params=["TENSORWIRE", "TENSORPIPE"])
def pair(request: pytest.FixtureRequest) -> Iterator[list[WorkerProcess]]:
    """Two workers, each a process."""
    with joined_pair(request.param) as workers:
        yield workers


@pytest.fixture(params=["TENSORWIRE", "TENSORPIPE"])
def narrow_pair(request: pytest.FixtureRequest) -> Iterator[list[WorkerProcess]]:
    """Two workers with one handler thread, that may have 16 requests under way."""
    with joined_pair(request.param, **NARROW) as workers:
        yield workers


def test_every_call_made_right_before_shutdown_completes(pair: list[WorkerProcess]) -> None:
    caller, callee = pair
    caller.begin(call_and_leave, "worker1")
    callee.begin(leave, timeout=0)
    assert caller.result() == CALLS
    callee.result()
    assert callee.do(counted) == CALLS


def test_handlers_of_one_burst_may_wait_for_each_other(pair: list[WorkerProcess]) -> None:
    assert pair[0].do(call_those_who_meet, "worker1") == list(range(MEETING))


def test_callbacks_on_replies_that_came_together_may_wait_for_each_other(
    pair: list[WorkerProcess],
) -> None:
    assert pair[0].do(wait_in_callbacks, "worker1") == list(range(MEETING))


@pytest.mark.parametrize("flood", [flood, flood_from_coroutine])
def test_a_worker_whose_handler_runs_ahead_is_called_meanwhile(
    narrow_pair: list[WorkerProcess], flood: Callable[[str], list[int]]
) -> None:
    asked = narrow_pair[1].do(call, "worker0", flood, "worker1")
    assert asked == [-number for number in range(FLOOD)]
