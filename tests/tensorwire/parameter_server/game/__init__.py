"""Plays whole clusters without I/O: servers, trainers, a coordinator, a store, a network.

A seed says what happens in which order: messages arrive in any order and some twice, servers and
trainers are killed or cut off, come back, join, finish; snapshots are taken, shards move. The
decisions are the real ones. The state is a list of what was applied to each of a few ids; at the
end, and at each cut, it is compared with what the trainers know that they sent. Beside it each
shard has a real table and real dense parameters, which must agree with the list.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from functools import partial

import pytest

from tests.seeded_games import Mutate, breaks, check_seeds, seed_that_finds, simplest
from tests.tensorwire.parameter_server.game import cluster
from tests.tensorwire.parameter_server.game.plans import Plan, draw_plan, simpler_plans

PlanOf = Callable[[int], Plan]
"""Draws the plan of a seed."""


def check_game(seed: int, plan_of: PlanOf = draw_plan) -> int:
    """Plays the game of a seed; returns how many events there were.

    Raises:
        Exception: a rule was broken.
    """
    return _play(seed, plan_of(seed))


def _play(seed: int, plan: Plan) -> int:
    if seed % 8 == 0:
        gc.collect()  # of tables of past games, each of which has a share of all addresses
    return cluster.Game(seed, plan).play()


def check_games(seeds: Iterable[int], plan_of: PlanOf = draw_plan) -> None:
    """Plays the games of some seeds.

    Raises:
        BrokenGameError: a rule was broken; says with which plan that has as little as possible.
    """

    def calm_game(seed: int) -> str:
        play = partial(_play, seed)
        plan = simplest(plan_of(seed), simpler_plans, lambda plan: breaks(play, plan))
        return f"so does Game({seed}, {plan}).play()"

    check_seeds(partial(check_game, plan_of=plan_of), seeds, calm_game)


def seed_whose_game_finds(
    mutate: Mutate, seeds: Iterable[int], plan_of: PlanOf, turns: int
) -> int | None:
    """The first seed whose game finds a mistake; None if it survives them all.

    Args:
        mutate: makes the mistake.
        seeds: one game for each.
        plan_of: draws their plans.
        turns: a game that takes more has found it; one without mistakes is over before.

    Raises:
        Exception: the game of that seed breaks a rule without the mistake, or takes more turns.
    """

    def impatient(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(cluster, "PATIENCE", turns)
        mutate(patch)

    found = seed_that_finds(impatient, partial(check_game, plan_of=plan_of), seeds)
    if found is not None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cluster, "PATIENCE", turns)
            check_game(found, plan_of)
    return found
