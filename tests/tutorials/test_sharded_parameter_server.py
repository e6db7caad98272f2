"""The sharded parameter server: weights are divided evenly, and training with them works."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.tutorials.jobs import assert_pictures, number_after, run_tutorial
from tutorials.digits.sharded import divide


def test_shares_hold_every_weight_once_and_differ_by_no_more_than_the_largest() -> None:
    sizes = {"a": 50, "b": 30, "c": 20, "d": 20, "e": 10}
    weights = {name: torch.zeros(size) for name, size in sizes.items()}
    shares = divide(weights, 3)
    assert sorted(name for share in shares for name in share) == sorted(sizes)
    totals = [sum(each.numel() for each in share.values()) for share in shares]
    assert max(totals) - min(totals) <= 10


@pytest.mark.slow
@pytest.mark.xdist_group("digits")
@pytest.mark.usefixtures("process_server")
def test_two_servers_and_one_trainer_learn_to_read_digits(tmp_path: Path) -> None:
    roles = "coordinator:1 server:2,service trainer:1,service"
    output = run_tutorial(tmp_path, "digits.sharded", roles, "--servers", "2", "--epochs", "6")
    assert "2 servers, 1 trainers" in output
    assert number_after("final test accuracy:", output) >= 85.0
    assert_pictures(tmp_path, "sharded.png")
