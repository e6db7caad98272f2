"""Games of stages, backups, spares and a driver; ``make simulate`` plays 10 000."""

from __future__ import annotations

from collections import Counter

from tests.seeded_games import check_seeds
from tests.tensorwire.pipeline.backup_game import check_game, shorten_game


def test_no_stage_has_two_owners_no_step_is_mixed_and_one_loss_loses_nothing() -> None:
    ends = Counter(check_seeds(check_game, range(400), shorten_game))
    assert ends["finished"] > ends["lost"] > 0  # some games lose two neighbours at once
