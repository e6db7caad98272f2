"""Forms a group: transport up, meet the others at the store, tell the agent who they are.

The same for every backend. If anything fails, what was started is closed
before the error is raised, so that a failed ``init_rpc`` leaves nothing behind.
"""

from __future__ import annotations

from collections.abc import Callable

from torch._C._distributed_c10d import Store

from rpc import rendezvous
from rpc.agent import Agent, AgentOptions
from rpc.constants import DEFAULT_NUM_WORKER_THREADS
from rpc.membership import Membership, peer_of
from rpc.options import RpcBackendOptions
from rpc.rendezvous import Record
from rpc.transports.base import Transport
from rpc.worker_info import WorkerInfo

Check = Callable[[list[Record]], None]


def form_group(
    backend: str,
    store: Store,
    name: str,
    rank: int,
    world_size: int | None,
    options: RpcBackendOptions,
    transport: Transport,
    check: Check,
    kind: type[Agent] = Agent,
) -> Agent:
    """Brings one worker into its group.

    Args:
        backend: its name, which all workers must share.
        store: where they meet.
        name: of this worker.
        rank: its id.
        world_size: how many workers there are; None joins a dynamic group.
        options: timeouts and threads.
        transport: not started yet.
        check: raises if the records of the whole group do not fit together.
        kind: the class of the agent.

    Raises:
        BringUpError: workers are missing or disagree.
    """
    info = WorkerInfo(name, rank)
    incarnation = rendezvous.next_incarnation(store, name)
    agent = kind(info, incarnation, transport, _agent_options(options))
    agent.store = store
    try:
        me = Record(name, rank, world_size, incarnation, backend, agent.start())
        if world_size is None:
            agent.membership = Membership(agent, store, me)
            agent.membership.join()
        else:
            records = rendezvous.meet(store, me, options.bring_up_timeout)
            check(records)
            agent.join([peer_of(record) for record in records])
    except BaseException:
        agent.shutdown(graceful=False)
        raise
    return agent


def _agent_options(options: RpcBackendOptions) -> AgentOptions:
    threads = getattr(options, "num_worker_threads", DEFAULT_NUM_WORKER_THREADS)
    return AgentOptions(
        num_worker_threads=threads,
        rpc_timeout=options.rpc_timeout,
        shutdown_timeout=options.shutdown_timeout or 0.0,
    )
