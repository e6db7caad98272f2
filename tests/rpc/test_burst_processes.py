"""A hundred thousand calls right before shutdown, between processes."""

from __future__ import annotations

import itertools
import socket

import pytest

import rpc
from tests.rpc.worker_processes import WorkerProcess, join, leave

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

CALLS = 100_000


_counter = itertools.count()


def count() -> None:
    next(_counter)


def counted() -> int:
    """How many calls of ``count`` ran in this process. Looks once: looking counts."""
    return next(_counter)


def call_and_leave(to: str) -> int:
    """Returns how many of the calls were answered, all of which are made just before."""
    futures = [rpc.rpc_async(to, count, timeout=0) for _ in range(CALLS)]
    rpc.shutdown(graceful=True)
    return sum(future.done() and future.value() is None for future in futures)


@pytest.mark.parametrize("backend", ["TENSORWIRE", "TENSORPIPE"])
def test_every_call_made_right_before_shutdown_completes(backend: str) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    caller, callee = workers = [WorkerProcess(), WorkerProcess()]
    try:
        for rank, worker in enumerate(workers):
            worker.begin(join, backend, url, f"worker{rank}", rank, 2)
        for worker in workers:
            worker.result()
        caller.begin(call_and_leave, "worker1")
        callee.begin(leave, timeout=0)
        assert caller.result() == CALLS
        callee.result()
        assert callee.do(counted) == CALLS
    finally:
        for worker in workers:
            worker.end()
