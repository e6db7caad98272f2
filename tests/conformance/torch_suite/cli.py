"""The command line."""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from torch_suite import results, runner
from torch_suite.results import Outcome, Result
from torch_suite.setup import Sabotage, Setup, Start, Target

_RUNS = Path(__file__).resolve().parents[3] / "runs" / "conformance"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the suite; 1 if a test failed."""
    options = _parser().parse_args(arguments)
    if options.shard is not None:
        from torch_suite import shard

        shard.main(options.shard)
        return 0
    return _run(options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python tests/conformance", description=__doc__)
    parser.add_argument("--target", type=Target, default=Target.OURS, help="ours or torch")
    parser.add_argument("--backend", default="TENSORPIPE", help="TENSORPIPE or TENSORWIRE")
    parser.add_argument("--start", type=Start, default=Start.FORK, help="fork or spawn")
    parser.add_argument("--sabotage", type=Sabotage, default=Sabotage.NOTHING)
    parser.add_argument("--timeout", type=int, default=100, help="seconds for each test")
    parser.add_argument("--shards", type=int, default=2, help="tests at the same time")
    parser.add_argument("-k", default="", help="run tests whose Class.test matches this regex")
    parser.add_argument("--failed", action="store_true", help="only what failed last time")
    parser.add_argument("--list", action="store_true", help="only print the names")
    parser.add_argument("--output", type=Path, default=_RUNS, help="folder for results and logs")
    parser.add_argument("--shard", type=Path, help=argparse.SUPPRESS)
    return parser


def _run(options: argparse.Namespace) -> int:
    setup = Setup(options.target, options.backend, options.start, options.sabotage, options.timeout)
    name = f"{setup.target.value}-{setup.backend.lower()}"
    logs = options.output / name
    logs.mkdir(parents=True, exist_ok=True)
    file = options.output / f"{name}.jsonl"
    before = {result.test: result for result in results.read(file)}

    def choose(tests: Sequence[str]) -> list[str]:
        chosen = [test for test in tests if re.search(options.k, test)]
        if options.failed:
            failed = {r.test for r in before.values() if r.outcome is Outcome.FAILED}
            chosen = [test for test in chosen if test in failed]
        if options.list:
            print(*chosen, sep="\n")
            return []
        progress.expected = len(chosen)
        return chosen

    progress = _Progress()
    with tempfile.TemporaryDirectory(prefix="rpc-conformance-") as temporary:
        run = runner.run(setup, choose, options.shards, logs, Path(temporary), progress)
    if run and setup.sabotage is Sabotage.NOTHING:
        before.update((result.test, result) for result in run)
        results.write(file, list(before.values()))
    counts = Counter(result.outcome.value for result in run)
    print(", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items())))
    return 1 if counts[Outcome.FAILED.value] else 0


class _Progress:
    """Prints a line for each test."""

    def __init__(self) -> None:
        self.expected = 0
        self._done = 0
        self._start = time.monotonic()

    def __call__(self, result: Result) -> None:
        self._done += 1
        elapsed = time.monotonic() - self._start
        line = f"[{self._done}/{self.expected} {elapsed:.0f} s] {result.outcome.value:7} "
        line += f"{result.seconds:5.1f} s  {result.test}"
        if result.outcome is not Outcome.PASSED:
            line += f"\n        {result.reason}"
        print(line, flush=True)
        sys.stdout.flush()
