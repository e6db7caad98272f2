"""The fate of a job's seats when agents come and go and workers end."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tensorwire.launch.plan import Order, Phase
from tensorwire.launch.roles import RoleError
from tensorwire.launch.seats import Joined
from tests.tensorwire.launch.plans import SIGKILL, Job, node, roles


def test_a_job_begins_when_enough_agents_are_there() -> None:
    job = Job("ps:1,service", "trainer:2", at_least=2)
    assert job.plan.phase is Phase.GATHERING
    assert job.plan.seats == ()
    job.join(1)
    assert job.plan.phase is Phase.RUNNING
    assert job.says("ps") == "0:run1 1:run1"
    assert job.says("trainer") == "0:run1 0:run1 1:run1 1:run1"


def test_ids_count_the_roles_one_after_the_other() -> None:
    job = Job("ps:1,service", "trainer:2", nodes=2, at_least=2)
    names = [seat.name for seat in job.plan.seats]
    assert names == ["ps:0", "ps:1", "trainer:0", "trainer:1", "trainer:2", "trainer:3"]
    assert [seat.id for seat in job.plan.seats] == list(range(6))


def test_only_the_worker_that_failed_starts_again() -> None:
    job = Job("ps:1,service", "trainer:2,max_restarts=1")
    job.ends("trainer:1", SIGKILL)
    assert job.says("trainer") == "0:run1 0:run2"
    assert job.says("ps") == "0:run1"
    assert job.plan.phase is Phase.RUNNING


def test_news_of_an_earlier_life_is_no_news() -> None:
    job = Job("trainer:2,max_restarts=1")
    job.ends("trainer:1", SIGKILL)
    before = job.plan
    job.ends("trainer:1", SIGKILL, life=1)
    assert job.plan == before


def test_a_job_fails_when_a_workers_restarts_are_spent() -> None:
    job = Job("trainer:2,max_restarts=1")
    job.ends("trainer:0", SIGKILL)
    job.ends("trainer:1", SIGKILL)  # each worker has its own
    job.ends("trainer:0", 1)
    assert job.plan.phase is Phase.FAILED
    assert job.plan.failure is not None
    failure = job.plan.failure
    assert (failure.who, failure.exit_code, failure.life) == ("trainer:0", 1, 2)
    before = job.plan
    job.ends("trainer:1", 1)
    assert job.plan == before  # the first failure counts


def test_a_role_has_restarts_of_its_own() -> None:
    job = Job("trainer:2,max_restarts=1,restart=role")
    job.ends("trainer:0", SIGKILL)
    job.all_end("trainer")
    job.ends("trainer:1", SIGKILL)
    assert job.plan.phase is Phase.FAILED


def test_a_crash_loop_waits_longer_each_time_and_a_long_life_ends_it() -> None:
    job = Job("trainer:1,max_restarts=20")
    pauses = []
    for soon in [True] * 9 + [False, True, True]:
        job.ends("trainer:0", 1, soon=soon)
        pauses.append(job.seat("trainer:0").pause)
    assert pauses == [0, 1, 2, 4, 8, 16, 32, 60, 60, 0, 1, 2]


def test_services_end_when_the_others_are_done() -> None:
    job = Job("ps:2,service", "trainer:2")
    job.ends("trainer:0")
    assert job.says("ps") == "0:run1 0:run1"
    job.ends("trainer:1")
    assert job.plan.phase is Phase.ENDING
    assert job.says("ps") == "0:stop1 0:stop1"
    job.ends("ps:0", -15)
    job.ends("ps:1", 1)  # however it ends then
    assert job.plan.phase is Phase.SUCCEEDED


def test_a_job_of_services_alone_lasts_as_long_as_they_do() -> None:
    job = Job("ps:2,service")
    job.ends("ps:0")
    assert job.plan.phase is Phase.RUNNING
    job.ends("ps:1")
    assert job.plan.phase is Phase.SUCCEEDED


def test_an_agent_that_joins_brings_seats_and_disturbs_nobody() -> None:
    job = Job("ps:1/job,service", "trainer:2")
    before = job.plan.seats
    job.join(1)
    assert job.plan.seats[: len(before)] == before
    assert job.says("trainer") == "0:run1 0:run1 1:run1 1:run1"
    assert job.says("ps") == "0:run1"
    assert job.seat("trainer:2").id == 3


def test_an_agent_that_goes_leaves_its_seats_to_the_next_that_joins() -> None:
    job = Job("trainer:2", nodes=2)
    job.leave(0)
    assert job.says("trainer") == "-:nothing1 -:nothing1 1:run1 1:run1"
    job.join(2)
    assert job.says("trainer") == "2:run2 2:run2 1:run1 1:run1"
    job.join(3)
    assert job.says("trainer") == "2:run2 2:run2 1:run1 1:run1 3:run1 3:run1"


def test_spare_seats_take_the_place_of_those_of_an_agent_that_died() -> None:
    job = Job("ps:1,service", "trainer:2", nodes=2, spare=2)
    job.leave(0)
    assert job.says("ps") == "1:run2 1:run1"
    assert job.says("trainer") == "1:run2 -:nothing1 1:run1 1:run1"


def test_a_takeover_costs_no_restart() -> None:
    job = Job("trainer:1,max_restarts=0", nodes=2, spare=1)
    job.leave(0)
    assert job.says("trainer") == "1:run2 1:run1"
    assert job.seat("trainer:0").restarts.spent == 0


def test_agents_share_out_a_total_and_take_over_each_others_part() -> None:
    job = Job("ps:5/job,service", "trainer:1", nodes=2, at_least=2)
    assert job.says("ps") == "0:run1 1:run1 0:run1 1:run1 0:run1"
    job.leave(1)
    assert job.says("ps") == "0:run1 0:run2 0:run1 0:run2 0:run1"


def test_agents_may_have_different_roles() -> None:
    job = Job("ps:1,service", at_least=2)
    job.join(1, of=roles("trainer:3"))
    assert job.says("ps") == "0:run1"
    assert job.says("trainer") == "1:run1 1:run1 1:run1"
    with pytest.raises(RoleError, match=r"role 'ps': the agents disagree .* that on host2"):
        job.join(2, of=roles("ps:1"))


def test_work_of_an_agent_that_went_is_not_waited_for_if_enough_are_left() -> None:
    job = Job("trainer:1", nodes=2, at_least=1)
    job.leave(1)
    job.ends("trainer:0")
    assert job.plan.phase is Phase.SUCCEEDED


def test_work_of_an_agent_that_went_is_waited_for_if_too_few_are_left() -> None:
    job = Job("trainer:1", nodes=2, at_least=2)
    job.leave(1)
    job.ends("trainer:0")
    assert job.plan.phase is Phase.RUNNING
    job.join(2)
    assert job.says("trainer") == "0:done1 2:run2"


def test_a_role_stops_as_a_whole_and_begins_when_all_have_stopped() -> None:
    job = Job("ps:1,service", "trainer:3,restart=role,max_restarts=1", nodes=1)
    job.ends("trainer:0")
    job.ends("trainer:1", 1)
    assert job.says("trainer") == "0:wait1 0:wait1 0:stop1"
    assert job.says("ps") == "0:run1"
    job.ends("trainer:2", -15)
    assert job.says("trainer") == "0:run2 0:run2 0:run2"


def test_a_role_that_starts_again_as_a_whole_lets_others_join() -> None:
    job = Job("trainer:1,restart=role")
    job.join(1)
    assert job.says("trainer") == "0:run1 1:run1"


def test_the_whole_job_starts_again_where_the_role_says_so() -> None:
    job = Job("ps:1,service", "trainer:2,restart=job,max_restarts=1")
    job.ends("trainer:0", 1)
    assert job.says("ps") == "0:stop1"
    assert job.says("trainer") == "0:wait1 0:stop1"
    job.all_end("trainer")
    assert job.says("trainer") == "0:wait1 0:wait1"
    job.all_end("ps")
    assert job.says("ps") == "0:run2"
    assert job.says("trainer") == "0:run2 0:run2"
    job.ends("trainer:1", 1)
    assert job.plan.phase is Phase.FAILED


def test_a_job_that_starts_again_as_a_whole_does_so_when_an_agent_joins_or_goes() -> None:
    job = Job("ps:1/job,service", "trainer:1,restart=job")
    for change, seats in ((job.join, "0:run2 1:run1"), (job.leave, "0:run3 -:nothing1")):
        change(1)
        assert job.says("ps")[:6] == "0:stop"
        job.all_end("trainer")
        job.all_end("ps")
        assert job.says("trainer") == seats
        assert job.plan.phase is Phase.RUNNING


def test_a_process_group_begins_when_it_has_a_store() -> None:
    job = Job("ps:1,service", "ddp:2,pg,max_restarts=2")
    state = job.plan.role("ddp")
    assert (state.attempt, state.members, state.meeting) == (1, (0, 1), "")
    assert job.says("ddp") == "0:wait0 0:wait0"
    job.meets("ddp", 1)
    assert job.says("ddp") == "0:run1 0:run1"
    job.ends("ddp:1", SIGKILL)
    job.all_end("ddp")
    assert job.says("ddp") == "0:wait1 0:wait1"
    assert job.plan.role("ddp").attempt == 2
    assert job.says("ps") == "0:run1"
    job.meets("ddp", 2)
    assert job.says("ddp") == "0:run2 0:run2"
    assert job.plan.role("ddp").meeting == "host:2"


def test_a_process_group_is_formed_anew_when_an_agent_joins_or_goes() -> None:
    job = Job("ddp:1,pg", at_least=1)
    job.meets("ddp", 1)
    job.join(1)
    job.all_end("ddp")
    assert job.plan.role("ddp").members == (0, 1)
    job.join(2)  # before anybody has begun: only who is in it changes
    assert job.plan.role("ddp").members == (0, 1, 2)
    assert job.says("ddp") == "0:wait1 1:wait0 2:wait0"
    job.meets("ddp", 3)
    job.leave(0)
    job.all_end("ddp")
    assert job.plan.role("ddp").members == (1, 2)
    job.meets("ddp", 4)
    assert job.says("ddp") == "-:nothing2 1:run2 2:run2"
    assert job.plan.role("ddp").restarts.spent == 0


def test_word_of_a_store_for_an_earlier_attempt_is_ignored() -> None:
    job = Job("ddp:1,pg")
    old = job.plan
    job.join(1)
    new = job.plan
    assert new.role("ddp").attempt == old.role("ddp").attempt + 1
    job.plan = old
    job.meets("ddp", 1)
    from tensorwire.launch.seats import Met, apply

    assert apply(new, [Met("ddp", old.role("ddp").attempt, "host:1")]) == new


def test_nobody_joins_a_process_group_of_which_some_are_done() -> None:
    job = Job("ddp:2,pg")
    job.meets("ddp", 1)
    job.ends("ddp:0")
    job.join(1)
    assert job.says("ddp") == "0:done1 0:run1"
    job.ends("ddp:1")
    assert job.plan.phase is Phase.SUCCEEDED


def test_an_agent_may_leave_while_the_job_ends() -> None:
    job = Job("ps:1,service", "trainer:1", nodes=2)
    job.ends("trainer:0")
    job.ends("trainer:1")
    job.leave(1)
    assert job.plan.phase is Phase.ENDING
    job.all_end("ps")
    assert job.plan.phase is Phase.SUCCEEDED
    job.join(3)
    assert [node.number for node in job.plan.nodes] == [0]


def test_a_worker_that_has_yet_to_stop_is_waited_for_when_another_agent_goes() -> None:
    job = Job("ddp:1,pg,max_restarts=1", nodes=3, at_least=3)
    job.meets("ddp", 1)
    job.ends("ddp:0", SIGKILL)
    job.leave(1)
    assert job.seat("ddp:2").order is Order.STOP
    assert job.plan.role("ddp").gathers
    job.all_end("ddp")
    assert job.plan.role("ddp").members == (0, 2)


class TestAnAgentThatJoinedLater:
    """Its failures are its own affair, as long as the job has enough agents without it."""

    def test_is_taken_out_when_its_restarts_are_spent_and_the_others_go_on(self) -> None:
        job = Job("trainer:1,max_restarts=1", nodes=2, spare=1)
        job.ends("trainer:1", 3)
        assert job.says("trainer") == "0:run1 1:run2"
        job.ends("trainer:1", 3)
        assert job.plan.phase is Phase.RUNNING
        assert [node.id for node in job.plan.nodes] == ["node0"]
        dismissal = job.plan.dismissal("node1")
        assert dismissal is not None
        assert (dismissal.failure.who, dismissal.failure.life) == ("trainer:1", 2)
        assert job.says("trainer") == "0:run1 -:nothing2", "no spare seat is to be the next to go"
        job.ends("trainer:0", 3)
        assert job.says("trainer") == "0:run2 -:nothing2", "the others have all their restarts"

    def test_leaves_its_seat_to_the_next_which_begins_afresh(self) -> None:
        job = Job("trainer:1,max_restarts=1", nodes=2)
        for _ in range(2):
            job.ends("trainer:1", 3)
        job.join(2)
        assert job.says("trainer") == "0:run1 2:run3"
        job.ends("trainer:1", 3)
        assert job.says("trainer") == "0:run1 2:run4"

    def test_leaves_workers_of_the_job_to_the_others(self) -> None:
        job = Job("ps:2/job,service,max_restarts=0", "trainer:1", nodes=2, spare=1)
        job.leave(0)
        job.join(2)
        assert job.says("ps") == "1:run2 1:run2"
        job.ends("ps:1", SIGKILL)
        assert job.says("ps") == "2:run3 2:run3"
        assert job.plan.phase is Phase.RUNNING

    @pytest.mark.parametrize("scope", ["restart=role", "restart=job", "pg"])
    def test_spends_its_own_restarts_where_others_start_again_with_it(self, scope: str) -> None:
        job = Job(f"trainer:1,max_restarts=1,{scope}", nodes=2)
        for port in (1, 2):
            job.all_end("trainer")
            job.meets("trainer", port)
            job.ends("trainer:1", 3)
        job.all_end("trainer")
        job.meets("trainer", 3)
        assert [node.id for node in job.plan.nodes] == ["node0"]
        assert job.says("trainer").startswith("0:run")
        job.ends("trainer:0", 3)
        assert job.plan.phase is Phase.RUNNING

    def test_ends_the_job_if_that_has_not_enough_agents_without_it(self) -> None:
        job = Job("trainer:1", nodes=2)
        job.leave(0)
        job.ends("trainer:1", 3)
        assert job.plan.phase is Phase.FAILED
        together = Job("trainer:1", nodes=2, at_least=2)
        together.ends("trainer:1", 3)
        assert together.plan.phase is Phase.FAILED

    def test_ends_the_job_if_it_hosts_the_store(self) -> None:
        job = Job("trainer:1", nodes=1)
        host = replace(node(1, job.roles), hosts=True)
        job.happens(Joined(host, job.roles))
        job.ends("trainer:1", 3)
        assert job.plan.phase is Phase.FAILED
