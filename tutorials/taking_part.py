"""The common parts of all tutorials: their options, how they join the group, an orderly end.

Every tutorial is the same kind of program. Its first worker drives; the others serve its calls
until it is done. rpcrun starts them all, each with a role, and says which is which:

    rpcrun --standalone --role main:1 --role stage:2,service -m tutorials.pipeline.train
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tutorials import arguments

positive = arguments.positive
"""For argparse: the number that a text says if it is at least 1."""

_SET_BY_RPCRUN = ("RPC_WORKER_NAME", "RPC_WORKER_ID", "WORLD_SIZE")
_SECONDS_TO_GATHER = 300.0


@dataclass(frozen=True, slots=True)
class Job:
    """The points in which one tutorial differs from another.

    Args:
        drive: what the first worker does, with the options and the names of all workers.
        fewest: workers it needs.
        most: workers it has work for.
    """

    drive: Callable[[argparse.Namespace, Sequence[str]], None]
    fewest: int
    most: int = sys.maxsize


def parser(description: str | None, roles: str, output: str) -> argparse.ArgumentParser:
    """Return a parser with the options that all tutorials have.

    Args:
        description: the tutorial's docstring, whose first line ``--help`` shows.
        roles: how rpcrun starts it: its roles, separated by spaces, the driver first.
        output: folder in ``runs/`` for pictures and traces.
    """
    spec = sys.modules["__main__"].__spec__
    program = f"-m {spec.name}" if spec is not None else sys.argv[0]
    flags = " ".join(f"--role {role}" for role in roles.split())
    start = f"rpcrun --standalone {flags} {program}"
    result = argparse.ArgumentParser(
        description=(description or "").splitlines()[0], usage=f"{start} [options]"
    )
    add = result.add_argument
    add("--backend", type=arguments.backend, default="TENSORWIRE", help="TENSORWIRE or TENSORPIPE "
        "(%(default)s)")  # fmt: skip
    add("--seed", type=int, default=0, help="of everything random (%(default)s)")
    add("--output", type=Path, default=Path("runs") / output, help="folder (%(default)s)")
    result.set_defaults(start=start)
    return result


def run(options: argparse.Namespace, job: Job) -> int:
    """Be the worker that rpcrun started this process for.

    Returns:
        The exit status of this process.
    """
    try:
        number, workers = _place(options)
        if number == 0:
            _check(options, job, workers)
    except argparse.ArgumentTypeError as error:
        print(error, file=sys.stderr)
        return 2
    try:
        _take_part(options, job, number, workers)
    except RuntimeError as error:
        name = os.environ["RPC_WORKER_NAME"]
        print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        _leave_at_once()
    except Exception:
        traceback.print_exc()
        _leave_at_once()
    return 0


def _place(options: argparse.Namespace) -> tuple[int, int]:
    """This worker's number, and how many there are."""
    if any(name not in os.environ for name in _SET_BY_RPCRUN):
        raise argparse.ArgumentTypeError(f"rpcrun starts this: {options.start}")
    return int(os.environ["RPC_WORKER_ID"]), int(os.environ["WORLD_SIZE"])


def _check(options: argparse.Namespace, job: Job, workers: int) -> None:
    if workers < job.fewest:
        raise argparse.ArgumentTypeError(
            f"this takes at least {job.fewest} workers: {options.start}"
        )
    if workers > job.most:
        raise argparse.ArgumentTypeError(f"this takes at most {job.most} workers: {options.start}")
    arguments.require_folder(options.output)


def _leave_at_once() -> None:
    """The group is broken: do not wait for it, and do not let a stuck thread hold us."""
    sys.stderr.flush()
    os._exit(1)


def _take_part(options: argparse.Namespace, job: Job, number: int, workers: int) -> None:
    import torch

    import rpc

    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else torch's profiler reports its own steps
    # Begun on another thread than the one that loads torch, its profiler prints an ERROR.
    with torch.autograd.profiler.profile():
        pass
    torch.set_num_threads(1)  # several processes share this machine's cores
    torch.manual_seed(options.seed + number)
    rpc.init_rpc(backend=rpc.BackendType.__members__[options.backend])
    if number > 0:
        rpc.serve()  # all that this worker does is done for calls
        return
    # Ctrl-C ends this process on the spot, even while it waits inside native code.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    job.drive(options, _gathered(workers))
    rpc.shutdown()


def _gathered(workers: int) -> list[str]:
    """Waits until all workers have joined; returns their names, by number."""
    import rpc

    deadline = time.monotonic() + _SECONDS_TO_GATHER
    while len(found := rpc.workers()) < workers:
        if time.monotonic() > deadline:
            raise TimeoutError(f"only {len(found)} of {workers} workers joined")
        time.sleep(0.01)
    return [worker.name for worker in sorted(found, key=lambda worker: worker.id)]
