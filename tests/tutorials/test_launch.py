"""What all tutorials share: how they start, and how they end when something goes wrong."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from tests.free_ports import free_port
from tests.tutorials.jobs import (
    SECONDS_FOR_A_RUN,
    SECONDS_TO_NOTICE,
    assert_all_gone,
    tutorial,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("tutorial_launch"),
    pytest.mark.skipif(sys.platform != "linux", reason="looks at processes through /proc"),
]

_CARTPOLE = "getting_started.cartpole"
_FOREVER = ("--rounds", "100000", "--steps", "16")
_SHORT = ("--rounds", "1", "--steps", "16")


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


def test_workers_started_by_hand_find_each_other(tmp_path: Path) -> None:
    arguments = [*_SHORT, "--world-size", "2", "--master-port", str(free_port())]
    (tmp_path / "observer").mkdir()
    with (
        tutorial(tmp_path / "observer", _CARTPOLE, *arguments, "--rank", "1") as observer,
        tutorial(tmp_path, _CARTPOLE, *arguments, "--rank", "0") as agent,
    ):
        assert agent.wait(SECONDS_FOR_A_RUN) == 0, agent.output()
        assert observer.wait(SECONDS_TO_NOTICE) == 0, observer.output()
        assert "1 agent, 1 observers" in agent.output()


def test_too_few_workers_are_refused_at_once(tmp_path: Path) -> None:
    with tutorial(tmp_path, _CARTPOLE, "--workers", "1") as job:
        assert job.wait(SECONDS_FOR_A_RUN) == 2
        assert "at least 2 workers" in job.output()
