"""The soak program, small, and when it is content."""

from __future__ import annotations

import subprocess
import sys

import pytest

from benchmarks.soak import grown


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_it_reports_every_process_and_fails_when_one_grew_too_much() -> None:
    command = [sys.executable, "-m", "benchmarks.soak", "--small", "2000", "--large", "80"]
    done = subprocess.run(
        [*command, "--limit", "-1"], capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 1, done.stderr
    assert "2000 small calls over TENSORWIRE" in done.stdout
    assert "80 calls with 1 MiB over TENSORWIRE" in done.stdout
    assert done.stdout.count("caller ") == 5
    assert done.stdout.count("worker ") == 2


def test_what_is_taken_in_the_first_fifth_does_not_count_as_growth() -> None:
    assert grown([1.0, 50.0, 90.0, 100.0, *[100.0] * 16]) == 0.0
    assert grown([100.0] * 10 + [130.0] + [90.0] * 9) == 30.0
