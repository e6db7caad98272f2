"""Jobs of rpcrun that are measured: the program, its processes, and the machine meanwhile."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_PROGRAM: Final = Path(__file__).with_name("train.py")
_SERVICE: Final = "service=tensorwire.parameter_server"
_LONGEST: Final = 300.0
_SECONDS_BETWEEN_LOOKS: Final = 0.002
_PAUSE: Final = 0.5


class JobFailedError(Exception):
    """A job did not do what was measured; says what it wrote."""


@dataclass(frozen=True, slots=True)
class End:
    """The end of a job.

    Args:
        at: the time.
        processor: seconds of processor time that all its processes used.
    """

    at: float
    processor: float


class Job:
    """A job on this machine: servers, and trainers that run the README's program.

    Args:
        folder: where it takes notes.
        servers: how many.
        trainers: how many.
        steps: of each trainer; -1 for as many as there are until :meth:`finish`.
        flags: of rpcrun, besides.
        restarts: of each worker.
    """

    def __init__(
        self,
        folder: Path,
        servers: int,
        trainers: int,
        steps: int,
        flags: Sequence[str] = (),
        restarts: int = 0,
    ) -> None:
        self._folder, self._trainers = folder, trainers
        again = f"max_restarts={restarts}"
        roles = (f"ps:{servers},{_SERVICE},{again}", f"trainer:{trainers},{again}")
        command = [sys.executable, "-m", "tensorwire.launch", "--standalone", *flags]
        for role in roles:
            command += ["--role", role]
        self._said = folder / "said"
        with self._said.open("wb") as output:
            self.began = time.time()
            self._process = subprocess.Popen(
                [*command, str(_PROGRAM), str(folder), str(servers), str(steps)],
                stdout=output,
                stderr=output,
            )

    def note(self, trainer: int, life: int, kind: str) -> str:
        """The note of a trainer's life; waits for it.

        Raises:
            JobFailedError: the job ended without.
        """
        path = self._folder / f"trainer:{trainer}.{life}.{kind}"
        while not path.exists():
            if self._process.poll() is not None:
                raise JobFailedError(f"no {path.name}: {self.said()}")
            time.sleep(_SECONDS_BETWEEN_LOOKS)
        return path.read_text()

    def finish(self) -> None:
        """Tells the trainers that train until then to finish."""
        (self._folder / "end").touch()

    def trainers_end(self) -> float:
        """Waits until the last trainer's process has ended; returns the time of that."""
        watched = []
        for trainer in range(self._trainers):
            with contextlib.suppress(ProcessLookupError):  # it has ended by now
                watched.append(os.pidfd_open(int(self.note(trainer, 0, "pid"))))
        for each in watched:
            select.select([each], [], [])
            os.close(each)
        return time.time()

    def end(self) -> End:
        """Waits until rpcrun has ended.

        Raises:
            JobFailedError: it failed.
        """
        _, status, used = os.wait4(self._process.pid, 0)
        self._process.returncode = os.waitstatus_to_exitcode(status)
        at = time.time()
        if self._process.returncode:
            raise JobFailedError(self.said())
        return End(at, used.ru_utime + used.ru_stime)

    def said(self) -> str:
        """All that it wrote to the terminal."""
        return self._said.read_text()

    def kill(self) -> None:
        """Ends it, if it runs."""
        if self._process.returncode is None:
            self._process.send_signal(signal.SIGTERM)
            self._process.wait(_LONGEST)


@contextlib.contextmanager
def job(
    servers: int, trainers: int, steps: int, flags: Sequence[str] = (), restarts: int = 0
) -> Iterator[Job]:
    """A job that leaves nothing behind; see :class:`Job`."""
    with tempfile.TemporaryDirectory(prefix="launcher_") as folder:
        made = Job(Path(folder), servers, trainers, steps, flags, restarts)
        try:
            yield made
        finally:
            made.kill()


@contextlib.contextmanager
def busy_cores(count: int) -> Iterator[None]:
    """Keeps cores busy with processes that do nothing else."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for each in loops:
            each.kill()
            each.wait()


def load() -> str:
    """The machine's load, to be said with what was measured."""
    return f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"


def spread(numbers: Sequence[float]) -> str:
    """Median, least and most."""
    return f"{statistics.median(numbers):.2f} ({min(numbers):.2f} to {max(numbers):.2f})"
