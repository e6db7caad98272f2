"""The messages that a step of training takes, counted over a transport that notes them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from threading import Lock

import pytest
import torch

import autograd_dist
import optim_dist
import rpc
from rpc.agent import Agent
from rpc.testing import MemoryHub, MemoryTransport, as_worker, local_group
from rpc.transports.base import Frame, FrameKind


class Noting(MemoryTransport):
    """Counts the frames that are sent, by kind."""

    def __init__(self, hub: MemoryHub, counts: Counter[FrameKind]) -> None:
        super().__init__(hub)
        self._counts, self._lock = counts, Lock()

    def send(self, to: int, frame: Frame) -> None:
        with self._lock:
            self._counts[frame.kind] += 1
        super().send(to, frame)


@pytest.fixture
def noted() -> Iterator[tuple[Agent, Counter[FrameKind]]]:
    hub, counts = MemoryHub(), Counter[FrameKind]()
    with (
        local_group("trainer", "ps", transport=lambda: Noting(hub, counts)) as (trainer, _),
        as_worker(trainer),
    ):
        yield trainer, counts


def scaled(param: rpc.RRef[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return (param.local_value() * x).sum()


def test_a_step_takes_three_requests_and_three_replies(
    noted: tuple[Agent, Counter[FrameKind]],
) -> None:
    counts = noted[1]
    param = rpc.remote("ps", torch.ones, (3,), {"requires_grad": True})
    optimizer = optim_dist.DistributedOptimizer(torch.optim.SGD, [param], lr=0.25)

    with autograd_dist.context() as context_id:
        counts.clear()
        loss = rpc.rpc_sync("ps", scaled, (param, torch.tensor([1.0, 2.0, 3.0])))
        autograd_dist.backward(context_id, [loss])
        optimizer.step(context_id)
        taken = counts[FrameKind.REQUEST], counts[FrameKind.REPLY]
    assert taken == (3, 3)
    assert param.to_here().tolist() == [0.75, 0.5, 0.25]
