"""The cost of published versions: their bytes, and steps while they are written."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from benchmarks.parameter_server.case import EPS, LR, Case, join
from benchmarks.stepping import Step, SteppingGroup
from tensorwire import parameter_server as ps

_PIECE = 1 << 18
_CHANGED = 100
"""One row of so many changes between two versions."""
_BATCH = 1 << 13
_STEPS = 100


def _pushes(table: ps.Table, ids: Tensor, go_on: Callable[[int], bool]) -> list[float]:
    """Pushes some of these rows at a time; returns how many seconds each push took."""
    took: list[float] = []
    while go_on(len(took)):
        some = ids[torch.randperm(len(ids))[:_BATCH]]
        grad = torch.randn(len(some), table.dim)
        begin = time.perf_counter()
        table.push(some, grad)
        took.append(time.perf_counter() - begin)
    return took


def _measure(cluster: ps.Cluster, table: ps.Table, rows: int) -> dict[str, float]:
    """Publishes a base and a delta while a trainer pushes."""
    changed = torch.randperm(rows)[: rows // _CHANGED]
    before = _pushes(table, changed, lambda done: done < _STEPS)
    with tempfile.TemporaryDirectory() as folder:
        publishing = cluster.publish(folder, ps.Steps(1 << 40))
        publishing.wait()
        base = publishing.version
        for some in torch.split(changed, _PIECE):
            table.push(some, torch.randn(len(some), table.dim))
        marked = _pushes(table, changed, lambda done: done < _STEPS)
        begin = time.perf_counter()
        publishing.take()
        during = _pushes(table, changed, lambda _: publishing.version is base)
        seconds = time.perf_counter() - begin
        delta = publishing.version
        publishing.stop()
        assert base is not None
        assert delta is not None
        return {
            "rows": rows,
            "changed": len(changed),
            "base": base.bytes,
            "delta": delta.bytes,
            "seconds": seconds,
            "unmarked": statistics.median(before),
            "marked": statistics.median(marked),
            "longest": max(during),
        }


def _publish(case: Case, rank: int, meeting: str) -> Step | None:
    """Each step pushes new rows; once all are there, one measures."""
    join(rank, meeting)
    if rank:
        return None
    cluster = ps.connect(["server"])
    table = cluster.table("items", case.dim, ps.RowwiseAdagrad(LR, EPS))
    pieces = iter(torch.split(torch.arange(case.rows), _PIECE))

    def step() -> dict[str, float]:
        some = next(pieces, None)
        if some is None:
            return _measure(cluster, table, case.rows)
        table.push(some, torch.zeros(len(some), case.dim))
        return {}

    return step


def published_rows(case: Case) -> str:
    """Fills a table, publishes it, changes some rows and publishes those."""
    group = SteppingGroup(partial(_publish, case), 2, case.threads, 1)
    try:
        group.measure(-(-case.rows // _PIECE) + 1)
        found = group.told[0]
    finally:
        group.close()
    width = 4 * case.dim + 8
    told = (
        f"{found['rows']:.0f} rows of {case.dim}, of which {found['changed']:.0f} change:",
        f"  a base has {found['base'] / 1e6:.1f} MB, a delta {found['delta'] / 1e6:.2f}:",
        f"  {100 * found['delta'] / found['base']:.2f} % of it, and "
        f"{found['delta'] / found['changed'] / width:.3f} of the {width} bytes a changed row has;",
        f"  a push of {_BATCH} rows takes {1e3 * found['unmarked']:.2f} ms before changes are",
        f"  noted and {1e3 * found['marked']:.2f} after; the longest while a delta was written,",
        f"  in {found['seconds']:.2f} s, took {found['longest'] / found['marked']:.1f} medians",
    )
    return "\n".join(told)
