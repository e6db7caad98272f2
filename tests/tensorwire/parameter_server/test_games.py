"""Whole clusters, played without I/O: some seeds of ``make simulate``."""

from __future__ import annotations

import pytest

from tests.tensorwire.parameter_server.game import check_game

_SEEDS_EACH = 15


@pytest.mark.parametrize("chunk", range(10))
def test_every_rule_holds_whatever_happens_in_which_order(chunk: int) -> None:
    for seed in range(chunk * _SEEDS_EACH, (chunk + 1) * _SEEDS_EACH):
        check_game(seed)
