"""The place in its group that a launcher's variables give a process."""

from __future__ import annotations

import pytest

from rpc.group.environment import LaunchedPlace, Launcher, find_place, hosts_of

ADDRESS = {"MASTER_ADDR": "head", "MASTER_PORT": "29400"}
RPCRUN = {
    "RPC_WORKER_NAME": "trainer:3",
    "RPC_WORKER_ID": "7",
    "TORCHELASTIC_RESTART_COUNT": "1",
    **ADDRESS,
}
TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4", "ROLE_NAME": "default", "ROLE_RANK": "1", **ADDRESS}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}
PMI = {"PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALNRANKS": "4"}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_JOB_NODELIST": "gpu[07-08],cpu1",
    "MASTER_PORT": "29400",
}


@pytest.mark.parametrize(
    ("variables", "place"),
    [
        (RPCRUN, LaunchedPlace(Launcher.RPCRUN, "trainer:3", 7, None, "tcp://head:29400", 2)),
        (
            RPCRUN | {"RPC_INIT_METHOD": "tcp://store:1"},
            LaunchedPlace(Launcher.RPCRUN, "trainer:3", 7, None, "tcp://store:1", 2),
        ),
        (
            RPCRUN | {"MASTER_ADDR": "::1"},
            LaunchedPlace(Launcher.RPCRUN, "trainer:3", 7, None, "tcp://[::1]:29400", 2),
        ),
        (
            RPCRUN | TORCHRUN,
            LaunchedPlace(Launcher.RPCRUN, "trainer:3", 7, None, "tcp://head:29400", 2),
        ),
        (TORCHRUN, LaunchedPlace(Launcher.TORCHRUN, "worker:1", 1, 4, "env://")),
        (
            TORCHRUN | {"ROLE_NAME": "reader", "ROLE_RANK": "0"},
            LaunchedPlace(Launcher.TORCHRUN, "reader:0", 1, 4, "env://"),
        ),
        (
            TORCHRUN | {"WORLD_SIZE": ""},
            LaunchedPlace(Launcher.TORCHRUN, "worker:1", 1, None, "env://"),
        ),
        (
            OPEN_MPI | ADDRESS,
            LaunchedPlace(Launcher.OPEN_MPI, "worker:2", 2, 4, "tcp://head:29400"),
        ),
        (OPEN_MPI, LaunchedPlace(Launcher.OPEN_MPI, "worker:2", 2, 4, "tcp://127.0.0.1:29500")),
        (PMI, LaunchedPlace(Launcher.PMI, "worker:2", 2, 4, "tcp://127.0.0.1:29500")),
        (PMI | SLURM, LaunchedPlace(Launcher.PMI, "worker:2", 2, 4, "tcp://127.0.0.1:29400")),
        (SLURM, LaunchedPlace(Launcher.SLURM, "worker:5", 5, 8, "tcp://gpu07:29400")),
        (
            SLURM | {"SLURM_STEP_NUM_TASKS": "6", "SLURM_STEP_NODELIST": "cpu1"},
            LaunchedPlace(Launcher.SLURM, "worker:5", 5, 6, "tcp://cpu1:29400"),
        ),
    ],
)
def test_a_process_finds_its_place(variables: dict[str, str], place: LaunchedPlace) -> None:
    assert find_place(variables) == place


@pytest.mark.parametrize(
    ("variables", "missing"),
    [
        (RPCRUN, "RPC_WORKER_ID"),
        (RPCRUN, "TORCHELASTIC_RESTART_COUNT"),
        (RPCRUN, "MASTER_ADDR"),
        (RPCRUN, "MASTER_PORT"),
        (TORCHRUN, "MASTER_ADDR"),
        (TORCHRUN, "MASTER_PORT"),
        (OPEN_MPI, "OMPI_COMM_WORLD_SIZE"),
        (OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, "MASTER_ADDR"),
        (PMI, "PMI_SIZE"),
        (PMI | {"MPI_LOCALNRANKS": "2"}, "MASTER_ADDR"),
        (SLURM, "SLURM_NTASKS"),
    ],
)
def test_a_variable_that_is_missing_is_named(variables: dict[str, str], missing: str) -> None:
    with pytest.raises(ValueError, match=rf"the environment variable {missing} is not set"):
        find_place({name: variables[name] for name in variables if name != missing})


@pytest.mark.parametrize(
    ("variables", "wrong"),
    [
        (RPCRUN, "RPC_WORKER_ID"),
        (TORCHRUN, "RANK"),
        (TORCHRUN, "WORLD_SIZE"),
        (TORCHRUN, "MASTER_PORT"),
        (OPEN_MPI, "OMPI_COMM_WORLD_RANK"),
        (PMI, "PMI_RANK"),
        (SLURM, "SLURM_PROCID"),
    ],
)
def test_a_variable_that_is_no_number_is_named(variables: dict[str, str], wrong: str) -> None:
    with pytest.raises(ValueError, match=rf"variable {wrong}='two' is no whole number"):
        find_place(variables | {wrong: "two"})


def test_the_nodes_of_a_slurm_job_are_needed_where_no_address_is_given() -> None:
    known = {name: value for name, value in SLURM.items() if name != "SLURM_JOB_NODELIST"}
    with pytest.raises(ValueError, match=r"runs under Slurm, but .* MASTER_ADDR is not set"):
        find_place(known)


def test_without_a_launcher_the_error_says_how_to_start_the_program() -> None:
    with pytest.raises(ValueError, match=r"none of RPC_WORKER_NAME, RANK, .*rpcrun, torchrun"):
        find_place(ADDRESS)


def test_workers_of_one_slurm_step_choose_one_port_and_those_of_another_another() -> None:
    def port(**variables: str) -> str:
        known = {name: value for name, value in SLURM.items() if name != "MASTER_PORT"}
        return find_place(known | variables).init_method.rpartition(":")[2]

    first = port(SLURM_JOB_ID="4711", SLURM_STEP_ID="0")
    assert first == port(SLURM_JOB_ID="4711", SLURM_STEP_ID="0", SLURM_PROCID="6")
    others = {port(SLURM_JOB_ID="4711", SLURM_STEP_ID="1"), port(SLURM_JOB_ID="4712")}
    assert len(others - {first}) == 2
    assert 15_000 <= int(first) < 25_000


@pytest.mark.parametrize(
    ("nodes", "hosts"),
    [
        ("", []),
        ("node1", ["node1"]),
        ("gpu[08-10,3],login,b2", ["gpu08", "gpu09", "gpu10", "gpu3", "login", "b2"]),
    ],
)
def test_slurms_abbreviated_lists_are_spelt_out(nodes: str, hosts: list[str]) -> None:
    assert list(hosts_of(nodes)) == hosts
