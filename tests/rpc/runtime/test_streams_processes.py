"""Values from TENSORPIPE are left on the streams of torch's threads, for whoever takes them."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator

import pytest
import torch

import rpc
from rpc.runtime import streams
from rpc.transports.tensorpipe.transport import available
from tests.rpc.worker_processes import WorkerProcess, joined_pair, leave

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("process_server"),
    pytest.mark.timeout(200),
    pytest.mark.skipif(not available(), reason="this torch has no TensorPipe"),
]

ELEMENTS = 1 << 18


class Arrivals:
    """First elements of tensors left on threads that Python did not start: torch's."""

    def __init__(self) -> None:
        self.seen: set[float] = set()

    def leave(self, tensors: Iterable[torch.Tensor]) -> None:
        if isinstance(threading.current_thread(), threading._DummyThread):
            self.seen.update(float(each[0]) for each in tensors)


_arrivals = Arrivals()


def watch() -> None:
    streams.leave_tensors = _arrivals.leave


def arrived() -> set[float]:
    return _arrivals.seen


def double(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.mul(2)


def call_double() -> float:
    return float(rpc.rpc_sync("worker1", double, args=(torch.ones(ELEMENTS),)).sum())


@pytest.fixture
def pair() -> Iterator[list[WorkerProcess]]:
    with joined_pair("TENSORPIPE") as workers:
        yield workers


def test_tensors_of_requests_and_replies_are_left_where_torch_delivers_them(
    pair: list[WorkerProcess],
) -> None:
    for worker in pair:
        worker.do(watch)
    assert pair[0].do(call_double) == 2 * ELEMENTS
    caller, callee = pair
    assert 2.0 in caller.do(arrived)
    assert 1.0 in callee.do(arrived)
    for worker in pair:
        worker.begin(leave, timeout=30)
    for worker in pair:
        worker.result()
