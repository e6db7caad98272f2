"""The command line: ``python -m benchmarks.launcher MEASUREMENT --help``."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from typing import Final

from benchmarks.launcher import beside_torchrun
from benchmarks.launcher.jobs import End, JobFailedError, busy_cores, job, load, spread

_STARTS: Final = {
    "as by default": (),
    "--start-method spawn": ("--start-method", "spawn"),
    "--start-method fork": ("--start-method", "fork"),
}
_RETURNS: Final = {
    "started by a command": (),
    "--warm 1": ("--warm", "1"),
    "--start-method fork": ("--start-method", "fork"),
}
_SECONDS_BEFORE_A_KILL: Final = 15.0
"""More than the 10 s after which a worker that dies is started again without a pause; warm
processes are ready by then, too."""


def training(options: argparse.Namespace) -> None:
    """The README's program, with two servers and two trainers, from rpcrun's start to its end."""
    for name, flags in _STARTS.items():
        ends: list[tuple[float, End]] = []
        for _ in range(options.times):
            with job(2, 2, 100, flags) as work:
                ends.append((work.began, work.end()))
        seconds = spread([end.at - began for began, end in ends])
        processor = spread([end.processor for _, end in ends])
        print(f"{name}: {seconds} s, {processor} s of processor time; {load()}", flush=True)


def ends(options: argparse.Namespace) -> None:
    """From the end of the last trainer's process to rpcrun's; shows the logs of late ones."""
    for servers in options.servers:
        seconds: list[float] = []
        for _ in range(options.times):
            with job(servers, 1, options.steps, ("--start-method", "fork")) as work:
                gone = work.trainers_end()
                seconds.append(work.end().at - gone)
                said = work.said()
            if options.each:
                print(f"  {seconds[-1]:.2f} s", flush=True)
            if seconds[-1] > options.most:
                print(f"{seconds[-1]:.2f} s: {said}", flush=True)
        late = sum(each > options.most for each in seconds)
        print(
            f"{servers} servers: {spread(seconds)} s, {late} of {len(seconds)} over "
            f"{options.most:g} s; {load()}",
            flush=True,
        )


def returns(options: argparse.Namespace) -> None:
    """From ``kill -9`` of a trainer, long after its start, to its successor's first step."""
    for name, flags in _RETURNS.items():
        seconds: list[float] = []
        with job(1, 1, -1, flags, restarts=options.times) as work:
            for life in range(options.times):
                work.note(0, life, "stepped")
                time.sleep(_SECONDS_BEFORE_A_KILL)
                killed = time.time()
                os.kill(int(work.note(0, life, "pid")), signal.SIGKILL)
                seconds.append(float(work.note(0, life + 1, "stepped")) - killed)
            work.finish()
            work.end()
        print(f"{name}: {spread(seconds)} s; {load()}", flush=True)


def main() -> int:
    """Measures and prints; returns the exit status."""
    options = _parse()
    try:
        with busy_cores(options.busy):
            options.measure(options)
    except JobFailedError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _parse() -> argparse.Namespace:
    about = "Seconds that jobs of rpcrun take; each as median (least to most)."
    parser = argparse.ArgumentParser(prog="python -m benchmarks.launcher", description=about)
    kinds = parser.add_subparsers(required=True, metavar="MEASUREMENT")
    for measure, times in (
        (training, 5),
        (ends, 10),
        (returns, 3),
        (beside_torchrun.measure_all, 7),
    ):
        summary = (measure.__doc__ or "").splitlines()[0]
        name = "beside-torchrun" if measure is beside_torchrun.measure_all else measure.__name__
        kind = kinds.add_parser(name, help=summary, description=summary)
        kind.set_defaults(measure=measure)
        kind.add_argument(
            "--times", type=int, default=times, help="jobs of each kind (%(default)s)"
        )
        kind.add_argument("--busy", type=int, default=0, help="cores kept busy meanwhile (none)")
        if measure is ends:
            kind.add_argument("--servers", type=int, nargs="+", default=[2, 8], help="(2 8)")
            kind.add_argument("--steps", type=int, default=100, help="of the trainer (%(default)s)")
            kind.add_argument("--most", type=float, default=2.0, help="seconds (%(default)s)")
            kind.add_argument("--each", action="store_true", help="print every job's time")
        elif measure is beside_torchrun.measure_all:
            kind.add_argument("--workers", type=int, nargs="+", default=[4, 12], help="(4 12)")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
