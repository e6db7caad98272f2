"""Profilers' views of a backward pass that crosses workers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.autograd import profiler

import autograd_dist
import rpc
from rpc.agent import Agent
from rpc.testing import as_worker, local_group

PASS = "torch::distributed::autograd::backward"
SEND = "torch::distributed::autograd::SendRpcBackward"
RECV = "torch::distributed::autograd::RecvRpcBackward"


@pytest.fixture
def group() -> Iterator[list[Agent]]:
    with local_group("here", "there") as agents, as_worker(agents[0]):
        yield agents


def square(x: torch.Tensor) -> torch.Tensor:
    return x * x


def test_a_profile_shows_the_pass_and_where_gradients_left_and_came_back(
    group: list[Agent],
) -> None:
    x = torch.ones(3, requires_grad=True)
    with autograd_dist.context() as context:
        loss = rpc.rpc_sync("there", square, (x.exp(),)).sum()
        with profiler.profile() as profile:
            autograd_dist.backward(context, [loss])
        gradient = autograd_dist.get_gradients(context)[x]
    events = profile.function_events
    assert [event.name for event in events].count(SEND) == 1
    assert [event.name for event in events].count(RECV) == 1
    whole = next(event for event in events if event.name == PASS)
    for event in events:
        assert event.time_range.start >= whole.time_range.start
        assert event.time_range.end <= whole.time_range.end
    assert torch.allclose(gradient, 2 * (2 * torch.ones(3)).exp())


def test_what_gradients_that_came_back_set_off_is_in_the_profile(group: list[Agent]) -> None:
    x = torch.ones(3, requires_grad=True)
    with autograd_dist.context() as context:
        loss = rpc.rpc_sync("there", square, (x.exp(),)).sum()
        with profiler.profile() as profile:
            autograd_dist.backward(context, [loss])
    assert "ExpBackward0" in {event.name for event in profile.function_events}


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
        raise ValueError("simulated")


def test_a_pass_that_fails_elsewhere_ends_in_a_profile_too(group: list[Agent]) -> None:
    x = torch.ones(3, requires_grad=True)
    with autograd_dist.context() as context, profiler.profile():
        loss = rpc.rpc_sync("there", Failing.apply, (x,)).sum()
        with pytest.raises(RuntimeError, match="Error on Node 1: simulated"):
            autograd_dist.backward(context, [loss])
