"""Whole clusters that count samples, played without I/O: some seeds of ``make simulate``."""

from __future__ import annotations

import pytest

from tests.tensorwire.parameter_server.game import PlanOf, check_games
from tests.tensorwire.parameter_server.game.plans import (
    draw_plan_with_comings,
    draw_plan_with_leases,
    draw_plan_with_moving_files,
    draw_plan_with_samples,
)

_SEEDS_EACH = 4


@pytest.mark.parametrize("chunk", range(3))
@pytest.mark.parametrize(
    "plan_of",
    [
        draw_plan_with_samples, draw_plan_with_leases, draw_plan_with_comings,
        draw_plan_with_moving_files,
    ],
)  # fmt: skip
def test_every_batch_counts_once_whatever_happens(chunk: int, plan_of: PlanOf) -> None:
    check_games(range(chunk * _SEEDS_EACH, (chunk + 1) * _SEEDS_EACH), plan_of)


_LEASES_THAT_BROKE = {
    "pushes of leases that a resize ends": (6448, 16913),
    "a backup that lacks news of other shards": (7927,),
    "a dense group declared while rows move": (15046,),
    "a server named while it is lost": (9762, 12754),
    "a trainer dismissed by who is alone no longer": (10221,),
    "an answer with batches that its trainer never got": (7342, 12396),
}


def test_a_server_that_alone_has_a_vote_and_slept_goes_on_without_a_trainer() -> None:
    check_games([328], draw_plan_with_samples)


def test_who_joins_while_another_is_about_to_leave_begins_where_those_who_stay_are() -> None:
    check_games([2316], draw_plan_with_moving_files)


@pytest.mark.parametrize("seeds", _LEASES_THAT_BROKE.values(), ids=_LEASES_THAT_BROKE)
def test_what_broke_a_game_once_breaks_none(seeds: tuple[int, ...]) -> None:
    check_games(seeds, draw_plan_with_leases)
