"""Does memory stay flat? Calls one worker very often, and watches what every process holds.

``python -m benchmarks.soak --help``. The first fifth of the calls may fill caches and
pools; from then on no process may grow by more than the limit.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import torch

import rpc

_PARTS = 20
_SETTLED_AFTER = _PARTS // 5
_AT_ONCE = 1000
_LARGE_AT_ONCE = 100
_MEBIBYTE = 1 << 20


@dataclass(frozen=True, slots=True)
class Load:
    """The work of all callers.

    Args:
        title: for the report.
        calls: of all callers together.
        callers: processes.
        bytes: of the tensor that each call carries, 0 for none.
    """

    title: str
    calls: int
    callers: int
    bytes: int


def do_nothing(*_: object) -> None:
    """Runs at the peer."""


def main() -> int:
    """Runs the loads; returns 1 if a process grew."""
    options = parse()
    loads = [
        Load("small calls", options.small, 1, 0),
        Load("calls with 1 MiB", options.large, 4, _MEBIBYTE),
    ]
    grown = [_soak(load, options.backend, options.limit) for load in loads if load.calls]
    return int(any(grown))


def parse() -> argparse.Namespace:
    about = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=about)
    add = parser.add_argument
    add("--backend", default="TENSORWIRE", help="of all processes (%(default)s)")
    add("--small", type=int, default=1_000_000, help="small calls of one caller (%(default)s)")
    add("--large", type=int, default=10_000, help="calls with 1 MiB of four callers (%(default)s)")
    add("--limit", type=float, default=20.0, help="MiB that a process may grow after the first "
        "fifth of the calls, which may fill caches and pools (%(default)s)")  # fmt: skip
    return parser.parse_args()


def _soak(load: Load, backend: str, limit: float) -> bool:
    """Runs one load, prints a line for each process; True if one grew too much."""
    context = get_context("forkserver")  # whose one process imports torch for all
    context.set_forkserver_preload(["torch", "rpc"])
    processes: list[ForkServerProcess] = []
    ends: list[Connection] = []
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="soak_") as folder:
        url = f"file://{folder}/meeting"
        for rank in range(load.callers + 1):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(load, backend, url, rank, theirs))
            process.start()
            theirs.close()
            processes.append(process)
            ends.append(ours)
        try:
            history = _watch(processes, ends)
        finally:
            for process in processes:
                process.join(60)
                process.kill()
    seconds = time.monotonic() - began
    print(f"{load.calls} {load.title} over {backend}, {load.callers} callers, {seconds:.0f} s")
    growths = [_report(rank, samples) for rank, samples in enumerate(history)]
    return max(growths) > limit


def _watch(processes: list[ForkServerProcess], ends: list[Connection]) -> list[list[float]]:
    """The memory that each process held whenever a caller had finished a part of its calls."""
    history: list[list[float]] = [[] for _ in processes]
    callers = ends[1:]
    parts = 0
    while callers:
        for end in wait(callers, 300):
            assert isinstance(end, Connection)
            try:
                end.recv()
            except EOFError:
                callers.remove(end)
                continue
            parts += 1
            if parts % (len(processes) - 1) == 0:
                for samples, process in zip(history, processes, strict=True):
                    samples.append(_resident(process.pid))
    return history


def _report(rank: int, samples: list[float]) -> float:
    if len(samples) < _PARTS:
        sys.exit(f"a process failed: rank {rank} has {len(samples)} of {_PARTS} samples")
    settled, growth = samples[_SETTLED_AFTER - 1], grown(samples)
    name = f"caller {rank}" if rank else "worker  "
    print(f"  {name}: {settled:7.1f} MiB after a fifth, {growth:+6.1f} MiB at most after that")
    return growth


def grown(samples: list[float]) -> float:
    """By how much a process was larger than after a fifth of its calls, at most."""
    return max(samples[_SETTLED_AFTER:]) - samples[_SETTLED_AFTER - 1]


def _resident(pid: int | None) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) / 1024


def _work(load: Load, backend: str, url: str, rank: int, news: Connection) -> None:
    kinds: dict[str, Callable[..., rpc.RpcBackendOptions]] = {
        "TENSORWIRE": rpc.TensorWireRpcBackendOptions,
        "TENSORPIPE": rpc.TensorPipeRpcBackendOptions,
    }
    torch.set_num_threads(1)
    rpc.init_rpc(
        f"worker{rank}",
        rank=rank,
        world_size=load.callers + 1,
        rpc_backend_options=kinds[backend](init_method=url),
    )
    if rank:
        for _ in range(_PARTS):
            _call(load)
            news.send(None)
    news.close()
    rpc.shutdown(timeout=0)


def _call(load: Load) -> None:
    """One part of a caller's calls, some of which are under way at the same time."""
    left = load.calls // load.callers // _PARTS
    carried = (torch.ones(load.bytes, dtype=torch.uint8),) if load.bytes else ()
    while left:
        count = min(left, _LARGE_AT_ONCE if load.bytes else _AT_ONCE)
        torch.futures.wait_all(
            [rpc.rpc_async("worker0", do_nothing, carried) for _ in range(count)]
        )
        left -= count


if __name__ == "__main__":
    sys.exit(main())
