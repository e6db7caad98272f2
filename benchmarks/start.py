"""Seconds that ``init_rpc`` takes on one host: ``python -m benchmarks.start``.

All workers of a group are forked from this process, which has imported everything, and call
``init_rpc`` at once. Measured is the time until the last of them has returned, and how much
processor time each has used by then. torch's own agent takes turns with ours, so that both see
the same machine.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import socket
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.context import ForkContext
from typing import Any, Final

import torch
import torch.distributed.rpc as torch_rpc

import rpc

_SECONDS_TO_START: Final = 120.0


class StartFailedError(Exception):
    """A group did not start: torch's own gives up early on a busy machine."""


@dataclass(frozen=True, slots=True)
class Start:
    """The time that one group took to start.

    Args:
        seconds: until the last worker was there.
        processor: seconds of processor time that each worker used, on average.
    """

    seconds: float
    processor: float


def _init_torch(name: str, rank: int, size: int, url: str) -> Callable[[], None]:
    library: Any = torch_rpc  # which has no types
    options = library.TensorPipeRpcBackendOptions(init_method=url)
    library.init_rpc(name, rank=rank, world_size=size, rpc_backend_options=options)
    shutdown: Callable[[], None] = library.shutdown
    return shutdown


def _init_tensorwire(name: str, rank: int, size: int, url: str) -> Callable[[], None]:
    options = rpc.TensorWireRpcBackendOptions(init_method=url)
    rpc.init_rpc(name, rank=rank, world_size=size, rpc_backend_options=options)
    return rpc.shutdown


def _init_tensorpipe(name: str, rank: int, size: int, url: str) -> Callable[[], None]:
    options = rpc.TensorPipeRpcBackendOptions(init_method=url)
    rpc.init_rpc(name, rank=rank, world_size=size, rpc_backend_options=options)
    return rpc.shutdown


COLUMNS: Final = {
    "torch": _init_torch,
    "TENSORWIRE": _init_tensorwire,
    "TENSORPIPE": _init_tensorpipe,
}


def _be_worker(column: str, rank: int, size: int, url: str, barrier: Any, results: Any) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # torch's own agent warns of torch's own ways
    barrier.wait(_SECONDS_TO_START)
    began, used = time.monotonic(), time.process_time()
    try:
        shutdown = COLUMNS[column](f"worker{rank}", rank, size, url)
    except BaseException:
        barrier.abort()  # nobody need wait for it
        raise
    results.put((began, time.monotonic(), time.process_time() - used))
    barrier.wait(_SECONDS_TO_START)  # who leaves must not slow down who still comes
    shutdown()
    barrier.wait(_SECONDS_TO_START)  # torch's agents leave by a store that the first one hosts
    os._exit(0)


def measure(column: str, size: int) -> Start:
    """Starts one group and ends it again.

    Raises:
        StartFailedError: a worker failed; it has said why.
    """
    context: ForkContext = multiprocessing.get_context("fork")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    barrier, results = context.Barrier(size), context.SimpleQueue()
    workers = [
        context.Process(target=_be_worker, args=(column, rank, size, url, barrier, results))
        for rank in range(size)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if any(worker.exitcode for worker in workers):
        raise StartFailedError
    times = [results.get() for _ in workers]
    seconds = max(end for _, end, _ in times) - min(began for began, _, _ in times)
    return Start(seconds, statistics.mean(used for _, _, used in times))


def main() -> int:
    """Measures and prints; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.start",
        description="Seconds that init_rpc takes on one host, by the number of workers.",
    )
    add = parser.add_argument
    add("--workers", type=int, nargs="+", default=[4, 12, 24, 48], help="(4 12 24 48)")
    add("--rounds", type=int, default=5, help="groups of each kind (%(default)s)")
    add("--columns", nargs="+", choices=COLUMNS, default=list(COLUMNS), help="(all)")
    options = parser.parse_args()
    print("workers  " + "  ".join(f"{name:^34}" for name in options.columns))
    for size in options.workers:
        found: dict[str, list[Start]] = {name: [] for name in options.columns}
        for _ in range(options.rounds):
            for name in options.columns:
                with contextlib.suppress(StartFailedError):
                    found[name].append(measure(name, size))
        print(f"{size:7}  " + "  ".join(_cell(found[name]) for name in options.columns), flush=True)
    return 0


def _cell(starts: list[Start]) -> str:
    if not starts:
        return f"{'failed':^34}"
    seconds = [start.seconds for start in starts]
    used = statistics.median(start.processor for start in starts)
    spread = f"{min(seconds):.2f} to {max(seconds):.2f}"
    return f"{statistics.median(seconds):5.2f} s ({spread:>12}), cpu {used * 1e3:3.0f} ms"


if __name__ == "__main__":
    sys.exit(main())
