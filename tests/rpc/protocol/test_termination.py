"""A group finds out that all of it is done.

First as transcripts, which also document the protocol; then one hole at a
time. Whole groups in all orders of events are played by the simulator (``tests/simulation``).
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable
from textwrap import dedent

import pytest

from rpc.errors import FrameError
from rpc.protocol.termination import (
    AnswerWhenQuiet,
    Effect,
    Enter,
    Finished,
    Phase,
    Tell,
    Termination,
    TerminationMessage,
)
from rpc.wire.control import Leaving, Probe, Quiet, Ready

NOTHING: dict[int, int] = {}

# --- Transcripts


def describe(message: TerminationMessage) -> str:
    phase = Phase(message.phase).name
    if isinstance(message, Probe):
        return f"probe {phase} {message.wave}"
    if isinstance(message, Quiet):
        return f"quiet {phase} {message.wave}"
    return f"{type(message).__name__.lower()} {phase}"


def describe_effects(effects: list[Effect]) -> str:
    parts: list[str] = []
    for message, tells in itertools.groupby(effects, lambda e: getattr(e, "message", None)):
        if message is not None:
            parts.append(f"tells {' '.join(str(e.to) for e in tells)} {describe(message)}")
        else:
            parts += [describe_own(effect) for effect in tells if effect != AnswerWhenQuiet()]
    return ", ".join(parts)


def describe_own(effect: Effect) -> str:
    return f"enters {effect.phase.name}" if isinstance(effect, Enter) else "is finished"


class Group:
    """Machines of workers that are always quiet, on a network that keeps the order."""

    def __init__(self, *workers: int) -> None:
        self.machines = {w: Termination(w, set(workers)) for w in workers}
        self.network: deque[tuple[int, int, TerminationMessage]] = deque()
        self.transcript: list[str] = []

    def begin(self, worker: int) -> None:
        self._note(worker, "begins", self.machines[worker].begin())

    def lose(self, worker: int) -> None:
        del self.machines[worker]
        self.network = deque(m for m in self.network if worker not in m[:2])
        for survivor, machine in self.machines.items():
            self._note(survivor, f"loses {worker}", machine.lost(worker))

    def step(self) -> None:
        source, to, message = self.network.popleft()
        effects = self.machines[to].receive(source, message)
        if AnswerWhenQuiet() in effects:
            effects += self.machines[to].quiet(0, NOTHING, NOTHING)
        self._note(to, f"hears {source} {describe(message)}", effects)

    def run(self, until: Callable[[], bool] = lambda: False) -> None:
        while self.network and not until():
            self.step()

    def phase_of(self, worker: int) -> Phase:
        return self.machines[worker].phase

    def _note(self, worker: int, event: str, effects: list[Effect]) -> None:
        said = describe_effects(effects)
        self.transcript.append(f"{worker} {event}" + (f": {said}" if said else ""))
        self.network.extend((worker, e.to, e.message) for e in effects if isinstance(e, Tell))


def check(group: Group, expected: str) -> None:
    assert "\n".join(group.transcript) == dedent(expected).strip()


def test_transcript_of_a_worker_that_is_alone():
    group = Group(0)
    group.begin(0)
    group.run()
    check(
        group,
        """
        0 begins: tells 0 ready DRAIN
        0 hears 0 ready DRAIN: tells 0 probe DRAIN 1
        0 hears 0 probe DRAIN 1: tells 0 quiet DRAIN 1
        0 hears 0 quiet DRAIN 1: tells 0 probe DRAIN 2
        0 hears 0 probe DRAIN 2: tells 0 quiet DRAIN 2
        0 hears 0 quiet DRAIN 2: enters RELEASE, tells 0 probe RELEASE 3
        0 hears 0 probe RELEASE 3: tells 0 quiet RELEASE 3
        0 hears 0 quiet RELEASE 3: tells 0 probe RELEASE 4
        0 hears 0 probe RELEASE 4: tells 0 quiet RELEASE 4
        0 hears 0 quiet RELEASE 4: enters CLOSE, tells 0 probe CLOSE 5, is finished
        0 hears 0 probe CLOSE 5
        """,
    )


def test_transcript_of_two_workers():
    group = Group(0, 1)
    group.begin(0)
    group.run()
    group.begin(1)
    group.run()
    check(
        group,
        """
        0 begins: tells 0 ready DRAIN
        0 hears 0 ready DRAIN
        1 begins: tells 0 ready DRAIN
        0 hears 1 ready DRAIN: tells 0 1 probe DRAIN 1
        0 hears 0 probe DRAIN 1: tells 0 quiet DRAIN 1
        1 hears 0 probe DRAIN 1: tells 0 quiet DRAIN 1
        0 hears 0 quiet DRAIN 1
        0 hears 1 quiet DRAIN 1: tells 0 1 probe DRAIN 2
        0 hears 0 probe DRAIN 2: tells 0 quiet DRAIN 2
        1 hears 0 probe DRAIN 2: tells 0 quiet DRAIN 2
        0 hears 0 quiet DRAIN 2
        0 hears 1 quiet DRAIN 2: enters RELEASE, tells 0 1 probe RELEASE 3
        0 hears 0 probe RELEASE 3: tells 0 quiet RELEASE 3
        1 hears 0 probe RELEASE 3: enters RELEASE, tells 0 quiet RELEASE 3
        0 hears 0 quiet RELEASE 3
        0 hears 1 quiet RELEASE 3: tells 0 1 probe RELEASE 4
        0 hears 0 probe RELEASE 4: tells 0 quiet RELEASE 4
        1 hears 0 probe RELEASE 4: tells 0 quiet RELEASE 4
        0 hears 0 quiet RELEASE 4
        0 hears 1 quiet RELEASE 4: enters CLOSE, tells 0 1 probe CLOSE 5
        0 hears 0 probe CLOSE 5
        1 hears 0 probe CLOSE 5: enters CLOSE, tells 0 leaving CLOSE, is finished
        0 hears 1 leaving CLOSE: is finished
        """,
    )


def test_transcript_of_three_workers_whose_leader_dies_when_not_all_have_heard_of_release():
    group = Group(0, 1, 2)
    for worker in (0, 1, 2):
        group.begin(worker)
    group.run(until=lambda: group.phase_of(1) is Phase.RELEASE)
    group.transcript.clear()
    group.lose(0)
    group.run()
    check(
        group,
        """
        1 loses 0: tells 1 ready RELEASE
        2 loses 0: tells 1 ready DRAIN
        1 hears 1 ready RELEASE
        1 hears 2 ready DRAIN: tells 1 2 probe RELEASE 1
        1 hears 1 probe RELEASE 1: tells 1 quiet RELEASE 1
        2 hears 1 probe RELEASE 1: enters RELEASE, tells 1 quiet RELEASE 1
        1 hears 1 quiet RELEASE 1
        1 hears 2 quiet RELEASE 1: tells 1 2 probe RELEASE 2
        1 hears 1 probe RELEASE 2: tells 1 quiet RELEASE 2
        2 hears 1 probe RELEASE 2: tells 1 quiet RELEASE 2
        1 hears 1 quiet RELEASE 2
        1 hears 2 quiet RELEASE 2: enters CLOSE, tells 1 2 probe CLOSE 3
        1 hears 1 probe CLOSE 3
        2 hears 1 probe CLOSE 3: enters CLOSE, tells 1 leaving CLOSE, is finished
        1 hears 2 leaving CLOSE: is finished
        """,
    )


# --- One at a time


def probes(effects: Iterable[Effect]) -> list[tuple[int, int]]:
    return [(e.to, e.message.wave) for e in effects if isinstance(e, Tell)]


def leader_of(*workers: int, wave: int = 1) -> Termination:
    """Worker 0, leading, in the wave of that number."""
    leader = Termination(0, set(workers))
    leader.begin()
    for worker in workers:
        leader.receive(worker, Ready(Phase.DRAIN))
    for number in range(1, wave):
        for worker in workers:
            leader.receive(worker, Quiet(Phase.DRAIN, number, 0, 0, 0))
    return leader


def test_nothing_starts_before_everyone_is_ready():
    leader = Termination(0, {0, 1, 2})
    assert leader.begin() == [Tell(0, Ready(Phase.DRAIN))]
    assert leader.receive(0, Ready(Phase.DRAIN)) == []
    assert leader.receive(2, Ready(Phase.DRAIN)) == []
    assert leader.missing() == [1]
    assert probes(leader.receive(1, Ready(Phase.DRAIN))) == [(0, 1), (1, 1), (2, 1)]


def test_a_leader_that_has_not_begun_waits_for_its_own_user():
    leader = Termination(0, {0, 1})
    assert leader.receive(1, Ready(Phase.DRAIN)) == []
    assert leader.receive(0, Ready(Phase.DRAIN)) == []
    assert leader.begin() == [Tell(0, Ready(Phase.DRAIN))]
    assert probes(leader.receive(0, Ready(Phase.DRAIN))) == [(0, 1), (1, 1)]


@pytest.mark.parametrize(
    ("counters", "notices_of_the_other"),
    [((1, 0, 0), (0, 0)), ((0, 1, 0), (0, 0)), ((0, 0, 0), (0, 1))],
    ids=["a call ran in between", "a notice is under way", "one arrived in between"],
)
def test_the_group_stays_in_its_phase_when(
    counters: tuple[int, int, int], notices_of_the_other: tuple[int, int]
):
    leader = leader_of(0, 1, wave=2)
    leader.receive(0, Quiet(Phase.DRAIN, 2, *counters))
    effects = leader.receive(1, Quiet(Phase.DRAIN, 2, 0, *notices_of_the_other))
    assert probes(effects) == [(0, 3), (1, 3)]
    assert leader.phase is Phase.DRAIN


def test_a_notice_that_stays_under_way_keeps_the_group_in_its_phase():
    leader = leader_of(0, 1)
    for wave in range(1, 6):
        leader.receive(0, Quiet(Phase.DRAIN, wave, 7, 3, 0))
        leader.receive(1, Quiet(Phase.DRAIN, wave, 7, 0, 2))
    assert leader.phase is Phase.DRAIN
    for wave in (6, 7):
        leader.receive(0, Quiet(Phase.DRAIN, wave, 7, 3, 0))
        leader.receive(1, Quiet(Phase.DRAIN, wave, 7, 0, 3))
    assert leader.phase is Phase.RELEASE


def test_notices_exchanged_with_workers_that_the_leader_does_not_count_are_left_out():
    worker = Termination(1, {0, 1, 2})
    worker.begin()
    worker.receive(0, Probe(Phase.DRAIN, 4, (0, 1)))
    assert worker.quiet(9, {0: 2, 2: 5}, {0: 1, 1: 1, 2: 6}) == [
        Tell(0, Quiet(Phase.DRAIN, 4, 9, 2, 2))
    ]


def test_a_question_is_answered_once():
    worker = Termination(1, {0, 1})
    worker.begin()
    assert worker.quiet(0, NOTHING, NOTHING) == []
    assert worker.receive(0, Probe(Phase.DRAIN, 1, (0, 1))) == [AnswerWhenQuiet()]
    assert worker.quiet(0, NOTHING, NOTHING) == [Tell(0, Quiet(Phase.DRAIN, 1, 0, 0, 0))]
    assert worker.quiet(0, NOTHING, NOTHING) == []


def test_a_question_overtaken_by_a_later_one_is_not_answered():
    worker = Termination(1, {0, 1})
    worker.begin()
    worker.receive(0, Probe(Phase.DRAIN, 2, (0, 1)))
    worker.receive(0, Probe(Phase.DRAIN, 1, (0, 1)))
    assert worker.quiet(0, NOTHING, NOTHING) == [Tell(0, Quiet(Phase.DRAIN, 2, 0, 0, 0))]


def test_a_question_takes_the_place_of_an_earlier_one_that_still_waits():
    worker = Termination(1, {0, 1})
    worker.receive(0, Probe(Phase.DRAIN, 1, (0, 1)))
    worker.receive(0, Probe(Phase.DRAIN, 2, (0, 1)))
    assert worker.quiet(0, {}, {}) == [Tell(0, Quiet(Phase.DRAIN, 2, 0, 0, 0))]


def test_an_answer_to_an_earlier_question_does_not_count():
    leader = leader_of(0, 1, wave=2)
    leader.receive(0, Quiet(Phase.DRAIN, 2, 0, 0, 0))
    assert leader.receive(1, Quiet(Phase.DRAIN, 1, 0, 0, 0)) == []
    assert leader.receive(1, Quiet(Phase.RELEASE, 2, 0, 0, 0)) == []
    assert leader.missing() == [1]


def test_questions_of_a_leader_that_is_gone_are_not_answered():
    worker = Termination(2, {0, 1, 2})
    worker.begin()
    worker.receive(0, Probe(Phase.DRAIN, 1, (0, 1, 2)))
    assert worker.lost(0) == [Tell(1, Ready(Phase.DRAIN))]
    assert worker.quiet(0, NOTHING, NOTHING) == []
    assert worker.receive(0, Probe(Phase.DRAIN, 2, (0, 1, 2))) == []


def test_questions_of_who_does_not_lead_any_more_are_not_answered():
    worker = Termination(2, {1, 2})
    worker.begin()
    worker.joined(0)
    assert worker.receive(1, Probe(Phase.DRAIN, 7, (1, 2))) == []
    worker.receive(0, Probe(Phase.DRAIN, 1, (0, 1, 2)))
    assert worker.quiet(0, NOTHING, NOTHING) == [Tell(0, Quiet(Phase.DRAIN, 1, 0, 0, 0))]


def test_a_new_leader_goes_on_at_the_furthest_phase_that_anyone_reports():
    leader = Termination(1, {0, 1, 2})
    leader.begin()
    leader.lost(0)
    leader.receive(1, Ready(Phase.DRAIN))
    effects = leader.receive(2, Ready(Phase.RELEASE))
    assert effects[0] == Enter(Phase.RELEASE)
    assert probes(effects[1:]) == [(1, 1), (2, 1)]


def test_a_lost_worker_is_no_longer_waited_for():
    leader = leader_of(0, 1, 2)
    leader.receive(0, Quiet(Phase.DRAIN, 1, 0, 0, 0))
    leader.receive(1, Quiet(Phase.DRAIN, 1, 0, 0, 0))
    assert leader.missing() == [2]
    assert probes(leader.lost(2)) == [(0, 2), (1, 2)]


def test_waves_before_and_after_a_loss_are_not_compared():
    leader = leader_of(0, 1, 2, wave=2)
    leader.receive(0, Quiet(Phase.DRAIN, 2, 0, 0, 0))
    leader.receive(1, Quiet(Phase.DRAIN, 2, 0, 0, 0))
    assert probes(leader.lost(2)) == [(0, 3), (1, 3)]
    assert leader.phase is Phase.DRAIN


def test_losing_oneself_or_a_stranger_or_somebody_twice_changes_nothing():
    worker = Termination(1, {0, 1, 2})
    worker.begin()
    assert worker.lost(1) == worker.lost(7) == worker.lost(2) == []
    assert worker.lost(2) == []


def test_a_worker_that_joins_during_a_wave_is_asked_too_once_it_is_ready():
    leader = leader_of(0, 1)
    assert leader.joined(2) == []
    assert leader.missing() == [2]
    leader.receive(0, Quiet(Phase.DRAIN, 1, 0, 0, 0))
    assert leader.receive(1, Quiet(Phase.DRAIN, 1, 0, 0, 0)) == []
    assert probes(leader.receive(2, Ready(Phase.DRAIN))) == [(2, 2)]
    assert probes(leader.receive(2, Quiet(Phase.DRAIN, 2, 0, 0, 0))) == [(0, 3), (1, 3), (2, 3)]


def test_a_worker_that_reports_before_the_leader_knows_it_is_not_forgotten():
    leader = leader_of(0, 1)
    assert leader.receive(2, Ready(Phase.DRAIN)) == []
    assert probes(leader.joined(2)) == [(2, 2)]


def test_a_worker_that_joins_with_a_lower_id_takes_over():
    leader = Termination(1, {1, 2})
    leader.begin()
    leader.receive(1, Ready(Phase.DRAIN))
    leader.receive(2, Ready(Phase.DRAIN))
    assert leader.joined(0) == [Tell(0, Ready(Phase.DRAIN))]
    follower = Termination(2, {1, 2})
    follower.begin()
    follower.receive(1, Probe(Phase.DRAIN, 1, (1, 2)))
    assert follower.joined(0) == [Tell(0, Ready(Phase.DRAIN))]
    assert follower.quiet(0, NOTHING, NOTHING) == []


def test_a_worker_that_came_back_has_to_be_ready_again():
    leader = leader_of(0, 1)
    leader.lost(1)
    assert leader.receive(1, Ready(Phase.DRAIN)) == []  # from its former life
    leader.joined(1)
    assert leader.missing() == [1]


def test_a_worker_that_left_and_came_back_has_to_leave_again():
    leader = leader_of(0, 1)
    leader.receive(1, Leaving(0))
    leader.lost(1)
    leader.joined(1)
    leader.receive(1, Ready(Phase.DRAIN))
    for wave in range(1, 6):
        for worker in (0, 1):
            leader.receive(worker, Quiet(leader.phase, wave, 0, 0, 0))
    assert leader.phase is Phase.CLOSE
    assert leader.missing() == [1]


def test_a_worker_that_was_replaced_unseen_has_to_be_ready_again():
    leader = leader_of(0, 1)
    leader.joined(1)
    assert leader.missing() == [1]


def test_who_joins_a_closing_group_is_not_waited_for():
    leader = leader_of(0, 1, wave=2)
    for wave in (2, 3, 4):
        for worker in (0, 1):
            leader.receive(worker, Quiet(leader.phase, wave, 0, 0, 0))
    assert leader.phase is Phase.CLOSE
    assert leader.joined(2) == []
    assert leader.receive(2, Ready(Phase.DRAIN)) == []
    assert leader.receive(1, Leaving(Phase.CLOSE)) == [Finished()]


def test_a_follower_that_is_told_to_close_leaves_although_somebody_else_leads_by_now():
    follower = Termination(2, {1, 2})
    follower.begin()
    follower.joined(0)
    assert follower.receive(1, Probe(Phase.CLOSE, 5, (1, 2))) == [
        Enter(Phase.CLOSE),
        Tell(1, Leaving(Phase.CLOSE)),
        Finished(),
    ]


def test_a_leader_does_not_wait_for_a_follower_that_dies_while_leaving():
    leader = leader_of(0, 1, wave=2)
    for wave in (2, 3, 4):
        for worker in (0, 1):
            leader.receive(worker, Quiet(leader.phase, wave, 0, 0, 0))
    assert leader.missing() == [1]
    assert leader.lost(1) == [Finished()]
    assert leader.receive(1, Leaving(Phase.CLOSE)) == []


@pytest.mark.parametrize("message", [Ready(3), Probe(9, 1, ())])
def test_a_phase_that_does_not_exist_is_refused(message: TerminationMessage):
    with pytest.raises(FrameError, match="no phase"):
        Termination(1, {0, 1}).receive(0, message)
