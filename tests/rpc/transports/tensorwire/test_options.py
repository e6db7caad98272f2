"""The options of TENSORWIRE: a superset of TENSORPIPE's, with bounds that make sense."""

from __future__ import annotations

import inspect
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from rpc.agent import Agent
from rpc.backend_registry import BackendType
from rpc.errors import BringUpError
from rpc.options import RpcBackendOptions, TensorPipeRpcBackendOptions, WhenFull
from rpc.transports.tensorwire import Settings, TensorWireRpcBackendOptions


def test_the_defaults_are_those_of_the_settings() -> None:
    assert TensorWireRpcBackendOptions().settings() == Settings()


def test_all_that_tensorpipe_accepts_is_accepted() -> None:
    theirs = inspect.signature(TensorPipeRpcBackendOptions).parameters
    ours = inspect.signature(TensorWireRpcBackendOptions).parameters
    assert set(theirs) <= set(ours)
    assert {name: p.default for name, p in theirs.items()} == {
        name: ours[name].default for name in theirs
    }
    options = TensorWireRpcBackendOptions(_transports=["uv"], _channels=["basic"], rpc_timeout=5)
    assert isinstance(options, RpcBackendOptions)
    assert options.rpc_timeout == 5


def test_options_become_settings() -> None:
    options = TensorWireRpcBackendOptions(
        bind_address="::1",
        group_key=b"key",
        shared_memory=0,
        max_bytes_in_flight=10,
        when_full=WhenFull.RAISE,
        local_paths=False,
        tcp_connections=4,
        max_message_bytes=5000,
        link_resume_timeout=1.5,
        busy_poll=5e-4,
    )
    options.set_device_map("other", {"cuda:0": "cuda:1"})
    assert options.settings() == Settings(
        bind_address="::1",
        group_key=b"key",
        shared_memory_bytes=0,
        max_bytes_in_flight=10,
        when_full=WhenFull.RAISE,
        local_paths=False,
        bulk_connections=4,
        max_message_bytes=5000,
        resume_seconds=1.5,
        busy_poll_seconds=5e-4,
        device_maps={"other": {torch.device("cuda:0"): torch.device("cuda:1")}},
    )


def test_how_long_a_connection_may_be_broken_can_be_changed() -> None:
    options = TensorWireRpcBackendOptions(link_resume_timeout=1.5)
    options.link_resume_timeout = 2.5
    assert options.settings().resume_seconds == 2.5
    with pytest.raises(ValueError, match="link_resume_timeout=-1"):
        options.link_resume_timeout = -1


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"group_key": "text"}, TypeError),
        ({"bind_address": 5}, TypeError),
        ({"when_full": "raise"}, TypeError),
        ({"shared_memory": -1}, ValueError),
        ({"shared_memory": 1.5}, TypeError),
        ({"max_bytes_in_flight": 0}, ValueError),
        ({"tcp_connections": 0}, ValueError),
        ({"tcp_connections": True}, TypeError),
        ({"max_message_bytes": 4095}, ValueError),
        ({"local_paths": "no"}, TypeError),
        ({"link_resume_timeout": -1}, ValueError),
        ({"link_resume_timeout": float("inf")}, ValueError),
        ({"link_resume_timeout": None}, TypeError),
        ({"busy_poll": -1e-6}, ValueError),
        ({"busy_poll": 0.011}, ValueError),
        ({"busy_poll": float("nan")}, ValueError),
        ({"busy_poll": "long"}, TypeError),
    ],
)
def test_what_makes_no_sense_is_refused(arguments: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error, match=next(iter(arguments))):
        TensorWireRpcBackendOptions(**arguments)


def test_options_of_tensorpipe_are_taken_over() -> None:
    options = TensorPipeRpcBackendOptions(
        num_worker_threads=3,
        rpc_timeout=7,
        init_method="file:///somewhere",
        device_maps={"other": {0: 1}},
        devices=[0],
        bring_up_timeout=11,
        shutdown_timeout=13,
    )
    adopted = TensorWireRpcBackendOptions.adopted(options)
    for name in ("num_worker_threads", "rpc_timeout", "init_method", "device_maps", "devices"):
        assert getattr(adopted, name) == getattr(options, name)
    assert (adopted.bring_up_timeout, adopted.shutdown_timeout) == (11, 13)
    assert adopted.link_resume_timeout == 5
    assert TensorWireRpcBackendOptions.adopted(adopted) is adopted


@pytest.mark.parametrize("world_size", [2, None])
def test_workers_with_different_keys_do_not_form_a_group(world_size: int | None) -> None:
    store = HashStore()

    def bring_up(rank: int, key: bytes) -> Agent:
        options = TensorWireRpcBackendOptions(group_key=key, bring_up_timeout=0.5)
        init = BackendType["TENSORWIRE"].value.init_backend_handler
        return init(store, f"w{rank}", rank, world_size, options)

    agents: list[Agent] = []
    try:
        with ThreadPoolExecutor(2) as pool:
            if world_size is None:
                agents.append(bring_up(0, b"a"))
                calls = [pool.submit(bring_up, 1, b"")]
            else:
                calls = [pool.submit(bring_up, rank, key) for rank, key in enumerate((b"", b"a"))]
        errors = [error for call in calls if (error := call.exception())]
        agents += [call.result() for call in calls if not call.exception()]
    finally:
        for agent in agents:
            agent.shutdown(graceful=False)
    assert len(errors) == (world_size or 1)
    assert all(isinstance(error, BringUpError) for error in errors)
    assert any("group_key" in str(error) for error in errors)
