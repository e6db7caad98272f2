"""Games of stages, backups, spares and a driver; ``make simulate`` plays 10 000."""

from __future__ import annotations

from collections import Counter

from tests.tensorwire.pipeline.backup_game import check_game


def test_no_stage_has_two_owners_no_step_is_mixed_and_one_loss_loses_nothing() -> None:
    ends = Counter(check_game(seed) for seed in range(400))
    assert ends["finished"] > ends["lost"] > 0  # some games lose two neighbours at once
