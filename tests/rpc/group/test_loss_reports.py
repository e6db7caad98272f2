"""Reports of a loss to the others: what an agent in which condition says, and what it leaves."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from rpc.group.loss_reports import LossReports
from rpc.group.members import Group
from rpc.ids import Life
from rpc.protocol.liveness import Evidence
from rpc.transports.base import Peer
from rpc.wire.control import ControlMessage
from rpc.worker_info import WorkerInfo

ME, OTHER, GONE = Life(0, 0), Life(1, 0), Life(2, 1)


class Agent:
    """Notes what it is made to do; its clock stands still."""

    def __init__(self) -> None:
        self.info = WorkerInfo("w0", 0)
        self.group = Group()
        for life in (ME, OTHER, GONE):
            self.group.add(Peer(WorkerInfo(f"w{life.worker}", life.worker), life.incarnation, b""))
        self.group.lose(GONE, "it was silent")
        self.is_expelled = False
        self.departs = False
        self.clock = SimpleNamespace(now=lambda: 100.0)
        self.removed: list[Life] = []
        self.told: list[tuple[Life, ControlMessage]] = []
        self.noted: list[Life] = []
        self.later: list[tuple[float, Any]] = []
        self.timers = SimpleNamespace(at=lambda when, task: self.later.append((when, task)))
        self.has_watch = True
        self.store_answers = True
        self.has_reached_few = False
        self.doubted: list[tuple[Life, float]] = []
        self.wanted: Callable[[], bool] | None = None

    def has_a_say(self) -> bool:
        return not (self.is_expelled or self.departs)

    def watches(self) -> bool:
        return self.has_watch

    def reached_few(self) -> bool:
        return self.has_reached_few

    def doubt(self, life: Life, until: float) -> None:
        self.doubted.append((life, until))

    def tell(self, to: Life, message: ControlMessage) -> None:
        self.told.append((to, message))

    def leave_note(self, life: Life, reason: str) -> None:
        self.noted.append(life)

    def strike_off(
        self, life: Life, reason: str, wanted: Callable[[], bool], done: Callable[[], None]
    ) -> None:
        self.removed.append(life)
        self.wanted = wanted
        if self.store_answers:
            done()

    def run_next(self) -> float:
        """Runs what was put off for the shortest time; returns the time it was put off to."""
        when, task = min(self.later, key=lambda entry: entry[0])
        self.later.remove((when, task))
        task()
        return when

    def did(self) -> tuple[list[Life], list[Life], list[Life]]:
        """The lives that it took off the list, told, and left a note for."""
        return self.removed, [to for to, _ in self.told], self.noted


@pytest.fixture
def agent() -> Agent:
    return Agent()


def lose(agent: Agent, life: Life = GONE, evidence: Evidence = Evidence.TOLD) -> None:
    LossReports(agent, 10.0).lost(life, "it was silent", evidence)  # type: ignore[arg-type]


def test_what_others_said_is_passed_on_at_once(agent: Agent) -> None:
    lose(agent)
    assert agent.did() == ([GONE], [OTHER], [GONE])
    assert not agent.later


def test_what_was_noticed_here_is_told_after_a_moment(agent: Agent) -> None:
    lose(agent, evidence=Evidence.SILENT)
    assert agent.did() == ([], [], [])
    assert agent.run_next() == 101.0
    assert agent.did() == ([GONE], [], [])
    assert agent.run_next() == 100.0  # the store has done it
    assert agent.did() == ([GONE], [OTHER], [GONE])
    assert agent.run_next() == 110.0
    assert agent.did() == ([GONE], [OTHER], [GONE])
    assert not agent.later


def test_if_the_store_does_not_answer_the_others_are_told_after_as_long_as_a_silence(
    agent: Agent,
) -> None:
    agent.store_answers = False
    lose(agent, evidence=Evidence.SILENT)
    assert agent.run_next() == 101.0
    assert agent.did() == ([GONE], [], [])
    assert agent.run_next() == 110.0
    assert agent.did() == ([GONE], [OTHER], [GONE])
    assert not agent.later


@pytest.mark.parametrize("change", ["expelled", "cut off", "replaced"])
def test_one_that_the_store_does_not_answer_tells_nobody_once_it_has_no_say(
    agent: Agent, change: str
) -> None:
    """Of two that declare each other lost, the one whose word the store had first has it."""
    agent.store_answers = False
    reports = LossReports(agent, 10.0)  # type: ignore[arg-type]
    reports.lost(GONE, "it was silent", Evidence.SILENT)
    assert agent.run_next() == 101.0
    if change == "expelled":
        agent.is_expelled = True
    elif change == "replaced":
        agent.group.add(Peer(WorkerInfo("w2", 2), GONE.incarnation + 1, b""))
    else:
        for worker in (3, 4):
            life = Life(worker, 0)
            agent.group.add(Peer(WorkerInfo(f"w{worker}", worker), 0, b""))
            agent.group.lose(life, "it was silent")
            reports.lost(life, "it was silent", Evidence.SILENT)
    while agent.later:
        agent.run_next()
    assert agent.removed == [GONE]
    assert agent.wanted is not None
    assert agent.wanted() is (change != "cut off")
    assert agent.told == []
    assert agent.noted == []


def test_who_reached_less_than_half_of_the_group_lets_others_speak_first(agent: Agent) -> None:
    agent.has_reached_few = True
    lose(agent, evidence=Evidence.SILENT)
    assert agent.run_next() == 101.0
    assert agent.did() == ([], [], [])
    assert agent.doubted == [(GONE, 120.0)]
    assert agent.run_next() == 120.0  # nobody has declared it lost
    assert agent.did() == ([GONE], [], [])
    assert agent.run_next() == 100.0
    assert agent.did() == ([GONE], [OTHER], [GONE])


def test_who_was_declared_lost_while_it_doubted_says_nothing(agent: Agent) -> None:
    agent.has_reached_few = True
    lose(agent, evidence=Evidence.SILENT)
    agent.run_next()
    agent.is_expelled = True
    agent.run_next()
    assert agent.did() == ([], [], [])
    assert not agent.later


def test_without_a_watch_a_loss_is_only_taken_off_the_list(agent: Agent) -> None:
    agent.has_watch = False
    lose(agent, evidence=Evidence.CLOSED)
    assert agent.did() == ([GONE], [], [])
    assert not agent.later


@pytest.mark.parametrize("watches", [True, False])
@pytest.mark.parametrize("evidence", [Evidence.TOLD, Evidence.CLOSED])
def test_nobody_is_told_of_workers_that_are_expected_to_go(
    agent: Agent, watches: bool, evidence: Evidence
) -> None:
    agent.departs = True
    agent.has_watch = watches
    lose(agent, evidence=evidence)
    assert agent.did() == ([], [], [])
    assert not agent.later


def test_a_shutdown_that_begins_meanwhile_keeps_it_from_being_told(agent: Agent) -> None:
    lose(agent, evidence=Evidence.SILENT)
    agent.departs = True
    agent.later[0][1]()
    assert agent.did() == ([], [], [])


def test_a_life_that_was_replaced_or_never_known_is_nobodys_business(agent: Agent) -> None:
    lose(agent, Life(GONE.worker, 0))
    lose(agent, Life(9, 0))
    assert agent.did() == ([], [], [])


def test_one_that_is_expelled_has_no_say(agent: Agent) -> None:
    agent.is_expelled = True
    lose(agent)
    assert agent.did() == ([], [], [])
