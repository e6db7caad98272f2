"""Runs a tutorial as a person does, in processes of its own, and looks at them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.signals import heeding_interrupts
from tests.waiting import eventually

ROOT = Path(__file__).parents[2]
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
SECONDS_FOR_A_RUN = 90.0
SECONDS_TO_NOTICE = 20.0


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

        wait_until(seen, SECONDS_FOR_A_RUN, f"{pattern!r} in the output")
        assert re.search(pattern, self.output()), self.output()

    def ranks(self) -> dict[int, int]:
        """The launcher's children, which it starts in order: process id by rank."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return {rank: int(child) for rank, child in enumerate(children.read_text().split())}


@contextmanager
def running(log: Path, command: list[str]) -> Iterator[Job]:
    search_path = [os.environ.get("PYTHONPATH", ""), str(ROOT)]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, search_path)),
        "PYTHONUNBUFFERED": "1",
        "TMPDIR": str(log.parent),  # what a killed launcher leaves goes with the test
    }
    with log.open("wb") as output, heeding_interrupts():
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


def wait_until(condition: Callable[[], bool], seconds: float, what: str) -> None:
    if not eventually(condition, seconds, pause=0.02):
        pytest.fail(f"after {seconds} s still not: {what}")


def alive(process: int) -> bool:
    """Whether the process runs; one that only waits to be collected does not."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def assert_all_gone(processes: dict[int, int]) -> None:
    wait_until(
        lambda: not any(map(alive, processes.values())), SECONDS_TO_NOTICE, "all processes gone"
    )


@contextmanager
def tutorial(folder: Path, module: str, *arguments: str) -> Iterator[Job]:
    """A tutorial of the package ``tutorials``, under way."""
    command = [sys.executable, "-m", f"tutorials.{module}", "--output", str(folder / "output")]
    with running(folder / "log", [*command, *arguments]) as job:
        yield job


def run_tutorial(folder: Path, module: str, *arguments: str) -> str:
    """Run a tutorial to its end, which must be a good one, and return what it printed."""
    with tutorial(folder, module, *arguments) as job:
        assert job.wait(SECONDS_FOR_A_RUN) == 0, job.output()
        return job.output()


def number_after(text: str, output: str) -> float:
    """The number that follows a text in the output; the last one if there are several."""
    found = re.findall(re.escape(text) + r"\s*(-?[\d.]+\d)", output)
    assert found, output
    return float(found[-1])


def assert_pictures(folder: Path, *names: str) -> None:
    """The tutorial drew these."""
    for name in names:
        assert (folder / "output" / name).read_bytes().startswith(PNG_SIGNATURE)
