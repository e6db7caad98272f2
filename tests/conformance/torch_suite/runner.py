"""Keeps some shards busy with tests, and survives what happens to them.

Owns the shard processes. A shard that dies or hangs is killed with all it started,
its test has failed, and another takes its place.
"""

from __future__ import annotations

import contextlib
import os
import queue
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from torch_suite.results import Outcome, Result
from torch_suite.setup import Setup

_HOME = Path(__file__).resolve().parents[1]
_LIBRARY = _HOME.parents[1]
_SECONDS_TO_START = 180.0
_SECONDS_OF_GRACE = 40.0

Progress = Callable[[Result], None]


class ShardDied(Exception):
    """A shard process ended, or says nothing any more."""


class Shard:
    """One process that runs tests.

    Args:
        setup: what is tested.
        logs: where the output of tests goes.
        temporary: for the files of tests; goes when the run ends.
    """

    def __init__(self, setup: Setup, logs: Path, temporary: Path) -> None:
        path = os.pathsep.join((str(_HOME), str(_LIBRARY)))
        environment = {**os.environ, **setup.environment(), "PYTHONPATH": path}
        self._pending = b""
        with (logs / "startup.log").open("a") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-u", str(_HOME), "--shard", str(logs)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**environment, "TMPDIR": str(temporary)},
                start_new_session=True,
            )
        self.tests = self._read_names()

    def run(self, test: str, seconds: float) -> Result:
        """Runs one test.

        Raises:
            ShardDied: it did not come to an end.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{test}\n".encode())
            self._process.stdin.flush()
        except OSError as error:
            raise ShardDied(str(error)) from error
        return Result.from_json(self._line(seconds))

    def close(self) -> None:
        """Ends the process and everything it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()

    def _read_names(self) -> list[str]:
        names: list[str] = []
        while line := self._line(_SECONDS_TO_START):
            names.append(line)
        return names

    def _line(self, seconds: float) -> str:
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        deadline = time.monotonic() + seconds
        while b"\n" not in self._pending:
            left = max(0.0, deadline - time.monotonic())
            if not select.select([descriptor], [], [], left)[0]:
                raise ShardDied(f"no answer in {seconds:.0f} seconds")
            read = os.read(descriptor, 1 << 16)
            if not read:
                raise ShardDied("the process that runs the tests died; see startup.log")
            self._pending += read
        line, _, self._pending = self._pending.partition(b"\n")
        return line.decode()


def run(
    setup: Setup,
    choose: Callable[[Sequence[str]], Sequence[str]],
    shards: int,
    logs: Path,
    temporary: Path,
    progress: Progress,
) -> list[Result]:
    """Runs what ``choose`` selects of all tests.

    Args:
        setup: what is tested.
        choose: gets the names of all tests, returns those to run.
        shards: how many tests run at once.
        logs: a file for each test's output appears here.
        temporary: a folder for the files of tests.
        progress: is told each result as it comes.
    """
    (logs / "startup.log").unlink(missing_ok=True)
    copier = _Crew(lambda: Shard(setup, logs, temporary), setup.timeout + _SECONDS_OF_GRACE)
    try:
        chosen = choose(copier.tests())
        return copier.run(chosen, min(shards, len(chosen)), progress)
    finally:
        copier.dismiss()


class _Crew:
    """The shards of one run.

    Args:
        recruit: starts a shard.
        limit: seconds after which a shard that runs a test is given up.
    """

    def __init__(self, recruit: Callable[[], Shard], limit: float) -> None:
        self._recruit = recruit
        self._limit = limit
        self._lock = threading.Lock()
        self._idle: list[Shard] = []
        self._all: list[Shard] = []
        self._work: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[Result | BaseException | None] = queue.SimpleQueue()

    def tests(self) -> Sequence[str]:
        """The names of all tests, from the first shard."""
        first = self._take()
        self._idle.append(first)
        return first.tests

    def run(self, chosen: Sequence[str], shards: int, progress: Progress) -> list[Result]:
        """Runs tests, ``shards`` at a time."""
        for test in chosen:
            self._work.put(test)
        for _ in range(shards):
            threading.Thread(target=self._report, daemon=True).start()
        results = []
        while shards:
            item = self._done.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                shards -= 1
            else:
                results.append(item)
                progress(item)
        return results

    def dismiss(self) -> None:
        """Ends all shards, whatever they are doing."""
        with self._lock:
            shards = self._all[:]
        for shard in shards:
            shard.close()

    def _take(self) -> Shard:
        with self._lock:
            if self._idle:
                return self._idle.pop()
        shard = self._recruit()
        with self._lock:
            self._all.append(shard)
        return shard

    def _report(self) -> None:
        try:
            self._keep_busy()
        except BaseException as error:
            self._done.put(error)
        else:
            self._done.put(None)

    def _keep_busy(self) -> None:
        shard: Shard | None = None
        while True:
            try:
                test = self._work.get_nowait()
            except queue.Empty:
                return
            shard = shard or self._take()
            try:
                self._done.put(shard.run(test, self._limit))
            except ShardDied as error:
                self._done.put(Result(test, Outcome.FAILED, self._limit, str(error)))
                shard.close()
                shard = None
