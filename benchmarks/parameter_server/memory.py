"""The memory of a server, and how it changes over many steps."""

from __future__ import annotations

import itertools
import os
from functools import partial

import torch

from benchmarks.parameter_server.case import EPS, LR, Case, join
from benchmarks.stepping import Step, SteppingGroup
from tensorwire import parameter_server as ps

_PIECE = 1 << 18
_SMALL = 100
"""Small steps that are told as one."""


def memory_of(process: int) -> dict[str, float]:
    """Megabytes that a process takes: now, at most so far, and the part that is shared."""
    found = {}
    with open(f"/proc/{process}/status") as lines:
        for line in lines:
            name, _, value = line.partition(":")
            if name in ("VmRSS", "VmHWM", "RssShmem"):
                found[name] = int(value.split()[0]) / 1024
    return found


def _measured_server() -> dict[str, float]:
    return memory_of(os.getpid())


def _fill(case: Case, rank: int, meeting: str) -> Step | None:
    """Each step pushes new rows, until all are there."""
    rpc = join(rank, meeting)
    if rank:
        return None
    cluster = ps.connect(["server"])
    table = cluster.table("items", case.dim, ps.RowwiseAdagrad(LR, EPS))
    pieces = iter(torch.split(torch.arange(case.rows), _PIECE))

    def step() -> dict[str, float]:
        some = next(pieces, None)
        if some is not None:
            table.push(some, torch.zeros(len(some), case.dim))
        measured: dict[str, float] = rpc.rpc_sync("server", _measured_server)
        shard = cluster.stats()["servers"]["server"]["shards"][0]
        told = shard["tables"]["items"]
        return measured | {"rows": told["rows"], "bytes": told["bytes"]}

    return step


def many_rows(case: Case) -> str:
    """Fills a table; says what the server took."""
    group = SteppingGroup(partial(_fill, case), 2, case.threads, 1)
    try:
        before = group.first[0][0]["VmRSS"]
        group.measure(-(-case.rows // _PIECE))
        found = group.told[0]
    finally:
        group.close()
    width = 4 * (case.dim + 1)
    beyond = found["bytes"] / found["rows"] - width
    now, most, shared = (f"{found[name]:.0f} MB" for name in ("VmRSS", "VmHWM", "RssShmem"))
    told = (
        f"{found['rows']:.0f} rows of {case.dim}: the server takes {now}, at most {most};",
        f"  {shared} are shared with the trainer; after {_PIECE} rows it took {before:.0f} MB",
        f"  {width} bytes a row are weights and state, {beyond:.1f} ids and index",
    )
    return "\n".join(told)


def _small_steps(case: Case, rank: int, meeting: str) -> Step | None:
    """Steps as small as can be; many of them."""
    rpc = join(rank, meeting)
    if rank:
        return None
    cluster = ps.connect(["server"])
    table = cluster.table("items", case.dim, ps.RowwiseAdagrad(LR, EPS))
    module = ps.Embedding(table)
    optimizer = ps.Optimizer(cluster, module)
    batches = itertools.cycle(case.batches())
    source = ps.prefetch(batches, module, ids=lambda batch: batch)

    def step() -> tuple[dict[str, float], dict[str, float]]:
        for _ in range(_SMALL):
            module(next(source)).sum().backward()
            optimizer.step()
        return memory_of(os.getpid()), rpc.rpc_sync("server", _measured_server)

    return step


def many_steps(case: Case, steps: int) -> str:
    """Does so many steps; says what trainer and server took on the way."""
    group = SteppingGroup(partial(_small_steps, case), 2, case.threads, 1)
    lines = [f"{steps} steps of {case.ids} ids; MB of the trainer, and of the server:"]
    try:
        for tenth in range(1, 11):
            group.measure(max(1, steps // 10 // _SMALL))
            trainer, server = group.told[0]
            took = f"{trainer['VmRSS']:.1f}, {server['VmRSS']:.1f}"
            lines.append(f"  after {tenth * steps // 10} steps: {took}")
    finally:
        group.close()
    return "\n".join(lines)
