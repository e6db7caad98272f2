"""A device map may name host memory, too: then even the smallest tensor arrives on a device.

torch's ``meta`` device stands in for an accelerator.
"""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from rpc.devices import DeviceInfo
from rpc.options import TensorPipeRpcBackendOptions
from rpc.testing import local_group
from rpc.transports.base import Frame, FrameKind, Peer
from rpc.transports.tensorpipe.address import TensorPipeAddress
from rpc.transports.tensorpipe.transport import available
from rpc.transports.tensorwire.settings import Settings
from rpc.transports.tensorwire.transport import TensorWireTransport
from rpc.worker_info import WorkerInfo

HOST = torch.device("cpu")
META = torch.device("meta")
SIZES = [3, 100_000]
LARGE = Frame(FrameKind.REQUEST, 1, b"", b"", (torch.ones(100_000),))


def device_of(value: dict[str, torch.Tensor]) -> str:
    return value["tensor"].device.type


class Group:
    """Alice, who has a device map, and Bob, who has none, over TENSORWIRE."""

    def __init__(self, device_map: dict[torch.device, torch.device]) -> None:
        maps = iter([{"bob": device_map}, {}])
        self.group = local_group(
            "alice",
            "bob",
            transport=lambda: TensorWireTransport(Settings(device_maps=next(maps))),
        )

    def __enter__(self) -> list[Any]:
        return self.group.__enter__()

    def __exit__(self, *error: Any) -> None:
        self.group.__exit__(*error)


@pytest.mark.parametrize("size", SIZES)
def test_arguments_arrive_where_the_map_says(size: int) -> None:
    with Group({HOST: META}) as (alice, bob):
        value = {"tensor": torch.ones(size)}
        assert alice.rpc_sync("bob", device_of, (value,)) == "meta"
        assert bob.rpc_sync("alice", device_of, (value,)) == "cpu"
        assert alice.rpc_sync("bob", torch.ones, (size,)).device == HOST


@pytest.mark.parametrize("size", SIZES)
def test_results_arrive_where_the_map_came_from(size: int) -> None:
    with Group({META: HOST}) as (alice, bob):
        assert alice.rpc_sync("bob", torch.ones, (size,)).device == META
        assert bob.rpc_sync("alice", torch.ones, (size,)).device == HOST


@pytest.mark.skipif(not available(), reason="this torch has no TensorPipe")
@pytest.mark.parametrize("device_map", [{HOST: META}, {META: HOST}, {HOST: HOST}, {}])
def test_over_tensorpipe_torch_carries_what_moves(
    device_map: dict[torch.device, torch.device],
) -> None:
    from rpc.transports.loopback import Loopback
    from rpc.transports.tensorpipe.caller import PipeCaller
    from rpc.transports.tensorpipe.shared_tensors import HostMemory
    from rpc.transports.tensorpipe.wire import SenderId

    agent = SimpleNamespace(reach=lambda name, url, replies: None)
    options = TensorPipeRpcBackendOptions(device_maps={"bob": device_map})
    memory = HostMemory("test", 64 << 20)
    address = TensorPipeAddress("uv://127.0.0.1:5", DeviceInfo(0), memory.host).encode()
    caller = PipeCaller(SenderId(0, 1), threading.Lock(), cast(Any, agent), *[lambda *_: None] * 2)
    peer = Peer(WorkerInfo("bob", 1), 1, address)
    link = caller.link_to(peer, "alice", options, memory, Loopback("alice", lambda _: None))
    assert link.shared.place(LARGE) is LARGE
    assert (link.shared.untold is not None) is (device_map.get(HOST, HOST) == HOST)
    link.shared.close()
