"""Groups of agents in this process, over every transport that allows several; stores."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from torch.distributed import FileStore, HashStore, PrefixStore, Store, TCPStore

from rpc.agent import Agent, AgentOptions
from rpc.testing import local_group
from rpc.transports.base import Transport
from tests.rpc.stores import SECONDS

GroupMaker = Callable[..., list[Agent]]


@pytest.fixture
def make_group(make_transport: Callable[[], Transport] | None) -> Iterator[GroupMaker]:
    """Makes groups by their workers' names; they end with the test."""
    with ExitStack() as stack:

        def make(*names: str, num_worker_threads: int = 16, rpc_timeout: float = 20) -> list[Agent]:
            options = AgentOptions(num_worker_threads, rpc_timeout)
            return stack.enter_context(
                local_group(*names, options=options, transport=make_transport)
            )

        yield make


@pytest.fixture
def pair(make_group: GroupMaker) -> list[Agent]:
    """Two workers, alice (0) and bob (1)."""
    return make_group("alice", "bob")


@pytest.fixture(params=["hash", "file", "tcp", "prefix"])
def connect(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[], Store]]:
    """Opens one worker's end of a store; each kind of store in turn."""
    stores: list[Store] = []
    if request.param == "file":
        yield lambda: FileStore(str(tmp_path / "store"), -1)
    elif request.param == "tcp":
        host = TCPStore("127.0.0.1", 0, None, True, SECONDS)
        stores.append(host)
        port = host.port
        del host
        yield lambda: TCPStore("127.0.0.1", port, None, False, SECONDS)
    else:
        stores.append(HashStore())
        yield lambda: stores[0] if request.param == "hash" else PrefixStore("mine", stores[0])
    stores.clear()
