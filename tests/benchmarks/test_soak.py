"""The soak program, small: it runs to its end, and says so when a process grows."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def soak(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.soak", "--small", "4000", "--large", "80"]
    return subprocess.run(
        [*command, *arguments], capture_output=True, text=True, timeout=280, check=False
    )


def test_it_reports_every_process_of_both_loads() -> None:
    done = soak("--limit", "1000")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("caller ") == 5
    assert done.stdout.count("worker ") == 2
    assert "4000 small calls over TENSORWIRE" in done.stdout


def test_growth_beyond_the_limit_fails() -> None:
    assert soak("--large", "0", "--limit", "-1").returncode == 1
