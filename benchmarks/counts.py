"""Counts the Python functions that an operation calls, in the process that makes it and its peer.

Unlike times, these numbers are the same on every machine, and they are what an interpreter
pays for. All threads of a process are counted. Comprehensions are functions up to Python
3.11, so numbers of other versions differ a little.
"""

from __future__ import annotations

import sys
import threading
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType

from benchmarks.commands import Column
from benchmarks.group import Group, Launch
from benchmarks.workloads import ROWS, Row

OPERATIONS = 20
ROWS_COUNTED = ("empty", "small", "async", "remote", "autograd", "optimizer", "fused")
_TRIES = 3
_ROOT = str(Path(__file__).parents[1]) + "/"
_WORKLOADS = "benchmarks/workloads.py"
_OURS = ("benchmarks/", "/json/", "/dataclasses.py", "/copy.py", "codecs")
"""By which a process is told what to do, and answers."""
_calls: defaultdict[CodeType, int] = defaultdict(int)


def _note(frame: FrameType, event: str, _: object) -> None:
    if event == "call":
        _calls[frame.f_code] += 1


def begin() -> None:
    """Counts from now on what this thread, and those that are started later, call."""
    threading.setprofile(_note)
    sys.setprofile(_note)
    _count_on_threads_of_torch()


def _count_on_threads_of_torch() -> None:
    """Counts on the threads of TENSORPIPE's pool, too, which Python does not start."""
    from rpc.transports.tensorpipe.pool_threads import PoolThreads

    keep = PoolThreads.keep

    def keep_and_count(threads: PoolThreads) -> None:
        keep(threads)
        sys.setprofile(_note)

    PoolThreads.keep = keep_and_count  # type: ignore[assignment]


def take() -> dict[str, int]:
    """The calls since this was asked last, by function; those of the benchmark itself aside."""
    global _calls
    taken, _calls = _calls, defaultdict(int)
    found: defaultdict[str, int] = defaultdict(int)
    for code, calls in taken.items():
        name = code.co_filename.removeprefix(_ROOT)
        if name == _WORKLOADS or not any(each in name for each in _OURS):
            found[f"{name}:{code.co_firstlineno} {getattr(code, 'co_qualname', code.co_name)}"] += (
                calls
            )
    return dict(found)


@dataclass(frozen=True, slots=True)
class Counted:
    """Counts of the functions that one operation calls, per operation, at both ends.

    Args:
        row: what was done.
        caller: calls in the process that made it, by function.
        callee: calls in the other.
    """

    row: Row
    caller: dict[str, float]
    callee: dict[str, float]

    @property
    def totals(self) -> tuple[float, float]:
        """At the caller, and at the callee."""
        return sum(self.caller.values()), sum(self.callee.values())

    def files(self, least: float = 0.0) -> tuple[set[str], set[str]]:
        """The files of this project that it passes, at the caller and at the callee.

        Args:
            least: how often it calls a function of such a file at least.
        """
        return _files(self.caller, least), _files(self.callee, least)


def _files(calls: Mapping[str, float], least: float) -> set[str]:
    names = {name.rpartition(":")[0] for name, count in calls.items() if count >= least}
    return {name for name in names if not name.startswith(("/", "<", "benchmarks/"))}


def count(rows: Sequence[Row], column: Column, tries: int = _TRIES) -> list[Counted]:
    """Counts the operations of rows; of several tries of one, that with the fewest calls.

    Args:
        rows: which. The same processes do all of them.
        column: whose.
        tries: of each.
    """
    size = max(row.group_size for row in rows)
    modules = [module for row in rows for module in row.modules]
    group = Group(column, size, Launch.FORKED, counts=True, modules=modules)
    with group, group.awake():
        return [_least(row, group, tries) for row in rows]


def _least(row: Row, group: Group, tries: int) -> Counted:
    group.prepare(row)
    found = [_count_once(row, group) for _ in range(tries)]
    group.forget(row)
    return min(found, key=lambda each: sum(each.totals))


def _count_once(row: Row, group: Group) -> Counted:
    caller, callee = group.count(row, OPERATIONS)
    operations = OPERATIONS * row.units
    return Counted(
        row, *({name: n / operations for name, n in c.items()} for c in (caller, callee))
    )


def report(counted: Iterable[Counted], functions: bool) -> str:
    """The numbers as a table; with ``functions``, what was called how often beneath each."""
    lines = [f"{'Python functions called by one':<34}{'caller':>8}{'callee':>8}"]
    for each in counted:
        caller, callee = each.totals
        lines.append(f"{each.row.title:<34}{caller:>8.1f}{callee:>8.1f}")
        if functions:
            for where, calls in (("caller", each.caller), ("callee", each.callee)):
                most = sorted(calls.items(), key=lambda item: -item[1])
                lines += [f"    {where} {n:7.2f}  {name}" for name, n in most]
    return "\n".join(lines)


def main(column: Column, keys: Iterable[str], functions: bool) -> None:
    """Counts rows and prints the table."""
    print(report(count([ROWS[key] for key in keys], column), functions))


__all__ = ["Counted", "begin", "count", "main", "report", "take"]
