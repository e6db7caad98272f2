"""Rates and latencies of workers between two looks at a job. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rpc.extend import quantile
from tensorwire.watching.views import JobView, WorkerView


@dataclass(frozen=True, slots=True)
class Rates:
    """A worker between two looks; NaN where nothing can be told.

    Args:
        steps: a second.
        calls: made a second.
        p50: of their latencies, in seconds.
        p99: likewise.
        cpu: processors that the process kept busy.
    """

    steps: float
    calls: float
    p50: float
    p99: float
    cpu: float


def rates(before: JobView | None, now: JobView) -> dict[str, Rates]:
    """The rates of each worker, by name; only of those that both looks saw in one life."""
    known = {worker.name: worker for worker in before.workers} if before is not None else {}
    seconds = now.now - before.now if before is not None else 0.0
    return {
        worker.name: _rates(known[worker.name], worker, seconds)
        for worker in now.workers
        if seconds > 0 and worker.name in known and known[worker.name].life == worker.life
    }


def _rates(before: WorkerView, now: WorkerView, seconds: float) -> Rates:
    made_before, made = _made(before), _made(now)
    buckets = [b - a for a, b in zip(made_before[1], made[1], strict=False)] or made[1]
    cpu = 0.0
    if before.process is not None and now.process is not None:
        cpu = (now.process.cpu_seconds - before.process.cpu_seconds) / seconds
    return Rates(
        (steps_of(now) - steps_of(before)) / seconds,
        (made[0] - made_before[0]) / seconds,
        quantile(buckets, 0.5) if sum(buckets) else float("nan"),
        quantile(buckets, 0.99) if sum(buckets) else float("nan"),
        cpu,
    )


def steps_of(worker: WorkerView) -> int:
    """The steps that a worker has counted."""
    facts: Mapping[str, Any] = worker.facts or {}
    return int(facts.get("progress", {}).get("steps", 0))


def _made(worker: WorkerView) -> tuple[int, list[int]]:
    """The calls a worker made, and how many fell in each bucket of latency."""
    rows = (worker.facts or {}).get("made", ())
    totals: list[int] = []
    for row in rows:
        counts = [int(each) for each in row["buckets"]]
        totals = [a + b for a, b in zip(totals, counts, strict=True)] if totals else counts
    return sum(int(row["calls"]) for row in rows), totals
