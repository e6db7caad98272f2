"""Starts the workers, does to them what is planned, and collects what they tell."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

from torch._C._distributed_c10d import TCPStore

from chaos.certificates import Authority
from chaos.events import Event, What
from chaos.plan import Fault, Kind
from chaos.worker import SERVER

WITNESS = "trainer0"
_SHARED_MEMORY = Path("/dev/shm")
_MARK = "CHAOS_RUN"
_START_SECONDS = 120.0
_END_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of a run.

    Args:
        backend: of all workers.
        trainers: how many; nothing is done to the first.
        bound: the liveness timeout in seconds.
        log: where the workers' standard error goes.
        certificates: folder for those of the workers, which then connect over TCP with TLS;
            None for connections without.
    """

    backend: str
    trainers: int
    bound: float
    log: Path
    certificates: Path | None = None

    @property
    def names(self) -> list[str]:
        """The workers, by rank."""
        return [SERVER, *(f"trainer{number}" for number in range(self.trainers))]

    @property
    def victims(self) -> list[str]:
        """Those to whom something is done."""
        return [name for name in self.names if name != WITNESS]


class Director:
    """One run."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._processes: dict[str, subprocess.Popen[str]] = {}
        self._pids: set[int] = set()
        self._readers: list[threading.Thread] = []
        self._stopped: dict[str, float] = {}
        self._segments = {*os.listdir(_SHARED_MEMORY)}
        self._authority = None if settings.certificates is None else Authority()
        self._store = TCPStore(
            "127.0.0.1", 0, None, True, timedelta(seconds=30), wait_for_workers=False
        )
        self._mark = f"{os.getpid()}:{self._store.port}"
        self._log = settings.log.open("w")
        self.events: list[Event] = []
        self.done: list[Fault] = []
        self.problems: list[str] = []

    def run(self, faults: Sequence[Fault], seconds: float) -> float:
        """Carries out a plan; returns when it ended, on the monotonic clock."""
        try:
            for name in self._settings.names:
                self._start(name)
            self._await_first_step()
            start = time.monotonic()
            for fault in faults:
                self._watch_until(start + fault.at)
                self._do(replace(fault, at=time.monotonic()))
            self._watch_until(start + seconds)
            end = time.monotonic()
        finally:
            self._end()
        return end

    def _await_first_step(self) -> None:
        def stepping() -> bool:
            return {e.who for e in self.events if e.what is What.STEP} >= {*self._trainers()}

        with self._changed:
            if not self._changed.wait_for(stepping, _START_SECONDS):
                told = [f"{e.who}: {e.text}" for e in self.events if e.what is What.ERROR][-3:]
                log = self._settings.log
                raise RuntimeError(f"the job did not start; see {log}; {'; '.join(told)}")

    def _trainers(self) -> list[str]:
        return [name for name in self._settings.names if name != SERVER]

    def _start(self, name: str) -> None:
        settings = self._settings
        command = [sys.executable, "-m", "chaos.worker", "--name", name]
        rank = settings.names.index(name) + 1  # rank 0 would host the store, which is here
        command += ["--rank", str(rank), "--backend", settings.backend]
        command += ["--store", f"tcp://127.0.0.1:{self._store.port}"]
        command += ["--bound", str(settings.bound)]
        if self._authority is not None and settings.certificates is not None:
            self._authority.issue(name, settings.certificates)
            command += ["--certificates", str(settings.certificates)]
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            cwd=Path(__file__).parent.parent,
            env=os.environ | {_MARK: self._mark},
        )
        self._processes[name] = process
        self._pids.add(process.pid)
        reader = threading.Thread(target=self._read, args=(process,), daemon=True)
        self._readers.append(reader)
        reader.start()

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            with contextlib.suppress(ValueError, KeyError, TypeError):  # cut short by its death
                event = Event.decode(line)
                with self._changed:
                    self.events.append(event)
                    self._changed.notify_all()
        process.stdout.close()

    def _do(self, fault: Fault) -> None:
        process = self._processes[fault.victim]
        self.done.append(fault)
        if fault.kind is Kind.KILL:
            process.kill()
        elif fault.kind is Kind.STOP:
            process.send_signal(signal.SIGSTOP)
            self._stopped[fault.victim] = time.monotonic() + 2 * self._settings.bound
        else:
            self._order(process, "cut")

    def _order(self, process: subprocess.Popen[str], order: str) -> None:
        assert process.stdin is not None
        with contextlib.suppress(OSError):
            process.stdin.write(order + "\n")
            process.stdin.flush()

    def _watch_until(self, deadline: float) -> None:
        """Starts again who died, and wakes who was stopped for long enough."""
        pause = threading.Event()
        while time.monotonic() < deadline:
            now = time.monotonic()
            for name in [name for name, until in self._stopped.items() if until <= now]:
                del self._stopped[name]
                self._processes[name].send_signal(signal.SIGCONT)
            for name, process in list(self._processes.items()):
                if process.poll() is not None:
                    killed = process.returncode == -signal.SIGKILL
                    if not killed:
                        self.problems.append(f"{name} ended with {process.returncode}")
                    self._close(process)
                    self._start(name)
            pause.wait(min(0.05, max(0.0, deadline - time.monotonic())))

    def _end(self) -> None:
        for process in self._processes.values():
            with contextlib.suppress(OSError):
                process.send_signal(signal.SIGCONT)
                self._order(process, "end")
        deadline = time.monotonic() + _END_SECONDS
        for name, process in self._processes.items():
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                self.problems.append(f"{name} did not end")
                process.kill()
                process.wait()
            self._close(process)
        for reader in self._readers:
            reader.join()
        self.problems += self._left_behind()
        self._log.close()
        printed = self._settings.log.read_text(errors="replace")
        self.problems += re.findall(r"Exception in thread .*|Fatal Python error.*", printed)

    def _left_behind(self) -> Iterator[str]:
        """Shared memory that the workers made, by the process id in its name, and children."""
        new = {*os.listdir(_SHARED_MEMORY)} - self._segments
        left = [name for name in sorted(new) if {*map(int, re.findall(r"\d+", name))} & self._pids]
        if left:
            yield f"left in {_SHARED_MEMORY}: {', '.join(left)}"
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if f"{_MARK}={self._mark}".encode() in (process / "environ").read_bytes():
                    yield f"process {process.name} is left"

    @staticmethod
    def _close(process: subprocess.Popen[str]) -> None:
        assert process.stdin is not None
        with contextlib.suppress(OSError):
            process.stdin.close()
