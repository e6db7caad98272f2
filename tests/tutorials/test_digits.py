"""One server and two trainers as a person runs them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tutorials.jobs import assert_pictures, number_after, run_tutorial

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("digits"),
    pytest.mark.usefixtures("process_server"),
]


def test_the_job_reads_nine_of_ten_digits_and_draws_its_curves(tmp_path: Path) -> None:
    roles = "server:1 trainer:2,service"
    output = run_tutorial(tmp_path, "digits.train", roles, "--epochs", "6")
    assert "1 server, 2 trainers, backend TENSORWIRE" in output
    assert number_after("final test accuracy:", output) >= 90.0
    assert_pictures(tmp_path, "curves.png")
