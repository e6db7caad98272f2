"""Whole clusters, played without I/O: some seeds of ``make simulate``."""

from __future__ import annotations

import pytest

from tests.tensorwire.parameter_server.game import check_games
from tests.tensorwire.parameter_server.game.plans import draw_plan_with_sleepers

_SEEDS_EACH = 15


@pytest.mark.parametrize("chunk", range(10))
def test_every_rule_holds_whatever_happens_in_which_order(chunk: int) -> None:
    check_games(range(chunk * _SEEDS_EACH, (chunk + 1) * _SEEDS_EACH))


def test_every_rule_holds_when_heads_sleep_until_others_have_taken_their_places() -> None:
    check_games(range(8), draw_plan_with_sleepers)


_SEEDS_THAT_BROKE = {
    "a server came back and asked others, of whose end it had not heard": (4063, 10221),
    "a server was sent a copy, and then views that are older": (13542,),
    "an echo of a request to join came while its trainer left": (1957,),
}


@pytest.mark.parametrize("seeds", _SEEDS_THAT_BROKE.values(), ids=_SEEDS_THAT_BROKE)
def test_what_broke_a_game_once_breaks_none(seeds: tuple[int, ...]) -> None:
    check_games(seeds)
