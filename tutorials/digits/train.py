"""Trains a digit classifier with one parameter server and any number of trainers.

    python train.py                          everything on this machine
    python train.py --rank 0 --world-size 3 --master-addr host0      one process per machine
    torchrun --nproc-per-node 3 train.py     under torch's launcher

This file reads the command line and starts processes; ``job.py`` is the part
about distributed training. Rank 0 is the server, every other rank a trainer.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
from functools import partial
from pathlib import Path

from arguments import (
    MOST_PROCESSES,
    backend,
    launched,
    port,
    positive,
    rank,
    require_picture,
    require_rank,
)
from processes import load_for_all, run_together

_DEFAULT_OUTPUT = Path("runs/digits.png")


def main() -> int:
    """Run one rank if told which, or else start them all; return the exit status."""
    options = _parse(sys.argv[1:])
    if options.rank is None:
        return _run_all(options)
    return _run_rank(options, options.rank, options.world_size)


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--trainers", type=positive, default=2, help="how many, when all run here (%(default)s)")
    add("--epochs", type=positive, default=20, help="passes over the data (%(default)s)")
    add("--batch-size", type=positive, default=32, help="images per step (%(default)s)")
    add("--learning-rate", type=float, default=0.05, help="step size (%(default)s)")
    add("--seed", type=int, default=0, help="of weights, split and order (%(default)s)")
    add("--backend", type=backend, default="TENSORPIPE", help="TENSORPIPE or TENSORWIRE "
        "(%(default)s)")  # fmt: skip
    add("--output", type=Path, default=_DEFAULT_OUTPUT, help="picture to write (%(default)s)")
    hand = parser.add_argument_group("one process per machine, started by hand")
    hand.add_argument("--rank", type=rank, help="0 is the server, 1 and up are trainers")
    hand.add_argument("--world-size", type=positive, help="the server and all trainers")
    hand.add_argument("--master-addr", default="127.0.0.1", help="host of rank 0 (%(default)s)")
    hand.add_argument("--master-port", type=port, default=29500, help="a free port (%(default)s)")
    parser.set_defaults(init_method=None)
    options = parser.parse_args(arguments)
    try:
        _settle(options)
    except argparse.ArgumentTypeError as error:
        parser.error(str(error))
    return options


def _settle(options: argparse.Namespace) -> None:
    """Decide which rank this is, if it is one; raise if the options do not go together."""
    if options.rank is None and options.world_size is not None:
        raise argparse.ArgumentTypeError(
            "argument --world-size: goes with --rank; give --trainers for processes on this machine"
        )
    if options.rank is None and (told := launched(os.environ)) is not None:
        options.rank, options.world_size = told
        options.init_method = "env://"
    options.world_size = options.world_size or options.trainers + 1
    if options.world_size < 2:
        raise argparse.ArgumentTypeError("this takes at least 2 processes, a server and a trainer")
    if options.rank is not None:
        require_rank(options.rank, options.world_size)
    elif options.trainers > MOST_PROCESSES:
        raise argparse.ArgumentTypeError(
            f"argument --trainers: at most {MOST_PROCESSES} can run on one machine"
        )
    if not options.rank:  # the server draws
        require_picture(options.output)


def _run_all(options: argparse.Namespace) -> int:
    _limit_threads()
    # The data's library, which only the server uses, and what torch's optimizers load.
    load_for_all("worker", "sklearn.datasets", "torch._dynamo")
    names = ["server", *(f"trainer{number}" for number in range(1, options.world_size))]
    with tempfile.TemporaryDirectory(prefix="digits_") as folder:
        # The processes find each other through a file here: no port to choose, none to collide.
        options.init_method = f"file://{folder}/rendezvous"
        ranks = {n: partial(_run_rank, options, i, len(names)) for i, n in enumerate(names)}
        return run_together(ranks)


def _limit_threads() -> None:
    # Several processes share this machine's cores. Said before torch is loaded, it holds on every
    # thread that computes, whoever starts it.
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def _run_rank(options: argparse.Namespace, number: int, world_size: int) -> int:
    # Ctrl-C ends this process on the spot, even while it waits inside native code.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    _limit_threads()
    from worker import run_rank  # loads torch

    return run_rank(options, number, world_size)


if __name__ == "__main__":
    sys.exit(main())
