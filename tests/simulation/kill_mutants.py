"""Shows that the simulator and the unit tests notice changes: ``make mutants``.

Every mutant of the decision modules (see ``mutants.py``) is played by the
simulator and, separately, put before the unit tests of its module. Prints how
many each of them killed. Mutants that neither kills must be in ``SURVIVORS.md``, each
with the reason why it may live; a mutant that is there and dies, or does not exist any
more, is an error, too.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from mutants import Mutant, applied
from survivors import Row, match, read_survivors, write_survivors
from targets import TARGETS, Target, all_mutants

ROOT = Path(__file__).parents[2]
UNITS = ROOT / "tests"
_CPU_SECONDS_PER_BATCH = 6.0
_BATCH = 20
_UNIT_SECONDS = 20
_POLL_SECONDS = 0.005
_EXTRA_MEMORY = 2 << 30


@dataclass(frozen=True, slots=True)
class Verdict:
    """The killer of a mutant; ``seed`` is the first that did, -1 if none did or it hung."""

    key: str
    by_simulator: bool
    by_units: bool
    seed: int


# --- One mutant, in a process of its own ----------------------------------------


def _in_child(work: Callable[[], int], limit: float) -> int | None:
    """Returns what ``work`` returned (below 250), or None if it did not return in time."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        _limit_child()
        status = 250
        with contextlib.suppress(BaseException):
            status = work()
        os.write(writing, status.to_bytes(4, "little"))
        os._exit(0)
    os.close(writing)
    return _collect(child, reading, int(limit / _POLL_SECONDS))


def _limit_child() -> None:
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + _EXTRA_MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _collect(child: int, reading: int, polls: int) -> int | None:
    """Counts polls, not seconds: a machine that stops all of us for a while proves nothing."""
    with open(reading, "rb") as result:
        os.set_blocking(reading, False)
        for _ in range(polls):
            if os.waitpid(child, os.WNOHANG)[0]:
                return int.from_bytes(result.read() or b"\0\0\0\0", "little")
            time.sleep(_POLL_SECONDS)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return None


def _played(mutant: Mutant, target: Target, seeds: int) -> int:
    """1 + the seed that kills the mutant, or 0."""
    signal.signal(signal.SIGVTALRM, _hangs)
    with applied(mutant):
        for seed in range(seeds):
            if seed % _BATCH == 0:
                signal.setitimer(signal.ITIMER_VIRTUAL, _CPU_SECONDS_PER_BATCH)
            try:
                if target.breaks(seed):
                    return seed + 1
            except BaseException:
                return seed + 1
    return 0


def _hangs(*_: object) -> None:
    raise TimeoutError("this mutant runs in circles")


class _UnitTests:
    """A pytest plugin that collects unit tests once, and then runs them in forked children.

    Args:
        judge: called when the tests are collected; gets what runs them before a mutant,
            and says whether they failed.
    """

    def __init__(self, judge: Callable[[Callable[[Mutant], bool]], None]) -> None:
        self._judge = judge

    def pytest_configure(self) -> None:
        from hypothesis import Phase, settings  # not before pytest, which wants to rewrite it

        phases = (Phase.explicit, Phase.generate)  # how a mutant fails is no matter
        settings.register_profile(
            "mutants", max_examples=30, phases=phases, database=None, deadline=None
        )
        settings.load_profile("mutants")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        def run(mutant: Mutant) -> int:
            with applied(mutant):
                for item in session.items:
                    item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
                    if session.testsfailed:
                        return 1
            return 0

        self._judge(lambda mutant: _in_child(lambda: run(mutant), _UNIT_SECONDS) != 0)
        return True


def _judge_target(target: Target, mutants: list[Mutant], wanted: argparse.Namespace) -> None:
    def judge(fails: Callable[[Mutant], bool]) -> None:
        for mutant in mutants:
            played = _in_child(lambda mutant=mutant: _played(mutant, target, wanted.seeds), 600)
            verdict = Verdict(mutant.key, played != 0, fails(mutant), (played or 0) - 1)
            _write(wanted.results, verdict)

    files = [str(UNITS / unit) for unit in target.units]
    if not files:
        judge(lambda mutant: False)
        return
    plain = [f"-p no:{plugin}".split() for plugin in ("terminal", "cacheprovider", "xdist")]
    options = ["--noconftest", "-o", "addopts=--import-mode=importlib", *itertools.chain(*plain)]
    pytest.main([*options, *files], plugins=[_UnitTests(judge)])


# --- All of them ------------------------------------------------------------------


def _judge_all(wanted: argparse.Namespace) -> list[Verdict]:
    """Judges in ``jobs`` processes, each of which takes its share."""
    known = _read(wanted.results)
    left = [(m, t) for m, t in all_mutants(wanted.module) if m.key not in known]
    print(f"{len(left)} mutants to judge", flush=True)
    children = []
    for share in range(wanted.jobs):
        child = os.fork()
        if child == 0:
            for target in TARGETS:
                mine = [m for m, t in left[share :: wanted.jobs] if t is target]
                if mine:
                    _judge_target(target, mine, wanted)
            os._exit(0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)
    judged = _read(wanted.results)
    return [judged[m.key] for m, _ in all_mutants(wanted.module) if m.key in judged]


def _write(results: Path, verdict: Verdict) -> None:
    row = [verdict.key, verdict.by_simulator, verdict.by_units, verdict.seed]
    with results.open("a") as file:
        file.write(json.dumps(row) + "\n")


def _read(results: Path) -> dict[str, Verdict]:
    if not results.exists():
        return {}
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    return {row[0]: Verdict(*row) for row in rows}


def _report(verdicts: list[Verdict]) -> None:
    header = ("module", "mutants", "simulator", "units", "either", "neither")
    print("{:14}{:>9}{:>11}{:>9}{:>9}{:>9}".format(*header))
    names = [*dict.fromkeys(verdict.key.split(".")[0] for verdict in verdicts)]
    for name in [*names, "all"]:
        rows = [v for v in verdicts if name in ("all", v.key.split(".")[0])]
        simulator, units = (sum(v.by_simulator for v in rows), sum(v.by_units for v in rows))
        either = sum(v.by_simulator or v.by_units for v in rows)
        counts = (len(rows), simulator, units, either, len(rows) - either)
        print("{:14}{:>9}{:>11}{:>9}{:>9}{:>9}".format(name, *counts))


def _compare(verdicts: list[Verdict], only: str | None, *, write: bool) -> int:
    """Compares the survivors with those that have a reason; returns the exit status."""
    mutants = {mutant.key: mutant for mutant, _ in all_mutants()}
    judged = {verdict.key for verdict in verdicts}
    survivors = {v.key for v in verdicts if not (v.by_simulator or v.by_units)}
    if write:
        write_survivors(
            [mutants[key] for key in mutants if key in survivors],
            [mutants[key] for key in judged],
            mutants.values(),
        )
    matched = list(match(read_survivors(), mutants.values()))
    reasons = {mutant.key: row.reason for row, mutant in matched if mutant is not None}
    wrong = {
        "was not judged": {mutant.key for mutant, _ in all_mutants(only)} - judged,
        "survives without a reason": {key for key in survivors if not reasons.get(key)},
        "is listed, but was killed": reasons.keys() & judged - survivors,
        "is listed, but does not exist": {_name(row) for row, mutant in matched if mutant is None},
    }
    for what, keys in wrong.items():
        for key in sorted(keys):
            print(f"{what}: {key}")
    return int(any(wrong.values()))


def _name(row: Row) -> str:
    return ": ".join((".".join(row.names[:2]), row.change))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make mutants", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000, help="a mutant must survive (1000)")
    parser.add_argument("--jobs", type=int, default=2, help="processes (2)")
    parser.add_argument("--module", help="only this one, such as references")
    parser.add_argument(
        "--write", action="store_true", help="bring SURVIVORS.md up to date; reasons stay"
    )
    parser.add_argument(
        "--results",
        type=Path,
        default=ROOT / "runs" / "mutants.jsonl",
        help="verdicts; those that are there already are kept",
    )
    parser.add_argument("--fresh", action="store_true", help="forget the verdicts first")
    return parser.parse_args()


def main() -> int:
    """Returns the exit status: not 0 if a survivor is not argued."""
    wanted = _arguments()
    wanted.results.parent.mkdir(exist_ok=True)
    if wanted.fresh:
        wanted.results.unlink(missing_ok=True)
    verdicts = _judge_all(wanted)
    _report(verdicts)
    return _compare(verdicts, wanted.module, write=wanted.write)


if __name__ == "__main__":
    sys.exit(main())
