"""A backward pass outside of contexts, which trains nothing on other workers, is named once."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Iterator

import pytest
import torch

import autograd_dist
import rpc
from rpc.runtime import lost_gradients
from rpc.testing import as_worker, local_group

TOLD = "parameters on other workers get none"
weight = torch.tensor([2.0], requires_grad=True)
parameter = torch.nn.Parameter(torch.tensor([2.0]))


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    lost_gradients._warn.cache_clear()
    with local_group("alice", "bob") as workers, as_worker(workers[0]):
        yield
    lost_gradients._warn.cache_clear()


def forward(x: torch.Tensor) -> torch.Tensor:
    return weight * x


def its_parameter() -> torch.Tensor:
    return parameter


def test_a_local_backward_through_a_remote_result_warns_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for _ in range(2):
        rpc.rpc_sync("bob", forward, (torch.ones(1),)).sum().backward()
    rpc.remote("bob", forward, (torch.ones(1),)).to_here().sum().backward()
    assert caplog.text.count(TOLD) == 1
    assert weight.grad is None


def test_it_does_not_warn_where_gradients_go_on_or_are_meant_to_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with autograd_dist.context() as context_id:
        autograd_dist.backward(context_id, [rpc.rpc_sync("bob", forward, (torch.ones(1),)).sum()])
    result = rpc.rpc_sync("bob", forward, (torch.ones(1),))
    result.detach().requires_grad_().sum().backward()
    rpc.rpc_sync("bob", its_parameter).sum().backward()  # a copy to be trained
    assert TOLD not in caplog.text


def test_a_received_tensor_is_copied_and_pickled_as_ever() -> None:
    result = rpc.rpc_sync("bob", forward, (torch.ones(1),))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert pickle.loads(pickle.dumps(result)).equal(result)
        assert copy.deepcopy(result).equal(result)
