"""Pulls are answered when the slowest trainer is far enough, and not before."""

from __future__ import annotations

import random

import pytest

from tensorwire.parameter_server.decisions.clock import Clock, Cut, Push, Refusal
from tensorwire.parameter_server.decisions.consistency import BSP, SSP, UNBOUNDED, Async
from tensorwire.parameter_server.decisions.reads import Answer, Pull, Reads, Turn


def two() -> Clock:
    made = Clock(0, Async())
    made.prime({0: 0, 1: 0}, 0, 0)
    return made


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_a_stopped_trainer_stops_the_others_after_exactly_so_many_steps(staleness: int) -> None:
    clock, reads = two(), Reads(staleness)
    answered = 0
    for step in range(10):
        if reads.ask(Pull(step, 0, None), clock) == []:
            break
        answered += 1
        clock.push(Push(0, step, 0))
    assert answered == staleness + 1


def test_without_a_bound_every_pull_is_answered_at_once() -> None:
    pull = Pull(99, 0, None)
    assert Reads(UNBOUNDED).ask(pull, two()) == [Answer(pull)]


def test_a_pull_by_an_old_map_is_turned_away_and_one_by_a_new_map_waits() -> None:
    clock, reads = two(), Reads(UNBOUNDED)
    new = Pull(0, 1, "new")
    assert reads.ask(new, clock) == []
    clock.hold(1)
    clock.cut(Cut(1, {}, epoch=1, awaited={0: frozenset({9})}))
    old = Pull(0, 0, "old")
    assert reads.ask(old, clock) == [Turn(old, Refusal.MOVED)]
    clock.imported(9)
    assert reads.due(clock) == [Answer(new)]


def test_no_pull_sees_less_than_its_bound_over_random_schedules() -> None:
    for seed in range(2000):
        r = random.Random(seed)
        staleness = r.choice([0, 0, 1, 2])
        clock = Clock(0, BSP() if staleness == 0 and r.random() < 0.5 else SSP(staleness))
        trainers = r.randint(1, 4)
        clock.prime(dict.fromkeys(range(trainers), 0), 0, 0)
        reads, steps = Reads(staleness), dict.fromkeys(range(trainers), 0)
        waiting: set[int] = set()
        for _ in range(40):
            free = [each for each in steps if each not in waiting]
            assert free, f"seed {seed}: everybody waits"
            trainer = r.choice(free)
            clock.push(Push(trainer, steps[trainer], 0))
            steps[trainer] += 1
            waiting.add(trainer)
            effects = reads.due(clock) + reads.ask(Pull(steps[trainer], 0, trainer), clock)
            for effect in effects:
                assert isinstance(effect, Answer)
                assert clock.low is not None
                assert clock.low >= effect.pull.step - staleness, f"seed {seed}"
                waiting.discard(effect.pull.ask)
