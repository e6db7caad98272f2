"""Forms a group: transport up, meet the others at the store, tell the agent who they are.

The same for every backend. If anything fails, what was started is closed
before the error is raised, so that a failed ``init_rpc`` leaves nothing behind.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Sequence
from urllib.parse import urlsplit

from torch._C._distributed_c10d import Store

from rpc.agent import Agent, AgentOptions
from rpc.constants import DEFAULT_NUM_WORKER_THREADS
from rpc.group import rendezvous
from rpc.group.exposure import is_loopback, warn_if_exposed
from rpc.group.host_addresses import address_on_the_way_to, host_addresses, outward_address
from rpc.group.job_roles import JobRoles
from rpc.group.keys import read_group_key
from rpc.group.member_list import MemberTable
from rpc.group.membership import Check, Membership
from rpc.group.opening import client_of, opened_for_good, trust_members
from rpc.group.probes import DatagramProber
from rpc.group.records import LIVENESS, NONCE, PREFIX, Record, next_incarnation
from rpc.group.signed_store import SignedStore
from rpc.group.tcp_store import is_address, plain_host
from rpc.options import RpcBackendOptions
from rpc.transports.base import Transport
from rpc.transports.host.identity import usable_cores
from rpc.worker_info import WorkerInfo

Hosts = Callable[[bytes], Sequence[str]]


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
    group_key: bytes | None = b"",
    hosts: Hosts = lambda _: (),
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
        check: raises if the records of the whole group do not fit together; in a dynamic one,
            those of this worker and another.
        kind: the class of the agent.
        group_key: the secret of the group, empty if it has none; None if its transport cannot
            use one, so that what it writes in the store is signed with the environment's.
        hosts: the IP addresses in an address of its transport.

    Raises:
        BringUpError: workers are missing or disagree.
    """
    info, store = WorkerInfo(name, rank), client_of(store, options.bring_up_timeout)
    key = read_group_key(os.environ) if group_key is None else group_key
    trust_members(store, key)
    signed = SignedStore(store, key, PREFIX)
    incarnation = next_incarnation(signed, name, rank)
    host = address_towards(options.init_method, key)
    prober = DatagramProber(host, key) if options.liveness_timeout else None
    agent = kind(info, incarnation, transport, _agent_options(options), prober=prober)
    agent.store = signed
    try:
        address = agent.start()
        warn_if_exposed(rank, hosts(address), group_key is not None, bool(group_key))
        extras = {LIVENESS: agent.liveness, NONCE: secrets.token_hex(8)}
        me = Record(name, rank, world_size, incarnation, backend, address, extras=extras)
        if world_size is None:
            has_seat = name == os.environ.get("RPC_WORKER_NAME")  # else names are the program's own
            roles = JobRoles.of(os.environ) if has_seat else JobRoles()
            agent.membership = Membership(agent, MemberTable(signed), me, check, roles)
            agent.membership.join()
        else:
            records = rendezvous.meet(signed, me, options.bring_up_timeout)
            check(records)
            agent.join([record.peer() for record in records])
    except BaseException:
        agent.shutdown(graceful=False)
        raise
    opened_for_good(store)
    return agent


def _agent_options(options: RpcBackendOptions) -> AgentOptions:
    threads = getattr(options, "num_worker_threads", DEFAULT_NUM_WORKER_THREADS)
    return AgentOptions(
        num_worker_threads=threads,
        rpc_timeout=options.rpc_timeout,
        shutdown_timeout=options.shutdown_timeout or 0.0,
        liveness_timeout=options.liveness_timeout or 0.0,
    )


def address_towards(init_method: str, group_key: bytes = b"") -> str | None:
    """This host's address on the network where the group's store is; None if that is here.

    So a group on one host listens on the loopback interface only. A host's own name may stand
    for its loopback interface there, as Debian has it for ``127.0.1.1``, and for another address
    elsewhere: a group with a key, of which torchrun does not say that it is on one host, then
    listens where others reach this host.

    Args:
        init_method: where the group's store is.
        group_key: the group's, empty if it has none.
    """
    host = _host_of_store(init_method)
    mine = _address_towards(host)
    if mine is None or not is_loopback(mine):
        return mine
    is_name = host is not None and host != "localhost" and not is_address(host)
    if is_name and group_key and not _is_on_one_host(init_method):
        return outward_address(host_addresses())
    return None


def _is_on_one_host(init_method: str) -> bool:
    """True if torchrun says that it started all workers here."""
    workers = os.environ.get("LOCAL_WORLD_SIZE")
    is_torchruns = urlsplit(init_method).scheme == "env" and workers is not None
    return is_torchruns and workers == os.environ.get("WORLD_SIZE")


def prefers_tcp(init_method: str, world_size: int | None) -> bool:
    """True if torch carries frames over TCP unless the options say otherwise.

    It does where workers come and go, and where they share cores; ``TensorPipeTransport`` says
    why.

    Args:
        init_method: where the group's store is.
        world_size: how many workers there are; None if they come and go.
    """
    return world_size is None or is_crowded(init_method, world_size)


def is_crowded(init_method: str, world_size: int) -> bool:
    """True if a static group is known to have more workers on this host than it has cores.

    They are all here if the store is a file, or at a loopback address; how many of them
    torchrun started here, it says itself.
    """
    workers, scheme = os.environ.get("LOCAL_WORLD_SIZE", ""), urlsplit(init_method).scheme
    if scheme == "env" and workers.isdecimal():
        return int(workers) > usable_cores()
    mine = _address_towards(_host_of_store(init_method))
    are_here = scheme == "file" or (mine is not None and is_loopback(mine))
    return are_here and world_size > usable_cores()


def _host_of_store(init_method: str) -> str | None:
    parts = urlsplit(init_method)
    return os.environ.get("MASTER_ADDR") if parts.scheme == "env" else parts.hostname


def _address_towards(host: str | None) -> str | None:
    """This host's address on the way to another; None if there is no way, or no other."""
    return address_on_the_way_to(plain_host(host), 9) if host else None
