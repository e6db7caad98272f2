"""Whole clusters that count samples, played without I/O: some seeds of ``make simulate``."""

from __future__ import annotations

import pytest

from tests.tensorwire.parameter_server.game import check_game

_SEEDS_EACH = 8


@pytest.mark.parametrize("chunk", range(4))
def test_every_batch_counts_once_whatever_happens(chunk: int) -> None:
    for seed in range(chunk * _SEEDS_EACH, (chunk + 1) * _SEEDS_EACH):
        check_game(seed, samples=True)
