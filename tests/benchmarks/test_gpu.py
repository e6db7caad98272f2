"""``make gpu``: one report, and a machine without a GPU is told why there is nothing in it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.gpu", *arguments]
    hidden = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        command, cwd=ROOT, env=hidden, capture_output=True, text=True, timeout=240, check=False
    )


@pytest.mark.slow
def test_without_a_gpu_it_ends_well_and_says_why(tmp_path: Path) -> None:
    report = tmp_path / "gpu.md"
    done = run("--output", str(report))
    assert done.returncode == 0, done.stderr
    assert "Skipped: torch sees no GPU." in report.read_text()
