"""Starts a tutorial: the options they all have, one process per worker, an orderly end.

Every tutorial is the same kind of program. Its workers form one RPC group; rank 0
drives, the others serve its calls until it is done. A tutorial says how its workers
are named and what rank 0 does; this file does the rest, so that none repeats it:

    python -m tutorials.pipeline.train                       all workers on this machine
    python -m tutorials.pipeline.train --rank 1 --world-size 3 --master-addr host0
    torchrun --nproc-per-node 3 -m tutorials.pipeline.train

How processes are kept from outliving each other is ``parameter_server/processes.py``.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tutorials.parameter_server import arguments
from tutorials.parameter_server.processes import load_for_all, run_together

positive = arguments.positive
"""For argparse: the number that a text says if it is at least 1."""

_over = threading.Event()  # on rank 0: the job is done


@dataclass(frozen=True, slots=True)
class Job:
    """What makes one tutorial different from another.

    Args:
        names: the workers' names by rank, for a number of workers.
        drive: what rank 0 does, with the options and all names.
        fewest: workers it needs.
        most: workers it has work for.
    """

    names: Callable[[int], Sequence[str]]
    drive: Callable[[argparse.Namespace, Sequence[str]], None]
    fewest: int
    most: int = sys.maxsize


def parser(description: str | None, workers: int, output: str) -> argparse.ArgumentParser:
    """Return a parser with the options that all tutorials have.

    Args:
        description: the tutorial's docstring, whose first line ``--help`` shows.
        workers: how many there are unless the user says otherwise.
        output: folder in ``runs/`` for pictures and traces.
    """
    result = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    add = result.add_argument
    add("--backend", type=arguments.backend, default="TENSORWIRE", help="TENSORWIRE or TENSORPIPE "
        "(%(default)s)")  # fmt: skip
    add(*("--workers", "--world-size"), type=positive, default=workers, help="processes, rank 0 "
        "among them (%(default)s)")  # fmt: skip
    add("--seed", type=int, default=0, help="of everything random (%(default)s)")
    add("--output", type=Path, default=Path("runs") / output, help="folder (%(default)s)")
    hand = result.add_argument_group("one process per machine, started by hand")
    hand.add_argument(
        "--rank", type=arguments.rank, help="which worker this process is; rank 0 drives"
    )
    hand.add_argument("--master-addr", default="127.0.0.1", help="host of rank 0 (%(default)s)")
    hand.add_argument(
        "--master-port", type=arguments.port, default=29500, help="a free port (%(default)s)"
    )
    result.set_defaults(init_method=None)
    return result


def run(options: argparse.Namespace, job: Job) -> int:
    """Be the one rank that the options or torchrun name, or else start them all.

    Returns:
        The exit status of this process.
    """
    try:
        _settle(options, job)
    except argparse.ArgumentTypeError as error:
        print(error, file=sys.stderr)
        return 2
    names = job.names(options.workers)
    if options.rank is None:
        return _run_all(options, job, names)
    return _run_rank(options, job, names, options.rank)


def _settle(options: argparse.Namespace, job: Job) -> None:
    """Decide which rank this is, if it is one; raise if the options do not go together."""
    if options.rank is None and (told := arguments.launched(os.environ)) is not None:
        options.rank, options.workers = told
        options.init_method = options.init_method or "env://"
    if options.workers < job.fewest:
        raise argparse.ArgumentTypeError(f"this takes at least {job.fewest} workers")
    if options.workers > job.most:
        raise argparse.ArgumentTypeError(f"this takes at most {job.most} workers")
    if options.rank is not None:
        arguments.require_rank(options.rank, options.workers)
    elif options.workers > arguments.MOST_PROCESSES:
        most = arguments.MOST_PROCESSES
        raise argparse.ArgumentTypeError(f"at most {most} workers can run on one machine")
    if not options.rank:  # rank 0 draws
        arguments.require_folder(options.output)


def _run_all(options: argparse.Namespace, job: Job, names: Sequence[str]) -> int:
    _quieten_profiler()
    # torch's optimizers load the last.
    load_for_all("rpc", "autograd_dist", "optim_dist", "remote_module", "torch._dynamo")
    with tempfile.TemporaryDirectory(prefix="tutorial_") as folder:
        # The processes find each other through a file here: no port to choose, none to collide.
        options.init_method = f"file://{folder}/rendezvous"
        ranks = {n: partial(_run_rank, options, job, names, rank) for rank, n in enumerate(names)}
        return run_together(ranks)


def _quieten_profiler() -> None:
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else torch's profiler reports its own steps


def _run_rank(options: argparse.Namespace, job: Job, names: Sequence[str], rank: int) -> int:
    options.rank = rank
    # Ctrl-C ends this process on the spot, even while it waits inside native code.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    _quieten_profiler()
    name = names[options.rank]
    try:
        _take_part(options, job, names)
    except RuntimeError as error:
        print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        _leave_at_once()
    except Exception:
        traceback.print_exc()
        _leave_at_once()
    return 0


def _leave_at_once() -> None:
    """The group is broken: do not wait for it, and do not let a stuck thread hold us."""
    sys.stderr.flush()
    os._exit(1)


def _take_part(options: argparse.Namespace, job: Job, names: Sequence[str]) -> None:
    import torch

    import rpc

    # Begun on another thread than the one that loads torch, its profiler prints an ERROR.
    with torch.autograd.profiler.profile():
        pass
    torch.set_num_threads(1)  # several processes share this machine's cores
    torch.manual_seed(options.seed + options.rank)
    _join(options, names)
    if options.rank == 0:
        job.drive(options, names)
        _over.set()
    else:
        # Everything a worker does is done for calls. This call of its own is how it
        # learns that rank 0 is done, or was lost.
        rpc.rpc_sync(names[0], _wait_until_over, timeout=0)
    rpc.shutdown()


def _wait_until_over() -> None:
    _over.wait()


def _join(options: argparse.Namespace, names: Sequence[str]) -> None:
    import rpc

    backend = rpc.BackendType.__members__[options.backend]
    meeting = f"tcp://{options.master_addr}:{options.master_port}"
    rpc_options = rpc.backend_registry.construct_rpc_backend_options(
        backend, init_method=options.init_method or meeting
    )
    rpc.init_rpc(names[options.rank], backend, options.rank, len(names), rpc_options)
