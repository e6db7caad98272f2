"""Runs a tutorial as a person does, in processes of its own, and looks at them."""

from __future__ import annotations

import importlib
import os
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from tests.processes import ready_made
from tests.waiting import eventually

ROOT = Path(__file__).parents[2]
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
SECONDS_FOR_A_RUN = 400.0  # only a failing run takes it
SECONDS_TO_NOTICE = 20.0


def wait_until(condition: Callable[[], bool], seconds: float, what: str) -> None:
    if not eventually(condition, seconds, pause=0.02):
        pytest.fail(f"after {seconds} s still not: {what}")


def alive(process: int) -> bool:
    """True if the process runs; one that only waits to be collected does not."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def assert_all_gone(processes: dict[int, int]) -> None:
    wait_until(
        lambda: not any(map(alive, processes.values())), SECONDS_TO_NOTICE, "all processes gone"
    )


@dataclass(frozen=True, slots=True)
class Tutorial:
    """A tutorial under way: the agent that started its workers, and what they all print."""

    agent: BaseProcess
    log: Path

    def output(self) -> str:
        return self.log.read_text()

    def wait(self, seconds: float) -> int:
        self.agent.join(seconds)
        if self.agent.exitcode is None:
            pytest.fail(f"still running after {seconds} s:\n{self.output()}")
        return self.agent.exitcode

    def wait_for_output(self, pattern: str) -> None:
        def seen() -> bool:
            return re.search(pattern, self.output()) is not None or not self.agent.is_alive()

        wait_until(seen, SECONDS_FOR_A_RUN, f"{pattern!r} in the output")
        assert re.search(pattern, self.output()), self.output()

    def workers(self) -> dict[int, int]:
        """The agent's workers, in the order of their starts: process id by number.

        They come after what else it starts, the last of which ends them if it dies.
        """
        children = (
            Path(f"/proc/{self.agent.pid}/task/{self.agent.pid}/children").read_text().split()
        )
        commands = [Path(f"/proc/{child}/cmdline").read_text() for child in children]
        watch = next(n for n, command in enumerate(commands) if "orphan_watch.py" in command)
        return {number: int(child) for number, child in enumerate(children[watch + 1 :])}


@contextmanager
def tutorial(folder: Path, module: str, roles: str, *arguments: str) -> Iterator[Tutorial]:
    """A tutorial of the package ``tutorials``, started by rpcrun.

    Args:
        folder: for what it prints and draws.
        module: its name.
        roles: of its workers, separated by spaces.
        arguments: its options.
    """
    flags = [flag for role in roles.split() for flag in ("--role", role)]
    # Forked workers have imported torch, and all else, with their agent.
    flags += ["--standalone", "--run-path", "--start-method", "fork"]
    program = str(ROOT / "tutorials" / f"{module.replace('.', '/')}.py")
    line = [*flags, program, "--output", str(folder / "output"), *arguments]
    log = folder / "log"
    log.touch()
    agent = ready_made().Process(target=_launch, args=(line, str(log), dict(os.environ)))
    agent.start()
    made = Tutorial(agent, log)
    try:
        yield made
    finally:
        if agent.is_alive():
            agent.kill()
        agent.join()
        agent.close()


def _launch(line: list[str], log: str, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    file = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    importlib.import_module("tensorwire.launch.main").main(line)


def run_tutorial(folder: Path, module: str, roles: str, *arguments: str) -> str:
    """Run a tutorial to its end, which must be a good one, and return what it printed."""
    with tutorial(folder, module, roles, *arguments) as job:
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
