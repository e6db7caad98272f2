"""The cost of readers beside training: followers of versions, and an evaluator that asks servers.

The trainer pushes rows so that all numbers of each row are the step. A reader looks many rows up
and finds one number in all of them, or has seen halves of two versions.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial

import torch

import rpc
from benchmarks.parameter_server.case import Case, join
from benchmarks.stepping import Step, SteppingGroup
from tensorwire import parameter_server as ps

_ROWS = 1 << 14
_LOOKUP = 512
_STEPS = 50
_EVERY = 1.0


@dataclass(frozen=True, slots=True)
class Read:
    """The lookups of one reader.

    Args:
        seconds: of each lookup, sorted.
        ages: of the version that answered, in seconds; empty for who asks servers.
        torn: how many saw two versions at once.
        versions: how many different ones were seen.
    """

    seconds: list[float]
    ages: list[float]
    torn: int
    versions: int


def _look(
    pull: Callable[[torch.Tensor], torch.Tensor], age: Callable[[], float], end: float
) -> Read:
    seconds, ages, torn, seen = [], [], 0, set()
    while time.time() < end:
        ids = torch.randperm(_ROWS)[:_LOOKUP]
        begin = time.perf_counter()
        rows = pull(ids)
        seconds.append(time.perf_counter() - begin)
        ages.append(age())
        torn += int(bool((rows != rows[0, 0]).any()))
        seen.add(float(rows[0, 0]))
    return Read(sorted(seconds), ages, torn, len(seen))


def _follow(folder: str) -> None:
    """A reader of versions, in a process of its own; prints what it saw."""
    torch.set_num_threads(1)
    with ps.follow(folder) as model:
        print("ready", flush=True)
        pull, end = model.table("steps").pull, float(sys.stdin.readline())
        print(json.dumps(asdict(_look(pull, lambda: model.age, end))))


def _steps_of(cluster: ps.Cluster, dim: int) -> ps.Table:
    return cluster.table("steps", dim, ps.SGD(lr=1.0), init=ps.Constant(0.0))


def _evaluate(dim: int, seconds: float) -> Read:
    """A reader that asks the servers for whole steps, as the worker that is called."""
    cluster = ps.connect(["server"])
    _steps_of(cluster, dim)
    reader = cluster.reader()
    pull = lambda ids: reader.pull({"steps": ids}, dense=[]).tables["steps"]  # noqa: E731
    return _look(pull, lambda: 0.0, time.time() + seconds)


def _train(table: ps.Table, go_on: Callable[[], bool]) -> list[float]:
    """Has all rows hold the next number, again and again; seconds of each step."""
    took, ids, grad = [], torch.arange(_ROWS), torch.full((_ROWS, table.dim), -1.0)
    while go_on():
        begin = time.perf_counter()
        table.push(ids, grad)
        took.append(time.perf_counter() - begin)
    return took


def _beside(
    table: ps.Table, folder: str, readers: int, seconds: float
) -> tuple[list[float], list[Read]]:
    """Steps while followers read, and what these saw."""
    command, pipe = [sys.executable, "-m", __name__, folder], subprocess.PIPE
    started = [
        subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) for _ in range(readers)
    ]
    for each in started:
        assert each.stdout is not None
        each.stdout.readline()  # it has a version
    end = time.time() + seconds
    for each in started:
        assert each.stdin is not None
        each.stdin.write(f"{end}\n")
        each.stdin.flush()
    took = _train(table, lambda: time.time() < end)
    return took, [Read(**json.loads(each.communicate()[0])) for each in started]


def _beside_evaluator(table: ps.Table, seconds: float) -> tuple[list[float], Read]:
    """Steps while an evaluator pulls from the server, and what it saw."""
    evaluator = rpc.rpc_async("server2", _evaluate, (table.dim, seconds))
    return _train(table, lambda: not evaluator.done()), evaluator.wait()


def _measure(
    table: ps.Table, cluster: ps.Cluster, readers: int, seconds: float
) -> dict[str, float]:
    alone = _train(table, _times(_STEPS))
    asked, evaluator = _beside_evaluator(table, seconds)
    with tempfile.TemporaryDirectory() as folder:
        publishing = cluster.publish(folder, ps.Seconds(_EVERY))
        publishing.wait()
        published = _train(table, _times(_STEPS))
        one, (read,) = _beside(table, folder, 1, seconds)
        many, reads = _beside(table, folder, readers, seconds)
        publishing.stop()
    return {
        "alone": statistics.median(alone),
        "published": statistics.median(published),
        "one": statistics.median(one),
        "many": statistics.median(many),
        "asked": statistics.median(asked),
        "evaluated": len(evaluator.seconds) / seconds,
        "lookups": len(read.seconds) / sum(read.seconds),
        "p50": read.seconds[len(read.seconds) // 2],
        "p99": read.seconds[len(read.seconds) * 99 // 100],
        "age": statistics.median(read.ages),
        "torn": sum(each.torn for each in (read, *reads)),
        "checked": sum(len(each.seconds) for each in (read, *reads)),
        "versions": max(each.versions for each in (read, *reads)),
    }


def _times(count: int) -> Callable[[], bool]:
    left = iter(range(count))
    return lambda: next(left, None) is not None


def _trainer(case: Case, readers: int, seconds: float, rank: int, meeting: str) -> Step | None:
    join(rank, meeting, 3)
    if rank:
        return None
    cluster = ps.connect(["server"])
    table = _steps_of(cluster, case.dim)
    steps = iter(range(2))

    def step() -> dict[str, float]:
        if next(steps) == 0:  # the one before the measurement
            return {}
        return _measure(table, cluster, readers, seconds)

    return step


def followers(case: Case, readers: int, seconds: float) -> str:
    """Measures readers beside a trainer that pushes all the time."""
    group = SteppingGroup(partial(_trainer, case, readers, seconds), 3, case.threads, 0)
    try:
        group.measure(1)
        found = group.told[0]
    finally:
        group.close()
    return _text(found, readers, seconds, case.dim)


def _text(found: dict[str, float], readers: int, seconds: float, dim: int) -> str:
    told: Sequence[str] = (
        f"pushes of {_ROWS} rows of {dim}, versions each {_EVERY:g} s, {os.cpu_count()} cores:",
        f"  alone {1e3 * found['alone']:.2f} ms a step, published {1e3 * found['published']:.2f},",
        f"  beside one follower {1e3 * found['one']:.2f}, beside {readers} "
        f"{1e3 * found['many']:.2f}, beside an evaluator that asks the server "
        f"{found['evaluated']:.1f} times a second {1e3 * found['asked']:.2f} (medians)",
        f"  one follower: {found['lookups']:.0f} lookups of {_LOOKUP} rows a second, "
        f"p50 {1e6 * found['p50']:.0f} µs, p99 {1e6 * found['p99']:.0f}, "
        f"versions {found['age']:.2f} s old",
        f"  torn: {found['torn']:.0f} of {found['checked']:.0f} lookups in twice {seconds:g} s, "
        f"over {found['versions']:.0f} versions",
    )
    return "\n".join(told)


if __name__ == "__main__":
    _follow(sys.argv[1])
