"""The pass protocol, event by event: what one worker decides, and whole passes without tensors."""

from __future__ import annotations

import itertools
import random
from collections import Counter, defaultdict
from dataclasses import dataclass

import pytest

from autograd_dist.failure import Failure
from autograd_dist.passes import (
    Ack,
    Acknowledge,
    Finished,
    FollowSend,
    FollowStuck,
    Gradients,
    Participant,
    Promise,
    Returned,
    RunWave,
    Send,
    Settle,
    Survey,
)
from autograd_dist.recv_node import Origin

ROOT, MIDDLE, FAR = 0, 1, 2
FIRST_WAVE = [RunWave((), None)]


@dataclass(frozen=True)
class WaveEnd:
    is_stuck: bool
    resolved: int


def participant(me, neighbours=()):
    return Participant(me, ROOT, lambda: neighbours)


def origin(sender, message_id):
    return Origin(7, sender, message_id)


def engaged(me=MIDDLE, neighbours=()):
    """A worker whose first wave, for gradients of message 5, is running."""
    worker = participant(me, neighbours)
    assert worker.received("engaging", Gradients(5), "g5") == [RunWave(((5, "g5"),), None)]
    return worker


def test_pass_of_one_worker_ends_with_its_wave():
    root = participant(ROOT)
    assert root.start() == FIRST_WAVE
    assert root.wave_finished(is_stuck=False, resolved=0) == [Finished(None)]


def test_gradients_leave_while_the_wave_still_runs():
    root = participant(ROOT)
    root.start()
    assert root.gradients_ready(origin(MIDDLE, 3), "g", may_wait=False) == [
        Send(MIDDLE, Gradients(3), "g")
    ]
    assert root.wave_finished(is_stuck=False, resolved=0) == []
    assert root.acknowledged(Ack()) == [Finished(None)]


def test_request_that_engages_is_acknowledged_when_everything_it_caused_is():
    worker = engaged()
    assert worker.gradients_ready(origin(FAR, 3), "g", may_wait=False) == [
        Send(FAR, Gradients(3), "g")
    ]
    assert worker.wave_finished(is_stuck=False, resolved=0) == []
    assert worker.acknowledged(Ack()) == [Acknowledge("engaging", Ack())]


def engaged_by(asker, neighbours=()):
    """Engages a worker by one that takes gradients with the acknowledgement."""
    worker = participant(MIDDLE, neighbours)
    worker.received("engaging", Gradients(5), "g5", asker)
    return worker


def test_last_gradients_for_who_engaged_a_worker_come_with_the_acknowledgement():
    worker = engaged_by(FAR)
    assert worker.gradients_ready(origin(FAR, 3), "g", may_wait=True) == []
    assert worker.wave_finished(is_stuck=True, resolved=0) == [
        Acknowledge("engaging", Ack(stuck=1), Returned(3, "g"))
    ]
    assert worker.received("again", Gradients(6), "g6", FAR) == [RunWave(((6, "g6"),), None)]
    assert worker.wave_finished(is_stuck=True, resolved=0) == [Acknowledge("again", Ack())]


@pytest.mark.parametrize(
    ("asker", "to", "may_wait"), [(FAR, FAR, False), (FAR, ROOT, True), (None, FAR, True)]
)
def test_other_gradients_leave_while_the_wave_still_runs(asker, to, may_wait):
    worker = engaged_by(asker)
    leaves = worker.gradients_ready(origin(to, 3), "g", may_wait=may_wait)
    assert leaves == [Send(to, Gradients(3), "g")]
    assert worker.wave_finished(is_stuck=False, resolved=0) == []


def test_gradients_do_not_wait_at_a_worker_that_is_owed_an_acknowledgement():
    worker = engaged_by(FAR)
    worker.gradients_ready(origin(ROOT, 4), "g4", may_wait=False)
    assert worker.gradients_ready(origin(FAR, 3), "g", may_wait=True) == [
        Send(FAR, Gradients(3), "g")
    ]


@pytest.mark.parametrize(
    ("request_", "payload", "follows"),
    [
        (Gradients(6), "g6", RunWave(((6, "g6"),), None)),
        (Settle(1), None, RunWave((), frozenset())),
        (Survey(1), None, FollowStuck()),
    ],
)
def test_gradients_that_waited_leave_when_there_is_more_to_do(request_, payload, follows):
    worker = engaged_by(FAR)
    worker.gradients_ready(origin(FAR, 3), "g", may_wait=True)
    assert worker.received("more", request_, payload, ROOT) == [Acknowledge("more", Ack())]
    assert worker.wave_finished(is_stuck=False, resolved=0) == [
        Send(FAR, Gradients(3), "g"),
        follows,
    ]


def test_gradients_do_not_wait_if_there_is_more_to_do_already():
    worker = engaged_by(FAR)
    worker.received("more", Gradients(6), "g6", ROOT)
    assert worker.gradients_ready(origin(FAR, 3), "g", may_wait=True) == [
        Send(FAR, Gradients(3), "g")
    ]


def test_gradients_that_came_with_an_acknowledgement_are_worked_on():
    root = participant(ROOT)
    root.start()
    root.gradients_ready(origin(MIDDLE, 3), "g", may_wait=True)
    root.wave_finished(is_stuck=False, resolved=0)
    assert root.acknowledged(Ack(stuck=1), Returned(8, "g8")) == [RunWave(((8, "g8"),), None)]
    assert root.wave_finished(is_stuck=False, resolved=0) == [FollowStuck()]


def test_gradients_that_waited_are_dropped_with_the_pass():
    worker = engaged_by(FAR)
    worker.gradients_ready(origin(FAR, 3), "g", may_wait=True)
    error = Failure("boom")
    assert worker.failed(error) == [Acknowledge("engaging", Ack(error=error))]
    assert worker._held is None


def test_request_to_an_engaged_worker_is_acknowledged_at_once_and_waits_for_the_wave():
    worker = engaged()
    assert worker.received("more", Gradients(6), "g6") == [Acknowledge("more", Ack())]
    assert worker.wave_finished(is_stuck=False, resolved=0) == [RunWave(((6, "g6"),), None)]
    assert worker.wave_finished(is_stuck=False, resolved=0) == [Acknowledge("engaging", Ack())]


def test_worker_can_be_engaged_again():
    worker = engaged()
    worker.wave_finished(is_stuck=True, resolved=0)
    assert worker.received("again", Gradients(6), "g6") == [RunWave(((6, "g6"),), None)]
    assert worker.wave_finished(False, 0) == [Acknowledge("again", Ack(stuck=-1))]


def test_stuck_is_reported_as_a_change_and_added_up_on_the_way():
    worker = engaged()
    worker.gradients_ready(origin(FAR, 3), "g", may_wait=False)
    worker.wave_finished(is_stuck=True, resolved=0)
    assert worker.acknowledged(Ack(stuck=2)) == [Acknowledge("engaging", Ack(stuck=3))]


def test_stuck_gradients_are_surveyed_then_settled():
    root = participant(ROOT, neighbours=(ROOT, MIDDLE))
    root.start()
    assert root.wave_finished(is_stuck=True, resolved=0) == [
        Send(MIDDLE, Survey(1)),
        FollowStuck(),
    ]
    assert root.reach_found({origin(MIDDLE, 3): {1, 0}}) == [Send(MIDDLE, Promise(1, 3, (0, 1)))]
    assert root.acknowledged(Ack()) == []
    assert root.acknowledged(Ack()) == [
        Send(MIDDLE, Settle(1)),
        RunWave((), frozenset()),
    ]
    assert root.wave_finished(is_stuck=False, resolved=1) == []
    assert root.acknowledged(Ack()) == [Finished(None)]


def test_promise_is_followed_once_for_each_tensor():
    worker = participant(MIDDLE)
    assert worker.received(1, Survey(1)) == [FollowStuck()]
    assert worker.reach_found({}) == [Acknowledge(1, Ack())]
    assert worker.received(2, Promise(1, 4, (0, 2))) == [FollowSend(4, (0, 2))]
    assert worker.received(3, Promise(1, 4, (1, 2))) == [Acknowledge(3, Ack())]
    assert worker.reach_found({}) == [FollowSend(4, (1,))]
    assert worker.reach_found({}) == [Acknowledge(2, Ack())]
    assert worker.received(4, Settle(1)) == [RunWave((), frozenset({4}))]


def test_promise_that_overtakes_the_survey_starts_the_round():
    worker = participant(MIDDLE, neighbours=(FAR,))
    assert worker.received(1, Promise(2, 4, (0,))) == [Send(FAR, Survey(2)), FollowStuck()]
    assert worker.received(2, Survey(2)) == [Acknowledge(2, Ack())]
    assert worker.reach_found({}) == [FollowSend(4, (0,))]


def test_a_promise_counts_in_its_round_only():
    worker = participant(MIDDLE)
    worker.received(1, Promise(1, 4, (0,)))
    worker.reach_found({})
    worker.reach_found({})
    assert worker.received(2, Settle(1)) == [RunWave((), frozenset({4}))]
    worker.wave_finished(is_stuck=True, resolved=0)
    worker.received(3, Survey(2))
    worker.reach_found({})
    assert worker.received(4, Settle(2)) == [RunWave((), frozenset())]


def test_floods_are_passed_on_once():
    worker = participant(MIDDLE, neighbours=(ROOT, MIDDLE, FAR))
    assert worker.received(1, Settle(1))[:2] == [Send(ROOT, Settle(1)), Send(FAR, Settle(1))]
    assert worker.received(2, Settle(1)) == [Acknowledge(2, Ack())]


def test_another_round_follows_one_that_resolved_something_on_another_worker():
    root = participant(ROOT, neighbours=(MIDDLE,))
    root.start()
    root.wave_finished(is_stuck=True, resolved=0)
    root.acknowledged(Ack())
    assert root.reach_found({}) == [Send(MIDDLE, Settle(1)), RunWave((), frozenset())]
    assert root.wave_finished(is_stuck=True, resolved=0) == []
    assert root.acknowledged(Ack(resolved=1)) == [Send(MIDDLE, Survey(2)), FollowStuck()]


def test_pass_that_cannot_get_on_fails_instead_of_going_round_for_ever():
    root = participant(ROOT)
    root.start()
    root.wave_finished(is_stuck=True, resolved=0)
    root.reach_found({})
    (outcome,) = root.wave_finished(is_stuck=True, resolved=0)
    assert "stuck at 1 workers" in outcome.error.text


def test_error_goes_up_at_once_and_ends_the_pass_at_the_root():
    worker = engaged()
    worker.gradients_ready(origin(FAR, 3), "g", may_wait=False)
    assert worker.failed(Failure("boom")) == [Acknowledge("engaging", Ack(error=Failure("boom")))]
    root = participant(ROOT)
    root.start()
    root.gradients_ready(origin(MIDDLE, 3), "g", may_wait=False)
    assert root.acknowledged(Ack(error=Failure("boom"))) == [Finished(Failure("boom"))]
    assert root.wave_finished(is_stuck=False, resolved=0) == []


def test_nothing_runs_after_an_error():
    worker = engaged()
    worker.failed(Failure("boom"))
    assert worker.received("late", Gradients(6), "g") == [
        Acknowledge("late", Ack(error=Failure("boom")))
    ]
    assert worker.gradients_ready(origin(FAR, 3), "g", may_wait=False) == []


def test_abandoned_worker_lets_go_of_who_waits_for_it():
    worker = engaged()
    assert worker.abandoned() == [Acknowledge("engaging", Ack())]
    assert worker.wave_finished(is_stuck=True, resolved=0) == []
    assert worker.received("late", Gradients(6), "g") == [Acknowledge("late", Ack())]


class Simulation:
    """Workers that answer gradients at random, over a network without any order."""

    def __init__(self, seed, size):
        self.rng = random.Random(seed)
        self.workers = [participant(w, range(size)) for w in range(size)]
        self.under_way = []
        self.outcome = []
        self.budget = self.rng.randint(0, 40)
        self.stuck = [False] * size
        self.owed = Counter()
        self.lost = None
        self.numbers = itertools.count()
        self.open = {}
        self.failed = set()
        self.steps = 0
        self.promises = self.rng.randint(0, 12)
        self.promised = defaultdict(set)
        self.round = 0
        self.returned = 0
        self.made = self.taken = 0

    def perform(self, worker, effects):
        if worker in self.failed:
            assert all(isinstance(effect, Acknowledge) for effect in effects), effects
        for effect in effects:
            if isinstance(effect, Send):
                self.owed[worker, effect.to] += 1
                if isinstance(effect.request, Survey | Settle):
                    assert effect.to != worker, "floods itself"
                number = next(self.numbers)
                self.open[number] = effect.request
                token = (worker, number)
                self.under_way.append((worker, effect.to, effect.request, effect.payload, token))
            elif isinstance(effect, Acknowledge):
                sender, number = effect.token
                assert self.open.pop(number, None) is not None, "acknowledged twice"
                self.returned += effect.returned is not None
                self.under_way.append((worker, sender, effect.ack, effect.returned))
            elif isinstance(effect, Finished):
                self.outcome.append(effect.error)
            else:
                self.round += worker == ROOT and isinstance(effect, FollowStuck)
                self.under_way.append((worker, worker, effect))

    def step(self):
        self.steps += 1
        assert self.steps < 20_000, "the pass goes round for ever"
        item = self.under_way.pop(self.rng.randrange(len(self.under_way)))
        sender, receiver, what = item[:3]
        actor = self.workers[receiver]
        if self.lost in (sender, receiver):
            self.tell_of_loss(sender)
        elif isinstance(what, Ack):
            self.owed[receiver, sender] -= 1
            self.perform(receiver, actor.acknowledged(what, item[3]))
            if what.error is not None:
                self.failed.add(receiver)
        elif isinstance(what, RunWave):
            self.wave(receiver, what)
        elif isinstance(what, WaveEnd):
            self.perform(receiver, actor.wave_finished(what.is_stuck, what.resolved))
        elif isinstance(what, FollowStuck | FollowSend):
            self.perform(receiver, actor.reach_found(self.reach()))
        else:
            if isinstance(what, Promise):
                self.promised[receiver, what.round].add(what.message_id)
            self.perform(receiver, actor.received(item[4], what, item[3], sender))

    def reach(self):
        """The promises that stuck gradients would reach, which may be broken."""
        reached = {}
        while self.promises and self.rng.random() < 0.5:
            self.promises -= 1
            target = self.rng.randrange(len(self.workers))
            reached[origin(target, self.rng.randint(1, 3))] = {self.rng.randint(0, 1)}
        return reached

    def wave(self, worker, wave):
        self.taken += len(wave.arrived)
        if wave.only_promised is not None:
            promised = self.promised[worker, self.round]
            assert wave.only_promised == promised, "of another round"
        while self.budget and self.rng.random() < 0.7:
            self.budget -= 1
            actor, back = self.workers[worker], self.workers[worker]._parent_id
            there = self.rng.randrange(len(self.workers))
            target = there if back is None or self.rng.random() < 0.5 else back
            last = not self.budget or self.rng.random() < 0.4
            message = origin(target, self.budget)
            self.made += 1
            self.perform(worker, actor.gradients_ready(message, "g", may_wait=last))
            if last:
                break
        settled = wave.only_promised is not None
        chance = 0.2 if settled and self.budget else 0.0 if settled else 0.5
        self.stuck[worker] = self.rng.random() < chance
        # Something may arrive between the wave's last gradients and its end.
        self.under_way.append((worker, worker, WaveEnd(self.stuck[worker], int(settled))))

    def lose(self, worker):
        self.lost = worker
        for other in range(worker):
            if self.owed[other, worker]:
                self.tell_of_loss(other)

    def tell_of_loss(self, worker):
        if worker != self.lost:
            effects = self.workers[worker].failed(Failure(f"worker {self.lost} was lost"))
            self.perform(worker, effects)
            self.failed.add(worker)

    def abandon(self):
        """Nobody waits for the pass any more; whatever was asked is still acknowledged."""
        for number, worker in enumerate(self.workers):
            self.perform(number, worker.abandoned())
            self.failed.add(number)
        while self.under_way:
            self.step()
        assert not self.open
        self.check_nothing_follows()

    def check_nothing_follows(self):
        """Checks that what still happens to workers whose pass is over has no effect."""
        for worker in self.workers:
            worker.abandoned()
        for worker in self.workers:
            late = worker.received("late", Survey(99))
            assert [type(effect) for effect in late] == [Acknowledge]
            assert late[0].token == "late"
            assert worker.gradients_ready(origin(MIDDLE, 9), "g", may_wait=False) == []
            assert worker.wave_finished(is_stuck=True, resolved=1) == []
            assert worker.reach_found({origin(MIDDLE, 9): {0}}) == []
            assert worker.failed(Failure("late")) == []
            assert worker.acknowledged(Ack(error=Failure("late"))) == []
            assert worker.abandoned() == []

    def check_root_is_through(self):
        """At the root nothing follows its verdict, even before it is told to stop."""
        root = self.workers[ROOT]
        error = self.outcome[0]
        assert root.received("late", Gradients(9), "g") == [Acknowledge("late", Ack(error=error))]
        assert root.gradients_ready(origin(MIDDLE, 9), "g", may_wait=False) == []
        assert root.acknowledged(Ack()) == []
        assert root.failed(Failure("late")) == []
        assert root.abandoned() == []

    def run(self, lose_at=None):
        self.perform(ROOT, self.workers[ROOT].start())
        steps = 0
        while self.under_way:
            if self.lost is None:
                assert not self.outcome, "ended while something was under way"
            self.step()
            steps += 1
            if steps == lose_at:
                self.lose(len(self.workers) - 1)
        return self.outcome


def check_pass(seed):
    size = 1 + seed % 5
    simulation = Simulation(seed, size)
    assert simulation.run() == [None], f"reproduce with check_pass({seed})"
    assert simulation.taken == simulation.made, "gradients were lost, or worked on twice"
    assert not any(simulation.stuck)
    assert not simulation.open
    simulation.check_root_is_through()
    simulation.check_nothing_follows()


def check_pass_that_is_abandoned(seed):
    simulation = Simulation(seed, size=1 + seed % 5)
    simulation.perform(ROOT, simulation.workers[ROOT].start())
    for _ in range(simulation.rng.randint(0, 30)):
        if simulation.under_way:
            simulation.step()
    simulation.abandon()


def check_pass_with_loss(seed):
    simulation = Simulation(seed, size=2 + seed % 4)
    outcome = simulation.run(lose_at=simulation.rng.randint(1, 30))
    assert len(outcome) == 1, f"reproduce with check_pass_with_loss({seed})"
    assert outcome[0] is None or "was lost" in outcome[0].text
    simulation.check_root_is_through()


def test_passes_that_are_played_return_gradients():
    returned = []
    for seed in range(20):
        simulation = Simulation(seed, size=3)
        simulation.run()
        returned.append(simulation.returned)
    assert sum(map(bool, returned)) > 5


@pytest.mark.parametrize("block", range(4))
def test_root_ends_exactly_when_nothing_is_under_way(block):
    for seed in range(block * 100, block * 100 + 100):
        check_pass(seed)


@pytest.mark.parametrize("block", range(4))
def test_pass_always_ends_when_a_worker_is_lost(block):
    for seed in range(block * 100, block * 100 + 100):
        check_pass_with_loss(seed)


@pytest.mark.parametrize("block", range(4))
def test_nothing_more_happens_once_nobody_waits_for_a_pass(block):
    for seed in range(block * 100, block * 100 + 100):
        check_pass_that_is_abandoned(seed)
