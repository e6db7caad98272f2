"""The environment variables of a worker. Pure: takes the plan, returns the variables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import quote

from rpc.extend import JobRole, JobRoles
from tensorwire.launch.plan import Plan, Seat
from tensorwire.launch.roles import Share

VARIABLE = "RPC_ROLES"


@dataclass(frozen=True, slots=True)
class JobFacts:
    """The facts that all workers of an agent have in common.

    Args:
        run_id: of the job.
        host: of torch's store, which ``init_process_group`` uses.
        port: likewise.
        group_url: where the workers' group meets.
        max_nodes: agents that there can be; 0 for those that there are.
    """

    run_id: str
    host: str
    port: int
    group_url: str
    max_nodes: int = 0


@dataclass(frozen=True, slots=True)
class LocalPlace:
    """A worker's place among those of its role on its agent."""

    rank: int
    size: int


def worker_variables(plan: Plan, seat: Seat, local: LocalPlace, facts: JobFacts) -> dict[str, str]:
    """The variables that torchrun sets, and those by which ``rpc.init_rpc()`` finds its seat.

    ``RANK`` and ``WORLD_SIZE`` count the workers that form a process group; elsewhere they
    count all seats of the job that there are as the worker starts.
    """
    state = plan.role(seat.role)
    host, port = facts.host, str(facts.port)
    rank, size = seat.id, len(plan.seats)
    role_rank, role_size = seat.number, sum(1 for _ in plan.seats_of(seat.role))
    if state.role.process_group:
        host, _, port = state.meeting.rpartition(":")
        rank = role_rank = state.members.index(seat.number)
        size = role_size = len(state.members)
    places = {node.id: node.place for node in plan.nodes}
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(local.rank),
        "LOCAL_WORLD_SIZE": str(local.size),
        "GROUP_RANK": str(places[seat.holder]),
        "GROUP_WORLD_SIZE": str(max(places.values()) + 1),
        "ROLE_NAME": seat.role,
        "ROLE_RANK": str(role_rank),
        "ROLE_WORLD_SIZE": str(role_size),
        "MASTER_ADDR": host,
        "MASTER_PORT": port,
        "TORCHELASTIC_RESTART_COUNT": str(seat.life - 1),
        "TORCHELASTIC_MAX_RESTARTS": str(state.role.max_restarts or 0),
        "TORCHELASTIC_RUN_ID": facts.run_id,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "RPC_WORKER_NAME": seat.name,
        "RPC_WORKER_ID": str(seat.id),
        VARIABLE: _job_roles(plan, facts.max_nodes).encode(),
        "RPC_SERVICE": "1" if state.role.service else "0",
        "RPC_INIT_METHOD": facts.group_url,
    }


def _job_roles(plan: Plan, max_nodes: int) -> JobRoles:
    """The roles, with how many workers each has, and can have if agents come like those there."""
    by_name = {}
    for state in plan.roles:
        role, seats = state.role, sum(1 for _ in plan.seats_of(state.role.name))
        most = role.count
        if role.share is Share.AGENT:
            offers = [node.offered(role.name) for node in plan.nodes]
            most = sum(offers) + max(offers) * max(0, max_nodes - len(offers))
        by_name[role.name] = JobRole(seats, max(seats, most))
    return JobRoles(by_name)


def group_url(host: str, port: int, job: str) -> str:
    """The URL at which the workers of one job meet, in a store that may have several's."""
    bracketed = f"[{host}]" if ":" in host else host
    return f"tcp://{bracketed}:{port}?job={quote(job, safe='')}"


def inherited_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables a worker gets beyond that unless the environment of the agent says otherwise."""
    defaults = {"RPC_BACKEND": "TENSORWIRE", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
    return {name: environment.get(name, value) for name, value in defaults.items()}


def visible_device(local_rank: int, visible: str | None) -> str:
    """The GPU that ``--virtual-local-rank`` leaves a worker, as ``CUDA_VISIBLE_DEVICES``.

    Args:
        local_rank: of the worker.
        visible: the agent's own ``CUDA_VISIBLE_DEVICES``, if set.

    Raises:
        ValueError: the agent has fewer GPUs than workers.
    """
    if visible is None:
        return str(local_rank)
    devices = [device.strip() for device in visible.split(",")]
    if local_rank >= len(devices):
        raise ValueError(
            f"the worker with local rank {local_rank} has no GPU: CUDA_VISIBLE_DEVICES={visible}"
        )
    return devices[local_rank]
