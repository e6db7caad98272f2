"""The main job as a person runs it: real processes, started, killed and interrupted."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("parameter_server"),
    pytest.mark.skipif(sys.platform != "linux", reason="looks at processes through /proc"),
]

_ROOT = Path(__file__).parents[2]
_TRAIN = _ROOT / "tutorials" / "parameter_server" / "train.py"
_PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_SECONDS_FOR_A_RUN = 90.0
_SECONDS_TO_NOTICE = 10.0
_FOREVER = "10000"


@dataclass(frozen=True, slots=True)
class Job:
    """A running job, in its own process group, writing into a file."""

    process: subprocess.Popen[bytes]
    log: Path

    def output(self) -> str:
        return self.log.read_text()

    def wait(self, seconds: float) -> int:
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            pytest.fail(f"still running after {seconds} s:\n{self.output()}")

    def wait_for_output(self, pattern: str) -> None:
        def seen() -> bool:
            ended = self.process.poll() is not None
            return re.search(pattern, self.output()) is not None or ended

        _wait_until(seen, _SECONDS_FOR_A_RUN, f"{pattern!r} in the output")
        assert re.search(pattern, self.output()), self.output()

    def ranks(self) -> dict[int, int]:
        """The launcher's children: process id by rank."""
        found = {}
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        for child in children.read_text().split():
            arguments = Path(f"/proc/{child}/cmdline").read_text().split("\0")
            if "--rank" in arguments:  # else it is about to become one
                found[int(arguments[arguments.index("--rank") + 1])] = int(child)
        return found


@contextmanager
def _running(log: Path, command: list[str]) -> Iterator[Job]:
    search_path = [os.environ.get("PYTHONPATH", ""), str(_ROOT)]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, search_path)),
        "PYTHONUNBUFFERED": "1",
        "TMPDIR": str(log.parent),  # what a killed launcher leaves goes with the test
    }
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
    try:
        yield Job(process, log)
    finally:
        process.kill()
        process.wait()


@contextmanager
def _training(folder: Path, *arguments: str) -> Iterator[Job]:
    picture = ["--output", str(folder / "curves.png")]
    with _running(folder / "log", [sys.executable, str(_TRAIN), *picture, *arguments]) as job:
        yield job


def _wait_until(condition: Callable[[], bool], seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(f"after {seconds} s still not: {what}")
        time.sleep(0.02)


def _alive(process: int) -> bool:
    """Whether the process runs; one that only waits to be collected does not."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _assert_all_gone(processes: dict[int, int]) -> None:
    _wait_until(
        lambda: not any(map(_alive, processes.values())), _SECONDS_TO_NOTICE, "all processes gone"
    )


def _accuracy(output: str) -> float:
    found = re.search(r"final test accuracy: ([\d.]+)%", output)
    assert found, output
    return float(found[1])


def test_the_job_reads_at_least_95_percent_of_the_digits_and_draws_its_curves(
    tmp_path: Path,
) -> None:
    with _training(tmp_path, "--epochs", "8", "--trainers", "2") as job:
        assert job.wait(_SECONDS_FOR_A_RUN) == 0, job.output()
        assert _accuracy(job.output()) >= 95.0
    assert (tmp_path / "curves.png").read_bytes().startswith(_PNG_SIGNATURE)


def test_a_killed_trainer_ends_the_job_with_an_error_that_names_it(tmp_path: Path) -> None:
    with _training(tmp_path, "--epochs", _FOREVER) as job:
        job.wait_for_output("epoch 1:")
        ranks = job.ranks()
        os.kill(ranks[2], signal.SIGKILL)
        assert job.wait(_SECONDS_TO_NOTICE) == 1
        assert "trainer2 was killed by SIGKILL" in job.output()
        _assert_all_gone(ranks)


def test_a_killed_server_ends_the_job_with_an_error_that_names_it(tmp_path: Path) -> None:
    with _training(tmp_path, "--epochs", _FOREVER) as job:
        job.wait_for_output("epoch 1:")
        ranks = job.ranks()
        os.kill(ranks[0], signal.SIGKILL)
        assert job.wait(_SECONDS_TO_NOTICE) == 1
        assert "server was killed by SIGKILL" in job.output()
        _assert_all_gone(ranks)


def test_ctrl_c_ends_every_process_without_a_traceback(tmp_path: Path) -> None:
    with _training(tmp_path, "--epochs", _FOREVER) as job:
        job.wait_for_output("epoch 1:")
        ranks = job.ranks()
        os.killpg(job.process.pid, signal.SIGINT)
        assert job.wait(_SECONDS_TO_NOTICE) == 128 + signal.SIGINT
        assert "interrupted" in job.output()
        assert "Traceback" not in job.output()
        _assert_all_gone(ranks)


def test_ctrl_c_while_processes_still_start_ends_them_too(tmp_path: Path) -> None:
    with _training(tmp_path) as job:
        _wait_until(lambda: len(job.ranks()) == 3, _SECONDS_TO_NOTICE, "three processes")
        ranks = job.ranks()
        os.killpg(job.process.pid, signal.SIGINT)
        assert job.wait(_SECONDS_TO_NOTICE) == 128 + signal.SIGINT
        assert "Traceback" not in job.output()
        _assert_all_gone(ranks)


def test_no_process_outlives_a_launcher_that_was_killed_outright(tmp_path: Path) -> None:
    with _training(tmp_path, "--epochs", _FOREVER) as job:
        job.wait_for_output("epoch 1:")
        ranks = job.ranks()
        job.process.kill()
        _assert_all_gone(ranks)


def test_an_unknown_backend_is_named_with_the_ones_there_are(tmp_path: Path) -> None:
    with _training(tmp_path, "--backend", "CARRIER_PIGEON", "--trainers", "1") as job:
        assert job.wait(_SECONDS_FOR_A_RUN) == 1
        assert "no backend 'CARRIER_PIGEON'; there are" in job.output()
        assert "TENSORPIPE" in job.output()


def test_ranks_started_by_hand_find_each_other(tmp_path: Path) -> None:
    arguments = ["--epochs", "2", "--world-size", "2", "--master-port", str(_free_port())]
    (tmp_path / "trainer").mkdir()
    with (
        _training(tmp_path / "trainer", *arguments, "--rank", "1") as trainer,
        _training(tmp_path, *arguments, "--rank", "0") as server,
    ):
        assert server.wait(_SECONDS_FOR_A_RUN) == 0, server.output()
        assert trainer.wait(_SECONDS_TO_NOTICE) == 0, trainer.output()
        assert "1 server, 1 trainers" in server.output()
        assert _accuracy(server.output()) > 50.0


def test_a_server_started_by_hand_names_the_trainer_it_lost(tmp_path: Path) -> None:
    arguments = ["--epochs", _FOREVER, "--world-size", "2", "--master-port", str(_free_port())]
    (tmp_path / "trainer").mkdir()
    with (
        _training(tmp_path / "trainer", *arguments, "--rank", "1") as trainer,
        _training(tmp_path, *arguments, "--rank", "0") as server,
    ):
        server.wait_for_output("epoch 1:")
        trainer.process.kill()
        assert server.wait(_SECONDS_TO_NOTICE) == 1
        assert "WorkerLostError: worker 'trainer1'" in server.output()


def test_a_trainer_started_by_hand_names_the_server_it_lost(tmp_path: Path) -> None:
    arguments = ["--epochs", _FOREVER, "--world-size", "2", "--master-port", str(_free_port())]
    (tmp_path / "trainer").mkdir()
    with (
        _training(tmp_path / "trainer", *arguments, "--rank", "1") as trainer,
        _training(tmp_path, *arguments, "--rank", "0") as server,
    ):
        server.wait_for_output("epoch 1:")
        server.process.kill()
        assert trainer.wait(_SECONDS_TO_NOTICE) == 1
        assert "worker 'server'" in trainer.output()


def test_the_job_runs_under_torchrun(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    script = [str(_TRAIN), "--epochs", "2", "--output", str(tmp_path / "curves.png")]
    with _running(tmp_path / "log", [*torchrun, "--nproc-per-node", "3", *script]) as job:
        assert job.wait(_SECONDS_FOR_A_RUN) == 0, job.output()
        assert "1 server, 2 trainers" in job.output()
        assert _accuracy(job.output()) > 50.0


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
