"""The pass protocol, event by event: what one worker decides, and whole passes without tensors."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from autograd_dist.passes import (
    Ack,
    Acknowledge,
    Finished,
    FollowSend,
    FollowStuck,
    Gradients,
    Participant,
    Promise,
    RunWave,
    Send,
    Settle,
    Survey,
)
from autograd_dist.recv_node import Origin

ROOT, MIDDLE, FAR = 0, 1, 2
FIRST_WAVE = [RunWave((), None)]


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
    assert root.gradients_ready(origin(MIDDLE, 3), "g") == [Send(MIDDLE, Gradients(3), "g")]
    assert root.wave_finished(is_stuck=False, resolved=0) == []
    assert root.acknowledged(Ack()) == [Finished(None)]


def test_request_that_engages_is_acknowledged_when_everything_it_caused_is():
    worker = engaged()
    assert worker.gradients_ready(origin(FAR, 3), "g") == [Send(FAR, Gradients(3), "g")]
    assert worker.wave_finished(is_stuck=False, resolved=0) == []
    assert worker.acknowledged(Ack()) == [Acknowledge("engaging", Ack())]


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
    worker.gradients_ready(origin(FAR, 3), "g")
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


def test_floods_are_passed_on_once():
    worker = participant(MIDDLE, neighbours=(ROOT, MIDDLE, FAR))
    assert worker.received(1, Settle(1))[:2] == [Send(ROOT, Settle(1)), Send(FAR, Settle(1))]
    assert worker.received(2, Settle(1)) == [Acknowledge(2, Ack())]


def test_pass_that_cannot_get_on_fails_instead_of_going_round_for_ever():
    root = participant(ROOT)
    root.start()
    root.wave_finished(is_stuck=True, resolved=0)
    root.reach_found({})
    (outcome,) = root.wave_finished(is_stuck=True, resolved=0)
    assert "stuck at 1 workers" in outcome.error


def test_error_goes_up_at_once_and_ends_the_pass_at_the_root():
    worker = engaged()
    worker.gradients_ready(origin(FAR, 3), "g")
    assert worker.failed("boom") == [Acknowledge("engaging", Ack(error="boom"))]
    root = participant(ROOT)
    root.start()
    root.gradients_ready(origin(MIDDLE, 3), "g")
    assert root.acknowledged(Ack(error="boom")) == [Finished("boom")]
    assert root.wave_finished(is_stuck=False, resolved=0) == []


def test_nothing_runs_after_an_error():
    worker = engaged()
    worker.failed("boom")
    assert worker.received("late", Gradients(6), "g") == [Acknowledge("late", Ack(error="boom"))]
    assert worker.gradients_ready(origin(FAR, 3), "g") == []


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

    def perform(self, worker, effects):
        for effect in effects:
            if isinstance(effect, Send):
                self.owed[worker, effect.to] += 1
                self.under_way.append((worker, effect.to, effect.request, effect.payload))
            elif isinstance(effect, Acknowledge):
                self.under_way.append((worker, *effect.token, effect.ack))
            elif isinstance(effect, Finished):
                self.outcome.append(effect.error)
            else:
                self.under_way.append((worker, worker, effect))

    def step(self):
        item = self.under_way.pop(self.rng.randrange(len(self.under_way)))
        sender, receiver, what = item[:3]
        actor = self.workers[receiver]
        if self.lost in (sender, receiver):
            self.tell_of_loss(sender)
        elif isinstance(what, Ack):
            self.owed[receiver, sender] -= 1
            self.perform(receiver, actor.acknowledged(what))
        elif isinstance(what, RunWave):
            self.wave(receiver, what)
        elif isinstance(what, FollowStuck | FollowSend):
            self.perform(receiver, actor.reach_found({}))
        else:
            self.perform(receiver, actor.received((sender,), what, item[3]))

    def wave(self, worker, wave):
        while self.budget and self.rng.random() < 0.7:
            self.budget -= 1
            target = self.rng.randrange(len(self.workers))
            ready = self.workers[worker].gradients_ready(origin(target, self.budget), "g")
            self.perform(worker, ready)
        settled = wave.only_promised is not None
        self.stuck[worker] = not settled and self.rng.random() < 0.5
        finished = self.workers[worker].wave_finished(self.stuck[worker], int(settled))
        self.perform(worker, finished)

    def lose(self, worker):
        self.lost = worker
        for other in range(worker):
            if self.owed[other, worker]:
                self.tell_of_loss(other)

    def tell_of_loss(self, worker):
        if worker != self.lost:
            effects = self.workers[worker].failed(f"worker {self.lost} was lost")
            self.perform(worker, effects)

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


@pytest.mark.parametrize("block", range(4))
def test_root_ends_exactly_when_nothing_is_under_way(block):
    for seed in range(block * 100, block * 100 + 100):
        simulation = Simulation(seed, size=1 + seed % 5)
        assert simulation.run() == [None], f"reproduce with Simulation({seed}, {1 + seed % 5})"
        assert not any(simulation.stuck)


@pytest.mark.parametrize("block", range(4))
def test_pass_always_ends_when_a_worker_is_lost(block):
    for seed in range(block * 100, block * 100 + 100):
        simulation = Simulation(seed, size=2 + seed % 4)
        outcome = simulation.run(lose_at=simulation.rng.randint(1, 30))
        assert len(outcome) == 1, f"seed {seed}"
        assert outcome[0] is None or "was lost" in outcome[0]
