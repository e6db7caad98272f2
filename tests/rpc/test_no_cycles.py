"""All that a call leaves behind is freed at once, not when the garbage collector comes by.

Large tensors in a cycle would stay for as long as the collector likes; and what there is of a
call meanwhile it looks at again and again.
"""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

import autograd_dist
import rpc
from rpc.agent import Agent
from rpc.calls.service import Service
from rpc.functions import async_execution
from rpc.testing import as_worker
from tests.waiting import eventually, until


def identity(value: object) -> object:
    return value


@pytest.fixture
def collector_off() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def tensors_in_cycles(act: Callable[[], object]) -> int:
    """Counts the tensors only the garbage collector can free after ``act`` ran a few times."""
    for _ in range(5):
        act()
    threading.Event().wait(0.1)  # what other threads still hold is no cycle
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        gc.collect()
        return sum(isinstance(found, torch.Tensor) for found in gc.garbage)
    finally:
        gc.set_debug(0)
        gc.garbage.clear()


@pytest.mark.usefixtures("collector_off")
def test_calls_and_references_leave_no_tensor_in_a_cycle(pair: list[Agent]) -> None:
    alice, x = pair[0], torch.ones(3)
    assert tensors_in_cycles(lambda: alice.rpc_sync("bob", identity, (x,))) == 0
    assert tensors_in_cycles(lambda: alice.rpc_async("bob", identity, (x,)).wait()) == 0
    assert tensors_in_cycles(lambda: alice.remote("bob", identity, (x,)).to_here()) == 0


@pytest.mark.usefixtures("collector_off")
def test_a_call_through_a_reference_leaves_nothing_to_the_collector(pair: list[Agent]) -> None:
    words = pair[0].remote("bob", identity, ("words",))
    assert words.rpc_sync().upper() == "WORDS"
    proxy = words.rpc_sync()
    method = proxy.upper
    is_there = weakref.ref(words)
    del words, proxy, method
    assert eventually(lambda: is_there() is None)


async def identity_later(value: object) -> object:
    await asyncio.sleep(0)
    return value


async def refuse_later(value: object) -> None:
    raise ValueError("no")


@pytest.mark.usefixtures("collector_off")
def test_an_async_handler_leaves_no_tensor_in_a_cycle(pair: list[Agent]) -> None:
    alice, x = pair[0], torch.ones(3)

    def be_refused() -> None:
        with pytest.raises(ValueError, match="no"):
            alice.rpc_sync("bob", refuse_later, (x,))

    assert tensors_in_cycles(lambda: alice.rpc_sync("bob", identity_later, (x,))) == 0
    assert tensors_in_cycles(be_refused) == 0


promises: list[rpc.Future[int]] = []


@async_execution
def promise() -> rpc.Future[int]:
    promises.append(rpc.Future())
    return promises[-1]


@pytest.mark.usefixtures("collector_off")
def test_a_request_that_waited_leaves_nothing_to_the_collector(pair: list[Agent]) -> None:
    alice, bob = pair
    call = alice.rpc_async("bob", promise)
    until(lambda: bool(promises))
    promises.pop().set_result(1)
    assert call.wait() == 1
    until(bob.callee.quiet)

    def services() -> int:
        found = [each for each in gc.get_objects() if isinstance(each, Service)]
        return sum(any(r is bob.callee for r in gc.get_referents(each)) for each in found)

    assert eventually(lambda: services() == 0)


@pytest.mark.usefixtures("collector_off")
def test_a_backward_pass_leaves_no_tensor_in_a_cycle(pair: list[Agent]) -> None:
    with as_worker(pair[0]):
        layer = rpc.remote("bob", nn.Linear, (3, 2))
        x = torch.ones(4, 3)

        def step() -> None:
            with autograd_dist.context() as context:
                autograd_dist.backward(context, [layer.rpc_sync().forward(x).sum()])

        step()
        assert tensors_in_cycles(step) == 0


@pytest.mark.usefixtures("collector_off")
def test_the_future_of_a_call_brings_the_collector_one_object_and_its_lock(
    pair: list[Agent],
) -> None:
    caller = pair[0].caller
    before = len(gc.get_objects())
    futures = [caller.future("a call") for _ in range(1000)]
    brought = len(gc.get_objects()) - before
    assert brought < 2.5 * len(futures)
