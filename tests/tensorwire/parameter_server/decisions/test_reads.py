"""Pulls are answered when the slowest trainer is far enough, and not before."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from tensorwire.parameter_server.decisions.clock import Clock
from tensorwire.parameter_server.decisions.consistency import BSP, SSP, UNBOUNDED, Async
from tensorwire.parameter_server.decisions.pushes import Cut, Push, Refusal
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


class _Game:
    """Trainers that push, and wait for the pull of each next step, on one shard."""

    def __init__(self, consistency: BSP | SSP, trainers: int) -> None:
        self.clock = Clock(0, consistency)
        self.clock.prime(dict.fromkeys(range(trainers), 0), 0, 0)
        self.reads = Reads(consistency.staleness if isinstance(consistency, SSP) else 0)
        self.steps = dict.fromkeys(range(trainers), 0)
        self.waiting: set[int] = set()

    def step(self, trainer: int) -> list[Pull]:
        """Pushes and pulls as one trainer; returns which pulls are answered by that."""
        self.clock.push(Push(trainer, self.steps[trainer], 0))
        self.steps[trainer] += 1
        self.waiting.add(trainer)
        pull = Pull(self.steps[trainer], 0, trainer)
        effects = self.reads.due(self.clock) + self.reads.ask(pull, self.clock)
        answered = [each.pull for each in effects if isinstance(each, Answer)]
        assert len(answered) == len(effects)
        self.waiting.difference_update(pull.ask for pull in answered)
        return answered


@pytest.mark.kills
def test_no_pull_sees_less_than_its_bound_and_without_staleness_pulls_are_those_of_bsp(
    request: pytest.FixtureRequest, record_property: Callable[[str, int], None]
) -> None:
    """Over 10 000 random schedules under ``make kills``."""
    schedules = 200 * request.config.getoption("--kills")
    for seed in range(schedules):
        r = random.Random(seed)
        staleness, trainers = r.choice([0, 0, 1, 2]), r.randint(1, 4)
        game, other = (_Game(kind, trainers) for kind in (SSP(staleness), BSP()))
        for _ in range(40):
            free = [each for each in game.steps if each not in game.waiting]
            assert free, f"seed {seed}: everybody waits"
            trainer = r.choice(free)
            answered = game.step(trainer)
            for pull in answered:
                assert game.clock.low is not None
                assert game.clock.low >= pull.step - staleness, f"seed {seed}"
            if staleness == 0:
                assert answered == other.step(trainer), f"seed {seed}"
    record_property("times", schedules)
