"""Whole clusters that count samples, played without I/O: some seeds of ``make simulate``."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.tensorwire.parameter_server.game import check_game
from tests.tensorwire.parameter_server.game.plans import (
    Plan,
    draw_plan_with_leases,
    draw_plan_with_samples,
)

_SEEDS_EACH = 8


@pytest.mark.parametrize("chunk", range(3))
@pytest.mark.parametrize("plan_of", [draw_plan_with_samples, draw_plan_with_leases])
def test_every_batch_counts_once_whatever_happens(
    chunk: int, plan_of: Callable[[int], Plan]
) -> None:
    for seed in range(chunk * _SEEDS_EACH, (chunk + 1) * _SEEDS_EACH):
        check_game(seed, plan_of)
