"""For tests: a whole group in one process, with a network and a clock under control.

Example::

    from rpc.testing import local_group

    def test_add():
        with local_group("alice", "bob") as (alice, bob):
            assert alice.rpc_sync("bob", operator.add, (1, 2)) == 3
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping

from torch._C._distributed_c10d import HashStore

from rpc.agent import Agent, AgentOptions
from rpc.current import enter_agent, leave_agent
from rpc.group.probes import DatagramProber, Prober
from rpc.group.records import PREFIX
from rpc.group.signed_store import SignedStore
from rpc.runtime.clock import Clock, VirtualClock
from rpc.testing.memory import MemoryHub, MemoryTransport, NetworkScript
from rpc.transports.base import Peer, Transport
from rpc.worker_info import WorkerInfo

__all__ = [
    "MemoryHub",
    "MemoryTransport",
    "NetworkScript",
    "VirtualClock",
    "as_worker",
    "connect",
    "local_group",
]


def connect(
    *names: str,
    hub: MemoryHub | None = None,
    clock: Clock | Mapping[str, Clock] | None = None,
    options: AgentOptions | None = None,
    transport: Callable[[], Transport] | None = None,
) -> list[Agent]:
    """Starts one agent per name, all connected to each other.

    The caller ends each with ``agent.shutdown(graceful=False)``. For the arguments,
    and for a group that ends by itself, see :func:`local_group`.

    Raises:
        TypeError: ``options`` are of another kind, such as those of ``init_rpc``.
        ValueError: a name is given twice.
    """
    _require_different(names)
    if not isinstance(options, AgentOptions | None):
        raise TypeError(f"options={options!r} are a {type(options).__name__}, not AgentOptions")
    clocks = clock if isinstance(clock, Mapping) else dict.fromkeys(names, clock)
    hub = hub or MemoryHub(None if isinstance(clock, Mapping) else clock)
    make = transport or hub.transport
    make_prober: Callable[[], Prober] = DatagramProber if transport else hub.prober
    store = SignedStore(HashStore(), b"", PREFIX)
    agents: list[Agent] = []
    peers: list[Peer] = []
    for rank, name in enumerate(names):
        info = WorkerInfo(name, rank)
        watches = options is not None and options.liveness_timeout > 0
        mine = clocks.get(name)
        agent = Agent(info, 0, make(), options, mine, make_prober() if watches else None)
        agent.store = store
        peers.append(Peer(info, 0, agent.start(), agent.liveness))
        agents.append(agent)
    for agent in agents:
        agent.join(peers)
    return agents


def _require_different(names: tuple[str, ...]) -> None:
    twice = sorted({repr(name) for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"each worker needs a name of its own, but {', '.join(twice)} is repeated")


@contextlib.contextmanager
def local_group(
    *names: str,
    hub: MemoryHub | None = None,
    clock: Clock | Mapping[str, Clock] | None = None,
    options: AgentOptions | None = None,
    transport: Callable[[], Transport] | None = None,
) -> Iterator[list[Agent]]:
    """A group of agents for the length of a ``with`` block, shut down at its end.

    Args:
        names: of the workers, all different; their ids count from 0.
        hub: the network, if faults are wanted.
        clock: e.g. a :class:`rpc.testing.VirtualClock`, or clocks by the workers' names, if they
            tell different times; default real time.
        options: of every agent; with a ``liveness_timeout`` they watch each other.
        transport: makes a transport for each worker, such as ``TensorWireTransport``;
            default through ``hub``.

    Raises:
        TypeError: ``options`` are of another kind, such as those of ``init_rpc``.
        ValueError: a name is given twice.
    """
    agents = connect(*names, hub=hub, clock=clock, options=options, transport=transport)
    try:
        yield agents
    finally:
        for agent in agents:
            agent.shutdown(graceful=False)


@contextlib.contextmanager
def as_worker(agent: Agent) -> Iterator[Agent]:
    """Makes ``agent`` the current one for module-level functions such as ``rpc.rpc_sync``."""
    token = enter_agent(agent)
    try:
        yield agent
    finally:
        leave_agent(token)
