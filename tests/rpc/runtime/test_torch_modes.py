"""A waiting thread's words to torch do not show in tensors that arrive while it waits."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from rpc.runtime import torch_modes
from rpc.testing import local_group
from rpc.testing.memory import MemoryHub
from rpc.transports.base import Transport
from rpc.transports.tensorwire import TensorWireTransport

SECONDS = 20.0
SMALL, LARGE = 3, 100_000
MODES: list[Callable[[], AbstractContextManager[object]]] = [
    torch.inference_mode,
    lambda: torch.device("meta"),
]

both_served = threading.Event()


def memory() -> Callable[[], Transport]:
    return MemoryHub().transport


def tensorwire() -> Callable[[], Transport]:
    return TensorWireTransport


def ones(size: int) -> torch.Tensor:
    return torch.ones(size)


def sparse(size: int) -> torch.Tensor:
    return torch.ones(size).to_sparse()


def late_ones(size: int) -> torch.Tensor:
    assert both_served.wait(SECONDS)
    return torch.ones(size)


def first_ones(size: int) -> torch.Tensor:
    both_served.set()
    return torch.ones(size)


def is_usual(tensor: torch.Tensor) -> bool:
    return not tensor.is_inference() and tensor.is_cpu


@pytest.mark.parametrize("mode", MODES, ids=["inference", "device"])
@pytest.mark.parametrize("make", [ones, sparse])
@pytest.mark.parametrize("size", [SMALL, LARGE])
@pytest.mark.parametrize("transport", [memory, tensorwire])
def test_a_result_is_an_ordinary_tensor_in_whatever_mode_it_is_waited_for(
    transport: Callable[[], Callable[[], Transport]],
    size: int,
    make: Callable[[int], torch.Tensor],
    mode: Callable[[], AbstractContextManager[object]],
) -> None:
    with local_group("a", "b", transport=transport()) as (here, _):
        future = here.rpc_async("b", make, (size,))
        rref = here.remote("b", make, (size,))
        with mode():
            got = [here.rpc_sync("b", make, (size,)), future.wait(), rref.to_here()]
            assert torch_modes.are_changed()
    assert all(map(is_usual, got))


@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_a_thread_in_inference_mode_may_deliver_what_others_train_with(size: int) -> None:
    both_served.clear()
    weights = torch.ones(size, requires_grad=True)
    with local_group("a", "b", transport=TensorWireTransport) as (here, _):
        future = here.rpc_async("b", first_ones, (size,))
        with torch.inference_mode():
            here.rpc_sync("b", late_ones, (SMALL,))
        (future.wait() * weights).sum().backward()
    assert torch.equal(weights.grad, torch.ones(size))


class Noted(TorchFunctionMode):
    """Changes nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_usual_modes_end_where_their_block_does_and_leave_grad_mode_alone() -> None:
    outer, inner = Noted(), Noted()
    assert not torch_modes.are_changed()
    with outer, torch.inference_mode(), inner:
        for wanted in (False, True):
            with torch.set_grad_enabled(wanted), torch_modes.usual():
                assert not torch_modes.are_changed()
                assert torch.is_grad_enabled() is wanted
        assert torch.is_inference_mode_enabled()
        assert torch.overrides._get_current_function_mode_stack() == [outer, inner]
    assert not torch_modes.are_changed()
