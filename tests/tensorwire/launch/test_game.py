"""Whole jobs, in which agents and workers die at any moment; ``game.py`` has the rules.

``make simulate`` plays a thousand.
"""

from __future__ import annotations

import pytest

from tests.tensorwire.launch.game import Game


@pytest.mark.parametrize("tens", range(4))
def test_jobs_keep_the_rules_whatever_happens(tens: int) -> None:
    for seed in range(10 * tens, 10 * tens + 10):
        try:
            Game(seed).play()
        except AssertionError as error:
            raise AssertionError(f"Game({seed}).play(): {error}") from error
