"""Jobs in real processes: agents, which begin with torch imported, and what their workers note."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from tests.machines import Machine
from tests.processes import ready_made
from tests.waiting import eventually

PROGRAMS = Path(__file__).parent / "programs"
LIGHT = str(PROGRAMS / "light.py")
FORKED = ("--run-path", "--start-method", "fork", "--monitor-interval", "0.05")
"""Flags for workers that begin with torch imported, as their agent has."""
SECONDS = 60.0
"""A deadline that only a failing test reaches, however busy the machine is."""


@dataclass(frozen=True)
class Start:
    """A line of the journal: a life of a worker began, with optimizers imported if warm."""

    name: str
    life: int
    pid: int
    at: float
    environment: dict[str, str]
    is_warm: bool = False

    @property
    def lives(self) -> bool:
        return is_running(self.pid)


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


@dataclass
class Agent:
    """One agent, as a process."""

    process: BaseProcess
    output: Path

    @property
    def said(self) -> str:
        return self.output.read_text()

    @property
    def ended_at(self) -> float:
        """The time, as the agent itself has written it down."""
        return float(self.output.with_suffix(".ended").read_text())

    def send(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def wait(self, seconds: float = SECONDS) -> int:
        """Its exit code."""
        self.process.join(seconds)
        assert self.process.exitcode is not None, f"still running: {self.said}"
        return self.process.exitcode


@dataclass
class Job:
    """A job whose workers write to one journal."""

    folder: Path
    agents: list[Agent] = field(default_factory=list)

    def start(
        self,
        *arguments: str,
        main: str = "rpcrun",
        machine: Machine | None = None,
        **variables: str,
    ) -> Agent:
        """Starts an agent.

        Args:
            arguments: its command line; the test says where the job's folder is.
            main: rpcrun, torchrun, or a module whose ``main`` takes the arguments.
            machine: where it runs. Default in the test's own network.
            variables: its environment, beyond this process's.
        """
        output = self.folder / f"agent{len(self.agents)}.out"
        output.touch()
        told = (main, arguments, str(output), variables, machine)
        start = ready_made().Process(target=_run, args=told)
        start.start()
        agent = Agent(start, output)
        self.agents.append(agent)
        return agent

    def end(self) -> None:
        """Tells the workers that wait to end."""
        (self.folder / "end").touch()

    @property
    def starts(self) -> list[Start]:
        journal = self.folder / "journal"
        lines = journal.read_text().splitlines(keepends=True) if journal.exists() else []
        return [Start(**json.loads(line)) for line in lines if line.endswith("\n")]

    def life(self, name: str, number: int = 1) -> Start:
        """Waits until a life of a worker has begun."""
        assert eventually(lambda: bool(self._of(name, number)), SECONDS, 0.05), (
            f"life {number} of {name} did not begin; {self.names}\n{self.said}"
        )
        return self._of(name, number)[0]

    def _of(self, name: str, number: int) -> list[Start]:
        return [each for each in self.starts if (each.name, each.life) == (name, number)]

    @property
    def names(self) -> list[str]:
        """Of the workers that began, with their lives, sorted."""
        return sorted(f"{each.name}#{each.life}" for each in self.starts)

    def ended_at(self, name: str, life: int) -> float:
        """The time at which a worker was done, as it has written it down."""
        return float((self.folder / f"{name}#{life}.ended").read_text())

    @property
    def said(self) -> str:
        return "\n".join(agent.said for agent in self.agents)


def progress(work: Job, name: str) -> dict[str, Any]:
    """The step that a trainer has written down last."""
    path = work.folder / f"{name}.progress"
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"steps": 0}
    return found


def works_on(work: Job, name: str, after: dict[str, Any] | None = None) -> dict[str, Any]:
    """Waits until a trainer, in a later life than ``after`` was, has done some more steps."""
    lives = (after or {}).get("incarnation", -1)

    def steps() -> int:
        now = progress(work, name)
        return int(now["steps"]) if now.get("incarnation", lives) > lives else -1

    before = max(0, steps())
    assert eventually(lambda: steps() >= before + 3, SECONDS, 0.05), (
        f"{name} makes no steps; its agents said:\n{work.said}"
    )
    return progress(work, name)


@contextlib.contextmanager
def job(folder: Path) -> Iterator[Job]:
    """A job that leaves nothing running behind, whatever becomes of the test."""
    made = Job(folder)
    try:
        yield made
    finally:
        made.end()
        for agent in made.agents:
            agent.process.join(0 if sys.exc_info()[0] else SECONDS)
            agent.process.kill()
            agent.process.join()
            agent.process.close()
        for start in made.starts:
            with contextlib.suppress(ProcessLookupError):
                os.kill(start.pid, signal.SIGKILL)


_MAINS = {"rpcrun": "tensorwire.launch.main", "torchrun": "torch.distributed.run"}


def _run(
    main: str,
    arguments: Sequence[str],
    output: str,
    variables: dict[str, str],
    machine: Machine | None,
) -> None:
    if machine is not None:
        machine.enter()
    file = os.open(output, os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.environ.update(variables)
    os.chdir(Path(output).parent)
    module = importlib.import_module(_MAINS.get(main, main))
    try:
        module.main(*(list(arguments),) if main in _MAINS else arguments)
    finally:
        Path(output).with_suffix(".ended").write_text(str(time.time()))
