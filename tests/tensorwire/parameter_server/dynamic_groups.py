"""A dynamic group in one process, whose workers come one after the other."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch._C._distributed_c10d import HashStore

from rpc.agent import Agent
from rpc.backend_registry import BackendType
from rpc.transports.tensorwire import TensorWireRpcBackendOptions


class DynamicGroup:
    """Workers over TENSORWIRE that meet at a store of this process."""

    def __init__(self, store: HashStore) -> None:
        self._store = store
        self.agents: list[Agent] = []

    def join(self, name: str) -> Agent:
        options = TensorWireRpcBackendOptions(init_method="tcp://127.0.0.1:1", liveness_timeout=0)
        join = BackendType["TENSORWIRE"].value.init_backend_handler
        self.agents.append(join(self._store, name, len(self.agents), None, options))
        return self.agents[-1]


@contextlib.contextmanager
def dynamic_group(store: HashStore) -> Iterator[DynamicGroup]:
    """A group whose workers leave at the end of the block, the last one first."""
    group = DynamicGroup(store)
    yield group
    for agent in reversed(group.agents):
        agent.shutdown(graceful=False)
