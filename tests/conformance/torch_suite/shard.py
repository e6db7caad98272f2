"""Runs tests one after another: names come in on standard input, results go out as lines.

One process without threads, so that tests may fork it. What a test and its
workers print goes to a file of its own.
"""

from __future__ import annotations

import os
import sys
import time
import unittest
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch_suite.results import Outcome, Result, last_line


class _Record(unittest.TestResult):
    """Keeps what went wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.skipped_because: str | None = None

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        super().addSkip(test, reason)
        self.skipped_because = reason


def main(logs: Path) -> None:
    """Serves until standard input ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    from torch_suite import suites

    print("\n".join(suites.test_names()), end="\n\n", file=answers)
    for line in sys.stdin:
        test = line.strip()
        log = logs / f"{test}.log"
        with _output_to(log):
            result = run(test)
        print(_unless_torch_was_used(result, log).to_json(), file=answers)


def run(test: str) -> Result:
    """Runs one test in this process."""
    from torch_suite import suites

    record = _Record()
    start = time.monotonic()
    suites.make(test).run(record)
    seconds = round(time.monotonic() - start, 2)
    wrong = [text for _, text in (*record.errors, *record.failures)]
    if wrong:
        print(*wrong, sep="\n")
        return Result(test, Outcome.FAILED, seconds, last_line(wrong[0]))
    if record.skipped_because is not None:
        return Result(test, Outcome.SKIPPED, seconds, record.skipped_because)
    return Result(test, Outcome.PASSED, seconds)


def _unless_torch_was_used(result: Result, log: Path) -> Result:
    from torch_suite import guard

    caught = [line for line in log.read_text(errors="replace").splitlines() if guard.MARK in line]
    if not caught:
        return result
    return Result(result.test, Outcome.FAILED, result.seconds, caught[0][:300])


@contextmanager
def _output_to(path: Path) -> Iterator[None]:
    """Sends what this process and its children print to a file."""
    sys.stdout.flush()
    sys.stderr.flush()
    kept = os.dup(1), os.dup(2)
    with path.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, copy in zip((1, 2), kept, strict=True):
            os.dup2(copy, number)
            os.close(copy)
