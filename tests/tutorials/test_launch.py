"""What all tutorials share: how they start, and how they end when something goes wrong."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from tests.tutorials.jobs import SECONDS_TO_NOTICE, assert_all_gone, tutorial

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("tutorial_launch"),
    pytest.mark.skipif(sys.platform != "linux", reason="looks at processes through /proc"),
]

_CARTPOLE = "getting_started.cartpole"
_FOREVER = ("--rounds", "100000", "--steps", "16")


def test_a_killed_worker_ends_the_tutorial_with_an_error_that_names_it(tmp_path: Path) -> None:
    with tutorial(tmp_path, _CARTPOLE, *_FOREVER) as job:
        job.wait_for_output("round 5:")
        ranks = job.ranks()
        os.kill(ranks[2], signal.SIGKILL)
        assert job.wait(SECONDS_TO_NOTICE) == 1
        assert job.output().endswith("the job has failed: observer2 was killed by SIGKILL\n")
        assert_all_gone(ranks)


def test_ctrl_c_ends_a_tutorial_without_a_traceback(tmp_path: Path) -> None:
    with tutorial(tmp_path, _CARTPOLE, *_FOREVER, "--workers", "2") as job:
        job.wait_for_output("round 5:")
        ranks = job.ranks()
        os.killpg(job.process.pid, signal.SIGINT)
        assert job.wait(SECONDS_TO_NOTICE) == 128 + signal.SIGINT
        assert "Traceback" not in job.output()
        assert_all_gone(ranks)
