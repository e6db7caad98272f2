"""Whole jobs, in which agents and workers die at any moment; ``game.py`` has the rules.

``make simulate`` plays a thousand, ``.ci/run`` a hundred: ``SIMULATE_SEEDS`` says so.
"""

from __future__ import annotations

import pytest

from tests.seeded_games import check_seeds, seeds_to_play
from tests.tensorwire.launch.game import check_game, shorten_game

TENS = min(10, max(3, seeds_to_play(0) // 10))


@pytest.mark.parametrize("tens", range(TENS))
def test_jobs_keep_the_rules_whatever_happens(tens: int) -> None:
    check_seeds(check_game, range(10 * tens, 10 * tens + 10), shorten_game)
