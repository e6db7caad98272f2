"""The environment of a worker."""

from __future__ import annotations

import pytest

from rpc.group.environment import LaunchedPlace, Launcher, find_place
from tensorwire.launch.plan import Plan, Seat
from tensorwire.launch.roles import Role
from tensorwire.launch.variables import (
    JobFacts,
    LocalPlace,
    inherited_variables,
    visible_device,
    worker_variables,
)
from tests.tensorwire.launch.plans import Job

FACTS = JobFacts("job7", "head", 29400, "tcp://head:1?job=job7", 4)


def of(job: Job, name: str) -> dict[str, str]:
    seat: Seat = job.seat(name)
    plan: Plan = job.plan
    return worker_variables(plan, seat, LocalPlace(1, 2), FACTS)


def test_a_worker_knows_its_place_as_under_torchrun_and_its_seat() -> None:
    job = Job("ps:1,service", "trainer:2,max_restarts=3", nodes=2, at_least=2)
    job.ends("trainer:3", -9)
    assert of(job, "trainer:3") == {
        "RANK": "5",
        "WORLD_SIZE": "6",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "2",
        "ROLE_NAME": "trainer",
        "ROLE_RANK": "3",
        "ROLE_WORLD_SIZE": "4",
        "MASTER_ADDR": "head",
        "MASTER_PORT": "29400",
        "TORCHELASTIC_RESTART_COUNT": "1",
        "TORCHELASTIC_MAX_RESTARTS": "3",
        "TORCHELASTIC_RUN_ID": "job7",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "RPC_WORKER_NAME": "trainer:3",
        "RPC_WORKER_ID": "5",
        "RPC_ROLES": "ps=2/4,trainer=4/8",
        "RPC_SERVICE": "0",
        "RPC_INIT_METHOD": "tcp://head:1?job=job7",
    }
    assert of(job, "ps:1")["RPC_SERVICE"] == "1"


def test_an_agent_that_comes_after_another_died_has_the_free_place_among_those_there() -> None:
    job = Job("trainer:1", nodes=2)
    job.leave(1)
    job.join(2)
    says = of(job, "trainer:1")
    assert (says["GROUP_RANK"], says["GROUP_WORLD_SIZE"]) == ("1", "2")


def test_workers_are_told_how_many_of_each_role_there_can_be() -> None:
    job = Job("ps:3/job,service", "trainer:2", nodes=2)
    job.join(2, of=(Role("trainer", 5, max_restarts=0),))
    assert of(job, "trainer:0")["RPC_ROLES"] == "ps=3/3,trainer=9/14"
    alone = worker_variables(
        job.plan, job.seat("trainer:0"), LocalPlace(0, 2), JobFacts("j", "h", 1, "")
    )
    assert alone["RPC_ROLES"] == "ps=3/3,trainer=9/9"


def test_members_of_a_process_group_count_each_other_only_and_meet_at_a_store_of_their_own() -> (
    None
):
    job = Job("ps:1,service", "ddp:1,pg", nodes=3, at_least=3)
    job.meets("ddp", 1)
    job.leave(1)
    job.all_end("ddp")
    job.meets("ddp", 2)
    says = of(job, "ddp:2")
    counts = {name: says[name] for name in ("RANK", "WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE")}
    assert counts == {"RANK": "1", "WORLD_SIZE": "2", "ROLE_RANK": "1", "ROLE_WORLD_SIZE": "2"}
    assert (says["MASTER_ADDR"], says["MASTER_PORT"]) == ("host", "2")
    assert (says["RPC_WORKER_NAME"], says["RPC_WORKER_ID"]) == ("ddp:2", "5")
    assert says["RPC_INIT_METHOD"] == "tcp://head:1?job=job7"


def test_init_rpc_finds_the_seat() -> None:
    job = Job("ps:1,service", "trainer:2")
    place = LaunchedPlace(Launcher.RPCRUN, "trainer:1", 2, None, "tcp://head:1?job=job7", 1)
    assert find_place(of(job, "trainer:1")) == place


def test_the_environment_of_the_agent_counts_more_than_our_defaults() -> None:
    assert inherited_variables({})["RPC_BACKEND"] == "TENSORWIRE"
    assert inherited_variables({"RPC_BACKEND": "TENSORPIPE"})["RPC_BACKEND"] == "TENSORPIPE"


@pytest.mark.parametrize(("rank", "visible", "device"), [(1, None, "1"), (1, "4, 6", "6")])
def test_a_worker_may_see_one_gpu_alone(rank: int, visible: str | None, device: str) -> None:
    assert visible_device(rank, visible) == device


def test_a_worker_without_a_gpu_to_see_is_refused() -> None:
    with pytest.raises(ValueError, match="local rank 2 has no GPU"):
        visible_device(2, "0,1")
