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
        with (logs / "startup.log").open("w") as log:
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
    first = Shard(setup, logs, temporary)
    chosen = choose(first.tests)
    work: queue.SimpleQueue[str] = queue.SimpleQueue()
    for test in chosen:
        work.put(test)
    done: queue.SimpleQueue[Result | BaseException | None] = queue.SimpleQueue()

    def keep_busy(shard: Shard | None) -> None:
        try:
            _keep_busy(shard, setup, logs, temporary, work, done)
        except BaseException as error:
            done.put(error)
        else:
            done.put(None)

    threads = [
        threading.Thread(target=keep_busy, args=(first if number == 0 else None,))
        for number in range(max(1, min(shards, len(chosen))))
    ]
    for thread in threads:
        thread.start()
    results = list(_collect(done, len(threads), progress))
    for thread in threads:
        thread.join()
    return results


def _collect(
    done: queue.SimpleQueue[Result | BaseException | None], threads: int, progress: Progress
) -> list[Result]:
    results = []
    while threads:
        item = done.get()
        if isinstance(item, Result):
            results.append(item)
            progress(item)
        else:
            threads -= 1
            if item is not None:
                raise item
    return results


def _keep_busy(
    shard: Shard | None,
    setup: Setup,
    logs: Path,
    temporary: Path,
    work: queue.SimpleQueue[str],
    done: queue.SimpleQueue[Result | BaseException | None],
) -> None:
    try:
        while True:
            try:
                test = work.get_nowait()
            except queue.Empty:
                return
            shard = shard or Shard(setup, logs, temporary)
            limit = setup.timeout + _SECONDS_OF_GRACE
            try:
                done.put(shard.run(test, limit))
            except ShardDied as error:
                done.put(Result(test, Outcome.FAILED, limit, str(error)))
                shard.close()
                shard = None
    finally:
        if shard is not None:
            shard.close()
