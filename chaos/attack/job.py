"""The job that is attacked, and the attacker: starts both, and kills a server now and then."""

from __future__ import annotations

import base64
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from urllib.parse import urlsplit

from chaos.attack.recording import Recorder
from chaos.attack.surroundings import MARK, Doors, Process, doors, processes
from chaos.attack.training import SERVERS, TRAINERS, note

_SECONDS = 600.0
"""A deadline for what takes seconds where little else runs."""
_BEFORE_LAST = 100
_REFRESH_SECONDS = 2.0
_REPOSITORY = Path(__file__).resolve().parents[2]


class JobError(RuntimeError):
    """The job did not do what it should; says what it printed."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of a run.

    Args:
        folder: where workers and agent write.
        seconds: how long the job is attacked.
        standalone: the job makes a key of its own, and its workers use Unix sockets; else it is
            given a key file and a port, and they use TCP.
        kill_every: seconds between two deaths of servers; 0 for none.
        seed: of all that is random.
    """

    folder: Path
    seconds: float
    standalone: bool
    kill_every: float
    seed: int


@dataclass(slots=True)
class Observed:
    """A job's course.

    Attributes:
        before: its processes when it had begun to train.
        peak: the most memory of any process, by kind.
        after: its processes at the end of the attack.
        doors: where it listened.
        calm: steps per second before the attack.
        attacked: steps per second during it.
        killed: servers, in this order.
        heard: recorded connections and datagrams.
        counts: what the attacker did, and how often.
        last: the last step.
        code: the job's exit code.
    """

    before: list[Process] = field(default_factory=list)
    peak: dict[str, int] = field(default_factory=dict)
    after: list[Process] = field(default_factory=list)
    doors: Doors = field(default_factory=Doors)
    calm: float = 0.0
    attacked: float = 0.0
    killed: list[str] = field(default_factory=list)
    heard: tuple[int, int] = (0, 0)
    counts: dict[str, int] = field(default_factory=dict)
    last: int = 0
    code: int | None = None


class Job:
    """A job that trains until it is told the last step."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.folder = settings.folder
        self.mark = f"{os.getpid()}-{time.monotonic_ns()}"
        self.output = self.folder / "agent.log"
        self._process: subprocess.Popen[bytes] | None = None

    @contextmanager
    def running(self) -> Iterator[None]:
        """Starts it; ends it at once if something fails."""
        roles = ["--role", f"ps:{len(SERVERS)},service,max_restarts=10000"]
        roles += ["--role", f"trainer:{len(TRAINERS)},max_restarts=0"]
        command = [sys.executable, "-m", "tensorwire.launch", *self._meets(), *roles]
        command += ["--start-method", "fork", "-m", "chaos.attack.training", str(self.folder)]
        command.append("local" if self._settings.standalone else "network")
        environment = os.environ | {MARK: self.mark, "PYTHONPATH": os.pathsep.join(
            [str(_REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])])}  # fmt: skip
        with self.output.open("wb") as output:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment
            )
        try:
            yield
        finally:
            self._process.kill()
            self._process.wait()
            for left in processes(self.mark):
                os.kill(left.pid, signal.SIGKILL)

    def _meets(self) -> list[str]:
        if self._settings.standalone:
            return ["--standalone"]
        key = self.folder / "key"
        key.touch(0o600)
        key.write_text(os.urandom(32).hex())
        with socket.create_server(("localhost", 0)) as found:
            port = found.getsockname()[1]
        where = ["--rdzv-endpoint", f"localhost:{port}", "--rdzv-id", "attacked"]
        return [*where, "--group-key-file", str(key)]

    def until(self, condition: Callable[[], bool], what: str, seconds: float = _SECONDS) -> None:
        """Waits.

        Raises:
            JobError: the job ended, or it takes too long.
        """
        deadline = time.monotonic() + seconds
        while not condition():
            ended = self._process is None or self._process.poll() is not None
            if ended or time.monotonic() > deadline:
                raise JobError(f"{what}: not so{' as the job ended' if ended else ''}; {self.said}")
            time.sleep(0.05)

    @property
    def said(self) -> str:
        """All that the agent and workers printed."""
        return self.output.read_text(errors="replace")

    def steps(self) -> int:
        """The steps that both trainers have made."""
        files = [self.folder / f"{name}.step" for name in TRAINERS]
        return min(int(each.read_text()) if each.exists() else 0 for each in files)

    def life(self, name: str) -> dict[str, str]:
        """The facts that a worker has told of itself."""
        return dict(json.loads((self.folder / f"{name}.life").read_text()))

    def has_begun(self) -> bool:
        """True if every worker is in the group."""
        return all((self.folder / f"{name}.life").exists() for name in (*SERVERS, *TRAINERS))

    def processes(self) -> list[Process]:
        """All of its processes; workers are forked off the agent, which has imported torch."""
        lives = (self.folder / f"{name}.life" for name in (*SERVERS, *TRAINERS))
        workers = {int(json.loads(life.read_text())["pid"]) for life in lives if life.exists()}
        return [
            replace(each, kind="worker") if each.pid in workers else each
            for each in processes(self.mark)
        ]

    def stores(self) -> list[int]:
        """Ports of the group's store and of torch's."""
        life = self.life(TRAINERS[0])
        found = {urlsplit(life["RPC_INIT_METHOD"]).port, int(life["MASTER_PORT"] or 0)}
        return sorted(port for port in found if port)

    def end(self) -> tuple[int, int]:
        """Has it end; returns the last step and the exit code."""
        last = self.steps() + _BEFORE_LAST
        note(self.folder / "last", str(last))
        assert self._process is not None
        try:
            return last, self._process.wait(_SECONDS)
        except subprocess.TimeoutExpired:
            raise JobError(f"the job did not end; {self.said}") from None


class Stranger:
    """The attacker's process."""

    def __init__(self, job: Job, seed: int, recorder: Recorder) -> None:
        self._job = job
        self._recorder = recorder
        self._process = subprocess.Popen(
            [sys.executable, "-m", "chaos.attack.stranger", str(seed)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=_REPOSITORY,
            env=os.environ | {"TORCH_CPP_LOG_LEVEL": "FATAL"},  # it is refused all the time
        )
        self.counts: dict[str, int] = {}
        self.heard = (0, 0)

    def begin(self, where: Doors) -> None:
        """Tells it all that it may know."""
        heard = {port: self._recorder.conversations(port)[:50] for port in where.tcp}
        grams = [each for port in where.udp for each in self._recorder.datagrams(port)]
        self.heard = (sum(map(len, heard.values())), len(grams))
        self._tell(
            where,
            conversations={
                port: [[_text(piece) for piece in pieces] for pieces in found]
                for port, found in heard.items()
                if found
            },
            datagrams=[_text(each) for each in grams],
        )

    def go_on(self, where: Doors) -> None:
        """Tells it where the job is now; takes what it has done."""
        self._tell(where)
        assert self._process.stdout is not None
        self.counts = dict(json.loads(self._process.stdout.readline()))

    def close(self) -> None:
        """Ends it."""
        self._process.kill()
        self._process.communicate()

    def _tell(self, where: Doors, **more: object) -> None:
        assert self._process.stdin is not None
        told = {"tcp": where.tcp, "udp": where.udp, "unix": where.unix}
        run_id = self._job.life(TRAINERS[0])["TORCHELASTIC_RUN_ID"]
        says = {"doors": told, "stores": self._job.stores(), "run_id": run_id, **more}
        self._process.stdin.write(json.dumps(says) + "\n")
        self._process.stdin.flush()


def _text(piece: bytes) -> str:
    return base64.b64encode(piece).decode()


def observe(settings: Settings) -> tuple[Job, Observed]:
    """Runs a job, attacks it, and lets it end.

    Raises:
        JobError: it did not begin, or does not go on.
    """
    job, seen, recorder = Job(settings), Observed(), Recorder()
    try:
        with job.running():
            job.until(lambda: job.has_begun() and job.steps() >= 50, "it trains")
            seen.calm = _pace(job, 3.0)
            seen.before = job.processes()
            seen.doors = doors(seen.before)
            recorder.close()
            stranger = Stranger(job, settings.seed, recorder)
            try:
                _attack(job, stranger, settings, seen)
                seen.last, seen.code = job.end()
            finally:
                stranger.close()
    finally:
        recorder.close()
    return job, seen


def _pace(job: Job, seconds: float) -> float:
    """Steps per second for some time."""
    first, begun = job.steps(), time.monotonic()
    time.sleep(seconds)
    return (job.steps() - first) / (time.monotonic() - begun)


def _attack(job: Job, stranger: Stranger, settings: Settings, seen: Observed) -> None:
    """Attacks for as long as was said; the attacker goes on until the job has ended."""
    stranger.begin(seen.doors)
    stranger.go_on(seen.doors)
    seen.heard = stranger.heard
    killer = Killer(job, settings)
    progress = Progress(job)
    until = time.monotonic() + settings.seconds
    while time.monotonic() < until:
        time.sleep(_REFRESH_SECONDS)
        seen.after = job.processes()
        for each in seen.after:
            seen.peak[each.kind] = max(seen.peak.get(each.kind, 0), each.memory)
        stranger.go_on(doors(seen.after))
        progress.look()
        killer.look()
    seen.attacked, seen.killed, seen.counts = progress.pace, killer.killed, stranger.counts
    job.until(killer.all_are_back, "the server that was killed is back")


class Progress:
    """The steps that are made during the attack."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._first = self._last = job.steps()
        self._begun = self._since = time.monotonic()

    def look(self) -> None:
        """Notes a step.

        Raises:
            JobError: there was none for very long.
        """
        if (steps := self._job.steps()) > self._last:
            self._last, self._since = steps, time.monotonic()
        elif time.monotonic() - self._since > _SECONDS:
            raise JobError(f"no step was made for {_SECONDS:g} s; {self._job.said}")

    @property
    def pace(self) -> float:
        """Steps per second."""
        return (self._last - self._first) / (time.monotonic() - self._begun)


class Killer:
    """Kills a server now and then, once the one before is back.

    Attributes:
        killed: those that were, in this order.
    """

    def __init__(self, job: Job, settings: Settings) -> None:
        self._job = job
        self._every = settings.kill_every
        self._draw = random.Random(settings.seed)
        self._next = time.monotonic() + self._every
        self._gone: tuple[str, int] | None = None
        self.killed: list[str] = []

    def all_are_back(self) -> bool:
        """True if who was killed is in the group again."""
        return self._gone is None or int(self._job.life(self._gone[0])["pid"]) != self._gone[1]

    def look(self) -> None:
        """Kills one if it is time."""
        if self._every and time.monotonic() >= self._next and self.all_are_back():
            name = self._draw.choice(SERVERS)
            self._gone = (name, int(self._job.life(name)["pid"]))
            os.kill(self._gone[1], signal.SIGKILL)
            self.killed.append(name)
            self._next = time.monotonic() + self._every
