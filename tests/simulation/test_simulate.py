"""Many simulated groups hold every rule, and one that does not is told in a few lines.

A failing seed prints its transcript; play it again with
``tests.simulation.group.simulate([seed])``. ``make simulate`` runs 10 000 seeds; ``SIMULATE_SEEDS``
says how many are run here, which ``.ci/run`` sets to 1000.
"""

from __future__ import annotations

import itertools

import pytest

from rpc.errors import WorkerLostError
from rpc.group.members import Group
from rpc.ids import Life
from rpc.protocol.calls import CallTable, Ended
from rpc.protocol.reference_terms import Effect
from rpc.protocol.references import ReferenceTable
from rpc.transports.base import Peer
from rpc.wire.control import ControlMessage, DuplicateFilter, Register
from tests.seeded_games import seeds_to_play
from tests.simulation.group import Machines, Rule, Scenario, SimulationError, simulate, steps
from tests.simulation.group.runs import Script, draw, replay
from tests.simulation.group.steps import RunPhase, Step

SHORT = 150
LONG = seeds_to_play(0)
BATCH = 500


def test_every_rule_holds_in_a_few_hundred_runs() -> None:
    assert simulate(range(SHORT)).runs == SHORT


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, LONG, BATCH))
def test_every_rule_holds_in_all_runs(first: int) -> None:
    simulate(range(first, min(first + BATCH, LONG)))


def test_the_same_seed_plays_the_same_run() -> None:
    for seed in range(10):
        once, again = (draw(seed, Scenario(), Machines()) for _ in range(2))
        assert once.script == again.script
        assert once.messages == again.messages


def test_a_script_plays_the_run_again_to_the_last_message() -> None:
    for seed in range(20):
        played = draw(seed, Scenario(), Machines())
        assert replay(played.script, Machines()).messages == played.messages


def test_a_group_without_faults_breaks_no_rule_and_loses_nobody() -> None:
    calm = Scenario(crashes=False, joins=False, cuts=False, partitions=False, duplicates=False)
    assert simulate(range(25), calm).runs == 25


def test_progress_is_reported_after_each_run() -> None:
    reports: list[int] = []
    simulate(range(3), progress=lambda report: reports.append(report.runs))
    assert reports == [1, 2, 3]


def test_processes_are_stopped_in_every_way() -> None:
    acts = [
        step.act for seed in range(40) for step in draw(seed, Scenario(), Machines()).script.steps
    ]
    stops = {(act.sends is None, act.clock_stands) for act in acts if isinstance(act, steps.Stop)}
    assert stops == {(True, True), (True, False), (False, True), (False, False)}
    assert {steps.Declare, steps.Wake, steps.Pulse, steps.Depart} <= {*map(type, acts)}


def expelled_with_a_reference_to_one_it_never_met() -> Script:
    """Of a worker that joined, worker 0 has a reference, and is declared lost before it hears."""
    zero, one = Life(0, 0), Life(1, 0)
    handle = (3, 1)
    acts = (
        steps.Start(2),
        steps.Hear((1, 2)),
        steps.Create(one, 2, 0.0, True, None),
        steps.CallWorker(
            one, 0, steps.Addressing.ID, (handle,), (handle,), 0.0, True, None, False, True
        ),
        steps.Deliver((4, 2)),
        steps.Stop(zero, None, False),
        steps.Declare(zero),
        steps.Wake(zero),
        steps.Hear((7, 5)),
    )
    numbered = (Step(n, RunPhase.WORK, act) for n, act in enumerate(acts, start=1))
    return Script(2, False, tuple(numbered))


class WaitsForWhomItNeverMet(ReferenceTable):
    def expelled(self, reason: str) -> list[Effect]:
        return []


def test_who_is_declared_lost_waits_for_nobody_that_it_never_met() -> None:
    script = expelled_with_a_reference_to_one_it_never_met()
    assert replay(script, Machines()).broken is None
    broken = replay(script, Machines(references=WaitsForWhomItNeverMet)).broken
    assert broken is not None
    assert broken.rule is Rule.CALLS_END


# --- It bites: each of these leaves out something that a rule needs ---------------


class ForgetsRegistrations(ReferenceTable):
    def message_arrived(self, sender: Life, message: ControlMessage) -> list[Effect]:
        effects = super().message_arrived(sender, message)
        if isinstance(message, Register) and message.reference.rref in self._entries:
            self._entries[message.reference.rref].forks.pop(message.fork, None)
        return effects


class KeepsTheDeadWaitedFor(CallTable):  # type: ignore[type-arg]
    def lose(self, worker_id: int) -> list[Ended]:  # type: ignore[type-arg]
        return []


class TakesEverythingTwice(DuplicateFilter):
    def accept(self, number: int) -> bool:
        super().accept(number)
        return True


class NeverMeetsTheReturned(Group):
    def add(self, peer: Peer) -> bool:
        return peer.info.id in self._by_id or super().add(peer)


class TakesInNewcomersWhenItIsLost(Group):
    def add(self, peer: Peer) -> bool:
        expelled, self._expelled = self._expelled, None
        added = super().add(peer)
        self._expelled = expelled
        return added


class KeepsOneWhenItIsLost(Group):
    def expel(self, me: int, reason: str) -> tuple[WorkerLostError, list[Life]]:
        error, others = super().expel(me, reason)
        return error, others[1:]


@pytest.mark.parametrize(
    ("machines", "rules"),
    [
        (
            Machines(references=ForgetsRegistrations),
            {Rule.NOT_FREED_IN_USE, Rule.HANDLES_WORK, Rule.COUNTS},
        ),
        (Machines(calls=KeepsTheDeadWaitedFor), {Rule.CALLS_END}),
        (Machines(duplicates=TakesEverythingTwice), {Rule.DUPLICATES}),
        (Machines(group=NeverMeetsTheReturned), {Rule.MEMBERS}),
        (Machines(group=TakesInNewcomersWhenItIsLost), {Rule.MEMBERS}),
        (Machines(group=KeepsOneWhenItIsLost), {Rule.FENCED}),
    ],
)
def test_a_broken_decision_is_found_and_told_in_a_few_lines(
    machines: Machines, rules: set[Rule]
) -> None:
    with pytest.raises(SimulationError) as caught:
        simulate(itertools.count(), machines=machines)
    error = caught.value
    assert error.rule in rules
    assert f"seed {error.seed} breaks a rule: {error.rule.value}" in str(error)
    assert len(error.transcript) < 60, str(error)
    assert error.transcript[-1].startswith("broken: ")
