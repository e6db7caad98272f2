"""Whole jobs, in which agents and workers die at any moment; ``game.py`` has the rules.

``make simulate`` plays a thousand, ``.ci/run`` a hundred: ``SIMULATE_SEEDS`` says so.
"""

from __future__ import annotations

import os

import pytest

from tests.tensorwire.launch.game import Game

TENS = min(10, max(3, int(os.environ.get("SIMULATE_SEEDS", "0")) // 10))


@pytest.mark.parametrize("tens", range(TENS))
def test_jobs_keep_the_rules_whatever_happens(tens: int) -> None:
    for seed in range(10 * tens, 10 * tens + 10):
        try:
            Game(seed).play()
        except AssertionError as error:
            raise AssertionError(f"Game({seed}).play(): {error}") from error
