"""Groups of agents in this process, over every transport that allows several."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from rpc.agent import Agent, AgentOptions
from rpc.testing import local_group
from rpc.transports.base import Transport

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
