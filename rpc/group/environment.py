"""Reads from a launcher's environment variables as which worker it started this process.

Decides the name, the id, the number of workers and the meeting place under rpcrun, torchrun,
Open MPI, MPICH (or another PMI) and Slurm. Opens nothing. The launchers are asked in that
order, because one may run under another and the inner one set its variables last: workers of
``srun rpcrun`` have the variables of both.
"""

from __future__ import annotations

import enum
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

Variables = Mapping[str, str]

DEFAULT_PORT = 29500
_LOOPBACK = "127.0.0.1"
_ROLE_OF_TORCHRUN = "default"
_NAMELESS_ROLE = "worker"

_FIRST_DERIVED_PORT = 15_000
_DERIVED_PORTS = 10_000

_HOST_GROUP = re.compile(r"([^,\[]*)(?:\[([^\]]+)\])?[^,]*(?:,|$)")


class Launcher(enum.Enum):
    """The launcher that started this process."""

    RPCRUN = "rpcrun"
    TORCHRUN = "torchrun"
    OPEN_MPI = "Open MPI"
    PMI = "MPICH or another PMI"
    SLURM = "Slurm"


@dataclass(frozen=True, slots=True)
class LaunchedPlace:
    """This process's place in its group.

    Args:
        launcher: who set the variables.
        name: the worker's name.
        rank: its id.
        world_size: number of workers; None in a dynamic group.
        init_method: URL of the store at which the group meets.
        life: under rpcrun, which start of its seat this process is, from 1; else 0.
    """

    launcher: Launcher
    name: str
    rank: int
    world_size: int | None
    init_method: str
    life: int = 0


def find_place(variables: Variables) -> LaunchedPlace:
    """Returns the place that the innermost launcher gave this process.

    Raises:
        ValueError: no launcher's variables are there, or one that is needed is missing or
            is no number; names it.
    """
    for variable, read in _READERS.items():
        if variables.get(variable):
            return read(variables)
    raise ValueError(
        "init_rpc() without a name takes its place in the group from the launcher, but the "
        f"environment has none of {', '.join(_READERS)}. Start the program with rpcrun, "
        "torchrun, srun or mpirun, or give init_rpc a name, a rank and a world_size"
    )


def _rpcrun(variables: Variables) -> LaunchedPlace:
    ask = _Asked(Launcher.RPCRUN, variables)
    meeting = variables.get("RPC_INIT_METHOD") or _url(
        ask.text("MASTER_ADDR"), ask.number("MASTER_PORT")
    )
    name, rank = ask.text("RPC_WORKER_NAME"), ask.number("RPC_WORKER_ID")
    life = ask.number("TORCHELASTIC_RESTART_COUNT") + 1
    return LaunchedPlace(Launcher.RPCRUN, name, rank, None, meeting, life)


def _torchrun(variables: Variables) -> LaunchedPlace:
    ask = _Asked(Launcher.TORCHRUN, variables)
    rank = ask.number("RANK")
    # Without WORLD_SIZE, or with an empty one, the group is dynamic.
    size = ask.number("WORLD_SIZE") if variables.get("WORLD_SIZE") else None
    ask.text("MASTER_ADDR")
    ask.number("MASTER_PORT")
    role = variables.get("ROLE_NAME") or _ROLE_OF_TORCHRUN
    name = _name(rank)
    if role != _ROLE_OF_TORCHRUN:
        name = f"{role}:{ask.number('ROLE_RANK')}"
    return LaunchedPlace(Launcher.TORCHRUN, name, rank, size, "env://")


def _open_mpi(variables: Variables) -> LaunchedPlace:
    ask = _Asked(Launcher.OPEN_MPI, variables)
    size = ask.number("OMPI_COMM_WORLD_SIZE")
    is_alone = variables.get("OMPI_COMM_WORLD_LOCAL_SIZE") == str(size)
    job = variables.get("PMIX_NAMESPACE") or variables.get("OMPI_MCA_ess_base_jobid") or ""
    meeting = _url(ask.host(_LOOPBACK if is_alone else None), ask.port(job))
    rank = ask.number("OMPI_COMM_WORLD_RANK")
    return LaunchedPlace(Launcher.OPEN_MPI, _name(rank), rank, size, meeting)


def _pmi(variables: Variables) -> LaunchedPlace:
    ask = _Asked(Launcher.PMI, variables)
    size = ask.number("PMI_SIZE")
    is_alone = variables.get("MPI_LOCALNRANKS") == str(size)
    meeting = _url(ask.host(_LOOPBACK if is_alone else None), ask.port(""))
    rank = ask.number("PMI_RANK")
    return LaunchedPlace(Launcher.PMI, _name(rank), rank, size, meeting)


def _slurm(variables: Variables) -> LaunchedPlace:
    ask = _Asked(Launcher.SLURM, variables)
    of_step = "SLURM_STEP_NUM_TASKS"
    size = ask.number(of_step if variables.get(of_step) else "SLURM_NTASKS")
    nodes = variables.get("SLURM_STEP_NODELIST") or variables.get("SLURM_JOB_NODELIST") or ""
    first = next(hosts_of(nodes), None)
    job = f"{variables.get('SLURM_JOB_ID', '')}.{variables.get('SLURM_STEP_ID', '')}".strip(".")
    meeting = _url(ask.host(first), ask.port(job))
    rank = ask.number("SLURM_PROCID")
    return LaunchedPlace(Launcher.SLURM, _name(rank), rank, size, meeting)


_READERS: dict[str, Callable[[Variables], LaunchedPlace]] = {
    "RPC_WORKER_NAME": _rpcrun,
    "RANK": _torchrun,
    "OMPI_COMM_WORLD_RANK": _open_mpi,
    "PMI_RANK": _pmi,
    "SLURM_PROCID": _slurm,
}
"""By the variable that tells the launcher from the others."""


@dataclass(frozen=True, slots=True)
class _Asked:
    """The variables of one launcher, and errors that name it."""

    launcher: Launcher
    variables: Variables

    def text(self, variable: str) -> str:
        value = self.variables.get(variable)
        if not value:
            raise ValueError(
                f"init_rpc() runs under {self.launcher.value}, but the environment variable "
                f"{variable} is not set; set it for every worker, or give init_rpc a name, "
                "a rank, a world_size and an init_method"
            )
        return value

    def number(self, variable: str) -> int:
        value = self.text(variable)
        if not (value.isascii() and value.isdecimal()):
            raise ValueError(
                f"init_rpc() runs under {self.launcher.value}, and the environment variable "
                f"{variable}={value!r} is no whole number from 0"
            )
        return int(value)

    def host(self, known: str | None) -> str:
        """The host of rank 0: what the user says, or else what the launcher lets us know."""
        return self.variables.get("MASTER_ADDR") or known or self.text("MASTER_ADDR")

    def port(self, job: str) -> int:
        """A port that all workers of a job choose alike, and two jobs rarely share."""
        if self.variables.get("MASTER_PORT"):
            return self.number("MASTER_PORT")
        if not job:
            return DEFAULT_PORT
        # Not hash(), whose value for a text differs between processes.
        return _FIRST_DERIVED_PORT + zlib.crc32(job.encode()) % _DERIVED_PORTS


def hosts_of(nodes: str) -> Iterator[str]:
    """The hosts of a list as Slurm abbreviates it: ``gpu[01-03,7],login`` has five."""
    for prefix, numbers in _HOST_GROUP.findall(nodes):
        if not prefix and not numbers:
            continue
        for part in numbers.split(","):
            first, dash, last = part.partition("-")
            if not dash:
                yield prefix + part
                continue
            for number in range(int(first), int(last) + 1):
                yield f"{prefix}{number:0{len(first)}d}"


def _name(rank: int) -> str:
    return f"{_NAMELESS_ROLE}:{rank}"


def _url(host: str, port: int) -> str:
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
