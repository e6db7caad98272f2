"""PyTorch's own RPC tests, run against this library and against torch.

Results and the output of each test go to runs/conformance; EXPECTED.md is made of them.
"""

from __future__ import annotations

import argparse
import re
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch_suite import report, results, runner
from torch_suite.exemptions import Exemption, exemption, unsteady
from torch_suite.results import Outcome, Result
from torch_suite.setup import Sabotage, Setup, Start, Subject

_HOME = Path(__file__).resolve().parents[1]
_RUNS = _HOME.parents[1] / "runs" / "conformance"
_PARTS = 24
_PART_OF = {Subject.TORCH: 0, Subject.TENSORPIPE: 15, Subject.TENSORWIRE: 1}
_TRIED_AGAIN = 10
"""With more failures than these something is broken, and trying again would take long."""
_LINES_SHOWN = 40


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the suite; 1 if a test failed without a reason."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.shard is not None:
        from torch_suite import shard

        shard.main(options.shard)
        return 0
    if not (options.subjects or options.table or options.report):
        parser.error("nothing to do: name what to test (torch, tensorpipe, tensorwire), or --table")
    failed = [_run(subject, options) for subject in options.subjects]
    runs = {subject: _kept(subject, options.output) for subject in Subject}
    if options.table:
        print(report.table(runs))
    if options.report:
        import torch

        (_HOME / "EXPECTED.md").write_text(
            report.expected(runs, torch.__version__.partition("+")[0])
        )
    return 1 if any(failed) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python tests/conformance", description=__doc__)
    parser.add_argument(
        "subjects",
        type=Subject,
        nargs="*",
        help="what to test, one after the other: torch, tensorpipe, tensorwire",
    )
    parser.add_argument("-k", default="", help="only tests whose Class.test matches this regex")
    parser.add_argument(
        "--part", action="store_true", help="only a part that takes a quarter of a minute"
    )
    parser.add_argument("--failed", action="store_true", help="only what did not pass last time")
    parser.add_argument("--all", action="store_true", help="also exempt tests that would hang")
    parser.add_argument("--shards", type=int, default=2, help="tests at the same time (2)")
    parser.add_argument("--timeout", type=int, default=100, help="seconds for each test (100)")
    parser.add_argument("--repeat", type=int, default=1, help="how often to run each test (1)")
    parser.add_argument("--start", type=Start, default=Start.FORK, help="fork or spawn workers")
    parser.add_argument(
        "--sabotage", type=Sabotage, default=Sabotage.NOTHING, help=argparse.SUPPRESS
    )
    parser.add_argument("--output", type=Path, default=_RUNS, help="folder for results and logs")
    parser.add_argument("--table", action="store_true", help="print a table of all results kept")
    parser.add_argument("--report", action="store_true", help="write EXPECTED.md from them")
    parser.add_argument("--shard", type=Path, help=argparse.SUPPRESS)
    return parser


def _run(subject: Subject, options: argparse.Namespace) -> bool:
    """Runs one subject's tests; True if one failed without a reason."""
    setup = Setup(subject, options.start, options.sabotage, options.timeout)
    logs = options.output / subject.value
    file = options.output / f"{subject.value}.jsonl"
    print(f"--- {subject.title}", flush=True)
    choice = _Choice(subject, options, results.read(file))
    run = _go(setup, choice, options.shards, logs)
    failed = [each for each in run if judged(each, subject).outcome is Outcome.FAILED]
    if setup.sabotage is Sabotage.NOTHING and 0 < len(failed) <= _TRIED_AGAIN:
        run = _once_more(setup, run, failed, logs)
    run += choice.not_run
    if setup.sabotage is Sabotage.NOTHING:
        results.merge(file, run)
    for each in run:
        if each.outcome is Outcome.PASSED and _excused(each.test, subject):
            print(f"{each.test} passed, although exemptions.py gives a reason why it need not")
    counts = Counter(judged(result, subject).outcome for result in run)
    print(", ".join(f"{counts[outcome]} {outcome.value}" for outcome in Outcome), flush=True)
    return bool(counts[Outcome.FAILED])


def _go(setup: Setup, choice: _Choice, shards: int, logs: Path) -> list[Result]:
    """Runs the tests chosen."""
    logs.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="rpc-conformance-") as temporary:
        return runner.run(setup, choice, shards, logs, Path(temporary), _Progress(choice))


def _once_more(
    setup: Setup, run: Sequence[Result], failed: Sequence[Result], logs: Path
) -> list[Result]:
    """Runs what failed again, each test alone; what passes then is unsteady, not broken."""
    for each in failed:
        print(f"{each.test} failed; the end of its output:\n{_end(logs / f'{each.test}.log')}")
    print(f"--- {setup.subject.title}: once more, alone", flush=True)
    first = {each.test: each.reason for each in failed}
    choice = _Named(setup.subject, list(first))
    again = {each.test: each for each in _go(setup, choice, 1, logs / "alone")}
    for test, result in again.items():
        if result.outcome is Outcome.PASSED:
            again[test] = replace(result, outcome=Outcome.UNSTEADY, reason=first[test])
    return [again[each.test] if each in failed else each for each in run]


def _end(log: Path) -> str:
    """The last lines a test wrote."""
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    return "\n".join(f"    {line[:300]}" for line in lines[-_LINES_SHOWN:])


def _kept(subject: Subject, output: Path) -> list[Result]:
    """The results of all runs so far, in the light of today's exemptions."""
    file = output / f"{subject.value}.jsonl"
    return [judged(result, subject) for result in results.read(file)]


def judged(result: Result, subject: Subject) -> Result:
    """A failure for which there is a reason is exempt, with that reason."""
    found = _excused(result.test, subject)
    if found is None or result.outcome is not Outcome.FAILED:
        return result
    return replace(result, outcome=Outcome.EXEMPT, reason=found.why)


def _excused(test: str, subject: Subject) -> Exemption | None:
    """The reason why a test need not pass, if so; torch itself is never excused."""
    return None if subject is Subject.TORCH else exemption(test, subject.backend)


class _Choice:
    """The tests to run of all."""

    def __init__(
        self, subject: Subject, options: argparse.Namespace, before: Sequence[Result]
    ) -> None:
        self.subject = subject
        self._options = options
        self._to_repeat = {each.test for each in before if each.outcome is Outcome.FAILED}
        self.chosen: list[str] = []
        self.not_run: list[Result] = []

    def __call__(self, tests: Sequence[str]) -> list[str]:
        options = self._options
        for test in tests:
            if not re.search(options.k, test) or (options.failed and test not in self._to_repeat):
                continue
            if options.part and self._not_in_part(test):
                continue
            if self._would_hang(test) and not options.all:
                self.not_run.append(Result(test, Outcome.FAILED, 0.0, "not run: it would hang"))
            else:
                self.chosen += [test] * options.repeat
        return self.chosen

    def _would_hang(self, test: str) -> bool:
        found = _excused(test, self.subject)
        return found is not None and found.hangs

    def _not_in_part(self, test: str) -> bool:
        """The part in CI has one in 24 that may pass, others for each of our backends.

        It has nothing that needs a GPU.
        """
        if exemption(test, self.subject.backend) or unsteady(test) or "Cuda" in test:
            return True
        return zlib.crc32(test.encode()) % _PARTS != _PART_OF[self.subject]


@dataclass(frozen=True, slots=True)
class _Named:
    """These tests."""

    subject: Subject
    chosen: Sequence[str]

    def __call__(self, tests: Sequence[str]) -> Sequence[str]:
        return self.chosen


class _Progress:
    """Prints a line for each test."""

    def __init__(self, choice: _Choice | _Named) -> None:
        self._choice = choice
        self._done = 0
        self._start = time.monotonic()

    def __call__(self, result: Result) -> None:
        self._done += 1
        result = judged(result, self._choice.subject)
        elapsed = time.monotonic() - self._start
        place = f"[{self._done}/{len(self._choice.chosen)} {elapsed:.0f} s]"
        line = f"{place} {result.outcome.value:7} {result.seconds:5.1f} s  {result.test}"
        if result.outcome is Outcome.FAILED:
            line += f"\n        {result.reason}"
        print(line, flush=True)
