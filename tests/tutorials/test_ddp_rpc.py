"""DDP together with RPC: the gradients are a single process's, and the model learns."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.tutorials.jobs import assert_pictures, number_after, run_tutorial


@pytest.mark.slow
@pytest.mark.xdist_group("ddp_rpc")
@pytest.mark.usefixtures("process_server")
def test_gradients_are_those_of_one_process_and_packages_are_told_apart(tmp_path: Path) -> None:
    output = run_tutorial(
        tmp_path,
        "ddp_rpc.train",
        "server:1 trainer:2,service",
        "--epochs",
        "1",
        "--batch-size",
        "128",
    )
    error = re.search(r"by at most (\S+), where the largest is (\S+)", output)
    assert error, output
    assert float(error[1]) < 1e-5 * float(error[2])
    assert number_after("final test accuracy:", output) > 3 * number_after("by chance", output)
    assert_pictures(tmp_path, "loss.png")
