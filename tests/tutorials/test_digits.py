"""The main job as a person runs it: real processes, started, killed and interrupted."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.free_ports import free_port
from tests.tutorials.jobs import (
    PNG_SIGNATURE,
    ROOT,
    SECONDS_FOR_A_RUN,
    SECONDS_TO_NOTICE,
    Job,
    assert_all_gone,
    running,
    wait_until,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("digits"),
    pytest.mark.skipif(sys.platform != "linux", reason="looks at processes through /proc"),
]

_TRAIN = ROOT / "tutorials" / "digits" / "train.py"
_FOREVER = ("--epochs", "10000", "--batch-size", "256")


@contextmanager
def _training(folder: Path, *arguments: str) -> Iterator[Job]:
    picture = ["--output", str(folder / "curves.png")]
    with running(folder / "log", [sys.executable, str(_TRAIN), *picture, *arguments]) as job:
        yield job


@contextmanager
def _by_hand(folder: Path, *arguments: str) -> Iterator[tuple[Job, Job]]:
    """A server and one trainer, each started by a command of its own."""
    ranks = [*arguments, "--world-size", "2", "--master-port", str(free_port()), "--rank"]
    (folder / "trainer").mkdir()
    with (
        _training(folder / "trainer", *ranks, "1") as trainer,
        _training(folder, *ranks, "0") as server,
    ):
        yield server, trainer


def _accuracy(output: str) -> float:
    found = re.search(r"final test accuracy: ([\d.]+)%", output)
    assert found, output
    return float(found[1])


def test_the_job_reads_at_least_95_percent_of_the_digits_and_draws_its_curves(
    tmp_path: Path,
) -> None:
    with _training(tmp_path, "--epochs", "8", "--trainers", "2") as job:
        assert job.wait(SECONDS_FOR_A_RUN) == 0, job.output()
        assert _accuracy(job.output()) >= 95.0
    assert (tmp_path / "curves.png").read_bytes().startswith(PNG_SIGNATURE)


def test_a_killed_server_ends_the_job_with_an_error_that_names_it(tmp_path: Path) -> None:
    with _training(tmp_path, *_FOREVER, "--trainers", "1") as job:
        job.wait_for_output("epoch 1:")
        ranks = job.ranks()
        os.kill(ranks[0], signal.SIGKILL)
        assert job.wait(SECONDS_TO_NOTICE) == 1
        assert job.output().endswith("the job has failed: server was killed by SIGKILL\n")
        assert_all_gone(ranks)


def test_ctrl_c_while_processes_still_start_ends_them_too(tmp_path: Path) -> None:
    with _training(tmp_path, "--trainers", "1") as job:
        wait_until(lambda: len(job.ranks()) == 2, SECONDS_TO_NOTICE, "two processes")
        ranks = job.ranks()
        os.killpg(job.process.pid, signal.SIGINT)
        assert job.wait(SECONDS_TO_NOTICE) == 128 + signal.SIGINT
        assert "Traceback" not in job.output()
        assert_all_gone(ranks)


def test_ctrl_c_before_any_process_starts_ends_the_job(tmp_path: Path) -> None:
    with _training(tmp_path) as job:
        maps = Path(f"/proc/{job.process.pid}/maps")
        wait_until(lambda: "libtorch_cpu" in maps.read_text(), SECONDS_TO_NOTICE, "torch loaded")
        assert not job.ranks()
        os.killpg(job.process.pid, signal.SIGINT)
        assert job.wait(SECONDS_TO_NOTICE) == 128 + signal.SIGINT
        assert job.output() == "\ninterrupted\n"


def test_no_process_outlives_a_launcher_that_was_killed_outright(tmp_path: Path) -> None:
    with _training(tmp_path, *_FOREVER, "--trainers", "1") as job:
        job.wait_for_output("epoch 1:")
        ranks = job.ranks()
        job.process.kill()
        assert_all_gone(ranks)


def test_a_server_started_by_hand_names_the_trainer_it_lost(tmp_path: Path) -> None:
    with _by_hand(tmp_path, *_FOREVER) as (server, trainer):
        server.wait_for_output("epoch 1:")
        trainer.process.kill()
        assert server.wait(SECONDS_TO_NOTICE) == 1
        assert "WorkerLostError: worker 'trainer1'" in server.output()


def test_the_job_runs_under_torchrun(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    script = [str(_TRAIN), "--epochs", "2", "--output", str(tmp_path / "curves.png")]
    with running(tmp_path / "log", [*torchrun, "--nproc-per-node", "2", *script]) as job:
        assert job.wait(SECONDS_FOR_A_RUN) == 0, job.output()
        assert "1 server, 1 trainers" in job.output()
        assert _accuracy(job.output()) > 50.0
