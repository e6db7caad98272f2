"""CUDA tensors between processes, over both transports, on streams of the callers' own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

import autograd_dist
import rpc
from tests.free_ports import free_port
from tests.rpc.worker_processes import WorkerProcess, join, leave

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.slow,
    pytest.mark.usefixtures("process_server"),
    pytest.mark.timeout(300),
]

ELEMENTS = 4 << 20
CYCLES = 500_000_000
"""Of a kernel that does nothing else: some tenths of a second."""


def late(value: float) -> torch.Tensor:
    """A tensor whose values are there some time after this returns."""
    tensor = torch.zeros(ELEMENTS, device="cuda")
    torch.cuda._sleep(CYCLES)
    return tensor.fill_(value)


def late_double(tensor: torch.Tensor) -> torch.Tensor:
    torch.cuda._sleep(CYCLES)
    return tensor * 2


@rpc.functions.async_execution
def late_later(tensor: torch.Tensor) -> rpc.Future[torch.Tensor]:
    future: rpc.Future[torch.Tensor] = rpc.Future(devices=[0])
    with torch.cuda.stream(torch.cuda.Stream()):
        future.set_result(late_double(tensor))
    return future


def call_on_side_streams() -> list[float]:
    """Sums of what each way of calling gives, asked for on a stream of its own."""
    sums = []
    for _ in range(3):  # the first tensors of a connection go another way than later ones
        with torch.cuda.stream(torch.cuda.Stream()):
            sums.append(rpc.rpc_sync("worker1", late_double, args=(late(1.0),)).mean().item())
        with torch.cuda.stream(torch.cuda.Stream()):
            future = rpc.rpc_async("worker1", late_later, args=(late(2.0),))
        with torch.cuda.stream(torch.cuda.Stream()):
            sums.append(future.wait().mean().item())
        with torch.cuda.stream(torch.cuda.Stream()):
            rref = rpc.remote("worker1", late_double, args=(late(3.0),))
        with torch.cuda.stream(torch.cuda.Stream()):
            sums.append(rref.to_here().mean().item())
        with torch.cuda.stream(torch.cuda.Stream()):
            own = rpc.RRef(late(4.0))
        with torch.cuda.stream(torch.cuda.Stream()):
            sums.append(own.local_value().mean().item())
    return sums


def gradient_on_side_streams() -> float:
    """The mean of a gradient that crossed the border twice; by the chain rule 6."""
    with torch.cuda.stream(torch.cuda.Stream()):
        leaf = nn.Parameter(late(1.0))
        with autograd_dist.context() as context:
            out = rpc.rpc_sync("worker1", late_double, args=(leaf * 3,))
            with torch.cuda.stream(torch.cuda.Stream()):
                autograd_dist.backward(context, [out.sum()])
            return autograd_dist.get_gradients(context)[leaf].mean().item()


@pytest.fixture(params=["TENSORWIRE", "TENSORPIPE"])
def pair(request: pytest.FixtureRequest) -> Iterator[list[WorkerProcess]]:
    url = f"tcp://127.0.0.1:{free_port()}"
    workers = [WorkerProcess(), WorkerProcess()]
    try:
        maps = {"device_maps": {"worker1": {0: 0}}}
        for rank, worker in enumerate(workers):
            settings = maps if rank == 0 else {}
            worker.begin(join, request.param, url, f"worker{rank}", rank, 2, **settings)
        for worker in workers:
            worker.result()
        yield workers
        for worker in workers:
            worker.begin(leave, timeout=60)
        for worker in workers:
            worker.result()
    finally:
        for worker in workers:
            worker.end()


def test_what_is_still_computed_on_one_stream_is_complete_on_another(
    pair: list[WorkerProcess],
) -> None:
    assert pair[0].do(call_on_side_streams) == [2.0, 4.0, 6.0, 4.0] * 3


def test_gradients_are_complete_whatever_streams_they_come_from(
    pair: list[WorkerProcess],
) -> None:
    assert pair[0].do(gradient_on_side_streams) == 6.0
