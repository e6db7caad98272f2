"""One small program for each reason why a test of torch's need not pass: it shows the reason.

``torch_suite/exemptions.py`` names them. Each runs here in one process; what ours does
better is tested where it is made, and named there.
"""

from __future__ import annotations

import asyncio
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import autograd_dist
import rpc
from rpc.agent import Agent
from rpc.testing import as_worker, local_group

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    import torch.distributed.autograd as torch_autograd
    import torch.distributed.rpc as torch_rpc

    @torch.jit.script
    def double(tensor: torch.Tensor) -> torch.Tensor:
        return 2 * tensor

    @torch.jit.script
    def fetch(reference: torch_rpc.RRef[torch.Tensor]) -> torch.Tensor:
        return reference.to_here()

    @torch.jit.script
    def call_inside(to: str, tensor: torch.Tensor) -> torch.Tensor:
        return torch_rpc.rpc_sync(to, double, (tensor,))

    @torch.jit.script
    def gradients_inside(context_id: int) -> dict[torch.Tensor, torch.Tensor]:
        return torch_autograd.get_gradients(context_id)


_held = threading.Event()


def held() -> None:
    _held.wait(60)


def failing() -> None:
    raise ValueError("Expected error")


@pytest.fixture
def group() -> Iterator[list[Agent]]:
    with local_group("here", "there") as agents, as_worker(agents[0]):
        yield agents


def test_nodes_of_the_graph_are_ours_and_the_gradients_the_same(group: list[Agent]) -> None:
    left, right = (torch.rand(3, requires_grad=True) for _ in range(2))
    with autograd_dist.context() as context:
        total = rpc.rpc_sync("there", torch.mul, (left, right))
        assert "RecvRpcBackward" not in total.grad_fn.name()
        with torch.autograd.profiler.profile() as profile:
            autograd_dist.backward(context, [total.sum()])
        gradients = autograd_dist.get_gradients(context)
    assert not any("RpcBackward" in event.name for event in profile.function_events)
    assert torch.equal(gradients[left], right)
    assert torch.equal(gradients[right], left)


def test_gradients_are_equal_wherever_they_lie(group: list[Agent]) -> None:
    address: list[int] = []

    class Watched(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
            return value.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            address.append(gradient.data_ptr())
            return gradient

    leaf = torch.ones(3, requires_grad=True)
    with autograd_dist.context() as context:
        autograd_dist.backward(context, [Watched.apply(leaf).sum()])
        gradient = autograd_dist.get_gradients(context)[leaf]
    assert torch.equal(gradient, torch.ones(3))
    assert len(address) == 1


def test_shutdown_has_other_steps_and_there_is_no_private_server_profiler() -> None:
    assert hasattr(torch_rpc.api, "_broadcast_to_followers")
    assert not hasattr(rpc.api, "_broadcast_to_followers")
    assert not hasattr(rpc, "_server_process_global_profile")


def test_torchscript_does_not_take_our_references_but_takes_their_values(
    group: list[Agent],
) -> None:
    reference = rpc.remote("there", torch.ones, (2,))
    with pytest.raises(RuntimeError, match=r"fetch\(\)|RRef"):
        fetch(reference)
    assert rpc.rpc_sync("there", double, (reference.to_here(),)).tolist() == [2, 2]


def test_calls_inside_torchscript_go_to_torchs_own_agent(group: list[Agent]) -> None:
    with pytest.raises(RuntimeError, match=r"[Aa]gent"):
        call_inside("there", torch.ones(1))
    assert rpc.rpc_sync("there", double, (torch.ones(1),)).item() == 2


def test_torchscript_looks_for_contexts_in_torchs_own_table(group: list[Agent]) -> None:
    with autograd_dist.context() as context, pytest.raises(RuntimeError):
        gradients_inside(context)


def test_an_operator_that_does_not_fit_raises_its_own_error(group: list[Agent]) -> None:
    with pytest.raises(RuntimeError, match="invalid combination of arguments") as caught:
        rpc.rpc_sync("there", torch.add, ())
    assert isinstance(caught.value, TypeError)


def test_wait_all_of_torch_waits_for_all_but_each_future_fails_at_once(
    group: list[Agent],
) -> None:
    _held.clear()
    pending = rpc.rpc_async("there", held)
    failed = rpc.rpc_async("there", failing)
    with pytest.raises(ValueError, match="Expected error"):
        failed.wait()
    together = torch.futures.collect_all([pending, failed])
    assert not together.done()
    _held.set()
    with pytest.raises(ValueError, match="Expected error"):
        torch.futures.wait_all([pending, failed])


def test_gather_raises_the_first_error_at_once(group: list[Agent]) -> None:
    async def both() -> None:
        await asyncio.gather(rpc.rpc_async("there", held), rpc.rpc_async("there", failing))

    _held.clear()
    with pytest.raises(ValueError, match="Expected error"):
        asyncio.run(both())
    _held.set()
