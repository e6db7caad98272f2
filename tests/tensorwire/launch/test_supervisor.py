"""The deeds of one agent, given the plan and what its processes do."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from tensorwire.launch.exits import parse_exit_codes
from tensorwire.launch.plan import Order, Phase, Plan
from tensorwire.launch.roles import Role
from tensorwire.launch.seats import Left, Met, apply
from tensorwire.launch.supervisor import (
    LOST_SECONDS,
    REPEAT_SECONDS,
    Effect,
    Ended,
    HostStore,
    Kill,
    Start,
    Stop,
    Supervisor,
)
from tests.tensorwire.launch.plans import node, roles

GRACE = 30.0
PATIENCE = 600.0


class Agent:
    """A supervisor, its clock, and the plan, to which it reports at once."""

    def __init__(self, *texts: str, at_least: int = 1, spare: int = 0) -> None:
        self.roles = roles(*texts)
        self.supervisor = make(0, self.roles, spare)
        self.now = 100.0
        self.plan = Plan(at_least)

    def round(
        self,
        *ended: Ended,
        silent: Iterable[str] = (),
        lost: Iterable[str] = (),
        ending: Iterable[str] = (),
        after: float = 0.0,
    ) -> list[Effect]:
        self.now += after
        self.plan = apply(self.plan, self.supervisor.report(self.now, self.plan, ended, silent))
        return self.supervisor.act(self.now, self.plan, lost, ending)


def make(number: int, of: tuple[Role, ...], spare: int = 0) -> Supervisor:
    return Supervisor(node(number, of, spare), of, GRACE, PATIENCE)


def names(effects: Iterable[Effect]) -> list[str]:
    return [
        f"{type(each).__name__} {each.seat.name if isinstance(each, Start) else each.seat}"
        for each in effects
        if not isinstance(each, HostStore)
    ]


def test_an_agent_joins_and_starts_its_workers_once() -> None:
    agent = Agent("ps:1,service", "trainer:2")
    assert names(agent.round()) == ["Start ps:0", "Start trainer:0", "Start trainer:1"]
    assert agent.round() == []
    assert list(agent.supervisor.running) == [0, 1, 2]


def test_a_worker_that_died_is_started_again_in_its_next_life() -> None:
    agent = Agent("trainer:1,max_restarts=1")
    agent.round()
    (start,) = agent.round(Ended(0, -9))
    assert isinstance(start, Start)
    assert (start.seat.name, start.seat.life) == ("trainer:0", 2)


def test_a_crash_loop_is_slowed_down() -> None:
    agent = Agent("trainer:1,max_restarts=5")
    agent.round()
    assert names(agent.round(Ended(0, 1, joined=True))) == ["Start trainer:0"]
    assert names(agent.round(Ended(0, 1, joined=True), after=1.0)) == []
    assert names(agent.round(after=0.9)) == []
    assert names(agent.round(after=0.2)) == ["Start trainer:0"]
    assert names(agent.round(Ended(0, 1, joined=True), after=11.0)) == [
        "Start trainer:0"
    ]  # it ran for long


def with_exits(text: str, *texts: str) -> Agent:
    agent = Agent(*texts)
    exits = parse_exit_codes(text)
    agent.supervisor = Supervisor(node(0, agent.roles), agent.roles, GRACE, PATIENCE, exits=exits)
    agent.round()
    return agent


def test_ends_that_the_flag_names_are_worth_a_restart_or_not() -> None:
    agent = with_exits("retry:137;fail:2,*", "trainer:1,max_restarts=9")
    assert names(agent.round(Ended(0, -9))) == ["Start trainer:0"]
    assert names(agent.round(Ended(0, 3))) == []
    assert agent.plan.phase is Phase.FAILED
    agent = with_exits("fail:2", "trainer:1,max_restarts=9")
    assert names(agent.round(Ended(0, 1))) == ["Start trainer:0"]
    agent.round(Ended(0, 2))
    assert agent.plan.phase is Phase.FAILED


def test_the_same_mistake_twice_before_a_worker_joins_ends_the_job() -> None:
    agent = Agent("trainer:1,max_restarts=9")
    agent.round()
    assert names(agent.round(Ended(0, 2, said="usage: train.py"))) == ["Start trainer:0"]
    agent.round(Ended(0, 2, said="usage: train.py"))
    assert agent.plan.phase is Phase.FAILED
    assert agent.plan.failure is not None
    told, said = agent.plan.failure.said.splitlines()
    assert told.startswith("It failed twice in the same way")
    assert said == "usage: train.py"


@pytest.mark.parametrize(
    ("flag", "role", "ends"),
    [
        ("retry:2", "trainer:1,max_restarts=9", [Ended(0, 2), Ended(0, 2)]),
        ("", "trainer:1,max_restarts=9", [Ended(0, 2), Ended(0, 1), Ended(0, 2)]),
        ("", "trainer:1,max_restarts=9", [Ended(0, -9), Ended(0, -9)]),
        ("", "trainer:1,max_restarts=9", [Ended(0, 1, joined=True), Ended(0, 1), Ended(0, 1)]),
    ],
    ids=["the flag says so", "another mistake", "a signal", "it had joined"],
)
def test_other_ends_are_tried_again_as_often_as_was_said(
    flag: str, role: str, ends: list[Ended]
) -> None:
    agent = with_exits(flag, role)
    for end in ends:
        agent.round(end)
        agent.round(after=5.0)  # a crash loop is slowed down
    assert agent.plan.phase is Phase.RUNNING
    assert list(agent.supervisor.running) == [0]


def test_members_of_a_process_group_need_not_join() -> None:
    agent = Agent("ddp:1,pg,max_restarts=9")
    effects = agent.round()
    for _ in range(3):
        (host,) = (each for each in effects if isinstance(each, HostStore))
        agent.plan = apply(agent.plan, [Met("ddp", host.attempt, "here:1")])
        assert names([*agent.round(), *agent.round(after=5.0)]) == ["Start ddp:0"]
        effects = agent.round(Ended(0, 1))
    assert agent.plan.phase is Phase.RUNNING


def test_services_are_asked_to_end_asked_once_more_and_killed_when_they_do_not() -> None:
    agent = Agent("ps:1,service", "trainer:1")
    agent.round()
    assert agent.round(Ended(1, 0)) == [Stop(0)]
    assert agent.round(after=GRACE - REPEAT_SECONDS - 1) == []
    assert agent.round(after=1) == [Stop(0, again=GRACE - REPEAT_SECONDS)]
    assert agent.round(after=1) == []
    assert agent.round(after=2) == [Kill(0, "it did not end within 30 s")]
    assert agent.round(after=2) == []
    assert not agent.supervisor.is_finished(agent.plan)
    assert agent.round(Ended(0, -9)) == []
    assert agent.plan.phase is Phase.SUCCEEDED
    assert agent.supervisor.is_finished(agent.plan)


def test_all_workers_are_stopped_when_the_job_fails() -> None:
    agent = Agent("ps:1,service", "trainer:2")
    agent.round()
    assert agent.round(Ended(1, 3, process=42, said="Traceback: oh")) == [Stop(0), Stop(2)]
    assert agent.plan.failure is not None
    failure = agent.plan.failure
    assert (failure.who, failure.exit_code, failure.process) == ("trainer:0", 3, 42)
    assert (failure.host, failure.said) == ("host0", "Traceback: oh")


def test_a_worker_whose_group_declared_it_lost_is_killed_and_started_again() -> None:
    agent = Agent("trainer:2,max_restarts=1")
    agent.round()
    assert agent.round(lost=["trainer:1", "ps:7"]) == []  # it may be ending by itself
    (kill,) = agent.round(lost=["trainer:1"], after=LOST_SECONDS)
    assert kill == Kill(1, "its group declared it lost")
    assert agent.round(lost=["trainer:1"], after=1) == []
    (start,) = agent.round(Ended(1, -9))
    assert isinstance(start, Start)
    assert start.seat.life == 2
    agent.round(Ended(1, -9, said="more"))
    assert agent.plan.failure is not None
    assert agent.plan.failure.said == "more"


def test_a_worker_that_is_ending_by_itself_is_not_killed_because_its_group_misses_it() -> None:
    agent = Agent("trainer:2")
    agent.round()
    missed = {"lost": ["trainer:0", "trainer:1"], "ending": ["trainer:0"]}
    agent.round(**missed)
    assert agent.round(**missed, after=LOST_SECONDS) == [Kill(1, "its group declared it lost")]
    agent.round(Ended(0, 1, said="ArithmeticError: mine"), **missed, after=LOST_SECONDS)
    assert agent.plan.failure is not None
    assert (agent.plan.failure.exit_code, agent.plan.failure.said) == (1, "ArithmeticError: mine")


def test_a_worker_that_hangs_at_its_end_is_killed_in_the_end() -> None:
    agent = Agent("trainer:1")
    agent.round()
    missed = {"lost": ["trainer:0"], "ending": ["trainer:0"]}
    agent.round(**missed)
    assert agent.round(**missed, after=GRACE - 1) == []
    assert agent.round(**missed, after=1) == [Kill(0, "its group declared it lost")]


def test_a_worker_that_joined_its_group_again_is_left_alone() -> None:
    agent = Agent("trainer:1")
    agent.round()
    agent.round(lost=["trainer:0"])
    agent.round(after=LOST_SECONDS)
    assert agent.round(lost=["trainer:0"], after=LOST_SECONDS) == []


def test_the_reason_for_a_kill_is_in_the_report() -> None:
    agent = Agent("trainer:1")
    agent.round()
    agent.round(lost=["trainer:0"])
    agent.round(lost=["trainer:0"], after=LOST_SECONDS)
    agent.round(Ended(0, -9))
    assert agent.plan.failure is not None
    assert agent.plan.failure.said == "its group declared it lost"


def test_an_agent_that_was_taken_for_dead_kills_its_workers_before_it_joins_again() -> None:
    agent = Agent("trainer:2")
    agent.round()
    agent.plan = apply(agent.plan, [Left("node0")])
    why = "this agent does not hold its seat any more"
    assert agent.round() == [Kill(0, why), Kill(1, why)]
    assert agent.round(Ended(0, -9)) == []
    assert agent.plan.nodes == ()
    assert names(agent.round(Ended(1, -9))) == ["Start trainer:0", "Start trainer:1"]
    assert [seat.life for seat in agent.plan.seats] == [2, 2]


def test_a_node_that_gives_no_sign_of_life_is_struck_out() -> None:
    agent = Agent("trainer:1", spare=1)
    agent.round()
    agent.plan = apply(agent.plan, make(1, agent.roles).report(0, agent.plan, (), ()))
    assert names(agent.round()) == []
    assert names(agent.round(silent=["node1", "node0", "node7"])) == ["Start trainer:1"]
    assert [each.id for each in agent.plan.nodes] == ["node0"]


def test_a_job_with_too_few_agents_gives_up_in_the_end() -> None:
    agent = Agent("trainer:1", at_least=2)
    agent.plan = apply(agent.plan, make(1, agent.roles).report(0, agent.plan, (), ()))
    agent.round()
    agent.round(silent=["node1"])
    agent.round()
    agent.round(after=PATIENCE - 1)
    assert agent.plan.phase is Phase.RUNNING
    assert agent.round(after=2) == [Stop(1)]
    assert agent.plan.failure is not None
    assert "1 agents for 600 s, but --nnodes asks for 2" in agent.plan.failure.said


def test_the_holder_of_a_process_groups_first_seat_makes_its_store_once() -> None:
    agent = Agent("ddp:2,pg,max_restarts=1")
    assert agent.round() == [HostStore("ddp", 1)]
    assert agent.round() == []
    agent.plan = apply(agent.plan, [Met("ddp", 1, "host:1")])
    assert names(agent.round()) == ["Start ddp:0", "Start ddp:1"]
    assert agent.round(Ended(0, -9)) == [Stop(1)]
    assert agent.round(Ended(1, -15)) == [HostStore("ddp", 2)]


def test_a_life_that_has_to_stop_before_it_began_has_stopped() -> None:
    agent = Agent("trainer:2,restart=role,max_restarts=9")
    agent.round()
    for code in (1, 2):  # the second time there is a pause
        agent.round(Ended(0, code))
        agent.round(Ended(1, -15))
    assert {seat.order for seat in agent.plan.seats} == {Order.RUN}
    assert list(agent.supervisor.running) == []
    other = make(1, agent.roles)
    agent.plan = apply(agent.plan, other.report(0, agent.plan, (), ()))
    agent.plan = apply(agent.plan, [Left("node1")])
    assert {seat.order for seat in agent.plan.held_by("node0")} == {Order.STOP}
    assert names(agent.round()) == ["Start trainer:0", "Start trainer:1"]


def test_an_agent_that_was_taken_out_kills_what_it_runs_and_does_not_join_again() -> None:
    first = Agent("trainer:1")
    first.round()
    late = make(1, first.roles)
    first.plan = apply(first.plan, late.report(first.now, first.plan, [], []))
    assert names(late.act(first.now, first.plan)) == ["Start trainer:1"]
    failed = late.report(first.now, first.plan, [Ended(1, 3)], [])
    plan = apply(first.plan, failed)
    assert late.report(first.now, plan, [], []) == []
    assert late.is_finished(plan)
    assert not first.supervisor.is_finished(plan)
    assert names(first.supervisor.act(first.now, plan)) == []
