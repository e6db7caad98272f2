"""The deeds of ``rpc._testing`` to messages, over whatever transport."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import pytest
import torch
from torch import Tensor

import autograd_dist
from rpc import testing
from rpc._testing.backend import FaultyAgent
from rpc._testing.kinds import Callables
from rpc._testing.transport import Faults, FaultyTransport
from rpc.agent import Agent
from rpc.errors import RpcTimeoutError, RRefCreationError
from rpc.testing import MemoryHub, as_worker, connect
from rpc.transports.base import Transport
from rpc.transports.tensorwire import TensorWireTransport


def group(transport: type, fail: Sequence[str] = (), delay: Mapping[str, float] | None = None):
    hub = MemoryHub(None)

    def make() -> FaultyTransport:
        inner: Transport = hub.transport() if transport is MemoryHub else transport()
        return FaultyTransport(inner, Faults.of(fail, delay or {}, 1), Callables())

    return connect("here", "there", transport=make)


def close(agents: list[Agent]) -> None:
    for agent in agents:
        agent.shutdown(graceful=False)


over_each = pytest.mark.parametrize("transport", [MemoryHub, TensorWireTransport])


@over_each
def test_a_call_whose_sending_fails_says_so(transport: type) -> None:
    agents = group(transport, fail=["PYTHON_CALL"])
    try:
        with pytest.raises(RuntimeError, match="failed intentionally for PYTHON_CALL"):
            agents[0].rpc_sync("there", abs, (-1,))
    finally:
        close(agents)


def _minus(value: Tensor) -> Tensor:
    return -value


def test_calls_of_torchs_operators_fail_apart_from_those_of_functions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(testing, "Agent", FaultyAgent)
    agents = group(MemoryHub, fail=["SCRIPT_CALL", "SCRIPT_REMOTE_CALL"])
    here, one = agents[0], (torch.ones(1), 1)
    try:
        with pytest.raises(RuntimeError, match="failed intentionally for SCRIPT_CALL"):
            here.rpc_sync("there", torch.add, one)
        with pytest.raises(RuntimeError, match="failed intentionally for SCRIPT_CALL"):
            here.rpc_async("there", func=torch.add, args=one).wait()
        with pytest.raises(RRefCreationError, match="failed intentionally for SCRIPT_REMOTE_CALL"):
            here.remote("there", torch.add, one).to_here()
        assert here.rpc_sync("there", _minus, one[:1]) == -1
        assert here.remote("there", _minus, one[:1]).to_here() == -1
    finally:
        close(agents)


@over_each
def test_a_call_that_comes_late_is_too_late_for_a_short_timeout(transport: type) -> None:
    agents = group(transport, delay={"PYTHON_CALL": 0.3})
    try:
        with pytest.raises(RpcTimeoutError):
            agents[0].rpc_sync("there", abs, (-1,), timeout=0.05)
        start = time.monotonic()
        assert agents[0].rpc_sync("there", abs, (-1,)) == 1
        assert time.monotonic() - start >= 0.3
    finally:
        close(agents)


@over_each
def test_other_messages_are_left_alone(transport: type) -> None:
    agents = group(transport, fail=["PYTHON_REMOTE_CALL"])
    try:
        assert agents[0].rpc_sync("there", abs, (-1,)) == 1
        assert agents[0].transport.device_map(1) == {}
    finally:
        close(agents)


@over_each
@pytest.mark.parametrize("size", [2, 100_000], ids=["inline", "slot"])
def test_gradients_are_told_from_the_ends_of_contexts(transport: type, size: int) -> None:
    agents = group(transport, fail=["CLEANUP_AUTOGRAD_CONTEXT_REQ"])
    weight = torch.ones(size, requires_grad=True)
    try:
        with as_worker(agents[0]), autograd_dist.context() as context_id:
            loss = agents[0].rpc_sync("there", torch.sum, (weight,))
            autograd_dist.backward(context_id, [loss])
            assert autograd_dist.get_gradients(context_id)[weight].sum() == size
    finally:
        close(agents)


@over_each
def test_gradients_whose_sending_fails_say_so(transport: type) -> None:
    agents = group(transport, fail=["BACKWARD_AUTOGRAD_REQ"])
    weight = torch.ones(2, requires_grad=True)
    try:
        with as_worker(agents[0]), autograd_dist.context() as context_id:
            loss = agents[0].rpc_sync("there", torch.sum, (weight,))
            with pytest.raises(RuntimeError, match="intentionally for BACKWARD_AUTOGRAD_REQ"):
                autograd_dist.backward(context_id, [loss])
    finally:
        close(agents)


def test_a_type_of_message_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no such messages: \['NONE'\]"):
        Faults.of(["NONE"], {}, 1)


def test_numbers_must_not_be_negative() -> None:
    with pytest.raises(ValueError, match="must not be negative"):
        Faults.of([], {"PYTHON_CALL": -1.0}, 0)
