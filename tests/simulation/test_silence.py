"""Groups whose workers fall silent: every rule holds, and a broken decision is found."""

from __future__ import annotations

import itertools
from collections.abc import Set

import pytest

from rpc.group.members import Group
from rpc.ids import Life
from rpc.protocol.liveness import Effect, Evidence, Liveness, Suspicion
from tests.simulation.group import Machines, Rule, SimulationError, simulate_silence
from tests.simulation.group.faults import Fault, FaultKind, Plan, draw_plan
from tests.simulation.group.watchers import WatcherGroup


def test_every_rule_holds_in_some_runs() -> None:
    assert simulate_silence(range(50)).runs == 50


def test_the_same_seed_plays_the_same_run() -> None:
    for seed in range(4):
        told: list[list[str]] = [[], []]
        for transcript in told:
            WatcherGroup(draw_plan(seed), Machines(), transcript).run()
        assert told[0] == told[1]


def test_everything_befalls_somebody() -> None:
    kinds = {fault.kind for seed in range(100) for fault in draw_plan(seed).faults}
    assert kinds == {*FaultKind}


def play(size: int, *faults: Fault) -> WatcherGroup:
    run = WatcherGroup(Plan(1, size, dynamic=False, paired=False, faults=faults), Machines())
    assert run.run() is None
    return run


def views(run: WatcherGroup) -> dict[int, set[int]]:
    return {
        watcher.life.worker: {life.worker for life in watcher.view()}
        for watcher in run.all.values()
        if watcher.alive and not watcher.expelled
    }


def everybody_sees(*workers: int) -> dict[int, set[int]]:
    return {worker: {*workers} for worker in workers}


def test_one_that_is_busy_for_long_is_not_lost() -> None:
    run = play(3, Fault(0.5, FaultKind.CALL, 0, 9.0, 1), Fault(1.0, FaultKind.HOLD, 1, 6.0))
    assert views(run) == everybody_sees(0, 1, 2)


def test_one_that_was_cut_off_takes_nobody_with_it_when_it_is_back() -> None:
    for seconds in (1.5, 2.5, 3.5):
        run = play(4, Fault(0.5, FaultKind.CUT, 1, seconds))
        assert views(run) == everybody_sees(0, 2, 3)


def test_of_two_whose_connection_broke_the_one_with_the_higher_id_goes() -> None:
    assert views(play(4, Fault(0.5, FaultKind.PART, 3, other=1))) == everybody_sees(0, 1, 2)


def test_one_that_is_paused_with_its_clock_learns_that_it_is_lost_when_it_wakes() -> None:
    run = play(4, Fault(0.5, FaultKind.PAUSE, 1, 3.0))
    assert run.all[Life(1, 0)].behind == 3.0
    assert run.all[Life(1, 0)].expelled
    assert views(run) == everybody_sees(0, 2, 3)


def test_one_that_is_paused_for_a_moment_is_not_lost_and_loses_nobody() -> None:
    assert views(play(4, Fault(0.5, FaultKind.PAUSE, 1, 0.25))) == everybody_sees(0, 1, 2, 3)


def test_one_that_stops_before_it_reports_a_loss_takes_nobody_else_with_it() -> None:
    lost = Fault(0.5, FaultKind.VANISH, 2)
    for at in (0.6, 0.9, 1.1, 1.3):
        faults = (lost, Fault(at, FaultKind.STOP_BEFORE_SENDING, 1, 3.0))
        run = WatcherGroup(Plan(1, 5, dynamic=True, paired=True, faults=faults), Machines())
        assert run.run() is None
        assert run.all[Life(1, 0)].expelled
        assert views(run) == everybody_sees(0, 3, 4)


def lost_in_a_cut(seconds: float, seed: int) -> set[int]:
    """Cuts two workers of six off from the others and the store; those that are struck off."""
    calls = [Fault(0.4, FaultKind.CALL, who, 4.0, whom) for who, whom in ((5, 0), (4, 2), (1, 2))]
    cuts = [Fault(0.5, FaultKind.CUT, who, seconds) for who in (2, 5)]
    plan = Plan(seed, 6, dynamic=True, paired=True, faults=(*calls, *cuts))
    run = WatcherGroup(plan, Machines())
    assert run.run() is None
    return {life.worker for life in run.all} - {life.worker for life in run.listed}


def test_of_a_network_that_parts_and_comes_back_the_side_of_the_store_loses_nobody() -> None:
    lost = [lost_in_a_cut(0.5 + step / 100, seed) for step in range(40) for seed in range(3)]
    assert set().union(*lost) == {2, 5}


# --- It bites ------------------------------------------------------------------------


class NeverExcusesItself(Liveness):
    def _excuse_own_absence(self, now: float) -> None:
        pass


class IsTooPatient(Liveness):
    def tick(self, now: float, watched: Set[Life]) -> list[Effect]:
        self._patience = 1.0
        return super().tick(now, watched)


class ReportsAtOnce(Suspicion):
    def delay(self, worker: int, evidence: Evidence, now: float) -> float:
        return 0.0


class StaysAmongTheLost(Group):
    def expel(self, me: int, reason: str):  # type: ignore[no-untyped-def]
        return super().expel(me, reason)[0], []


@pytest.mark.parametrize(
    ("machines", "rules"),
    [
        (Machines(liveness=NeverExcusesItself), {Rule.NOT_REPORTED, Rule.FOUND_IN_TIME}),
        (Machines(liveness=IsTooPatient), {Rule.FOUND_IN_TIME}),
        (Machines(suspicion=ReportsAtOnce), {Rule.NOT_REPORTED, Rule.FENCED}),
        (Machines(group=StaysAmongTheLost), {Rule.FENCED}),
    ],
)
def test_a_broken_decision_is_found_and_told_in_a_few_lines(
    machines: Machines, rules: set[Rule]
) -> None:
    with pytest.raises(SimulationError) as caught:
        simulate_silence(itertools.count(), machines)
    error = caught.value
    assert error.rule in rules
    assert f"seed {error.seed} breaks a rule: {error.rule.value}" in str(error)
    assert len(error.transcript) < 60
    assert error.transcript[-1].startswith("broken: ")
