"""The command line: ``python -m chaos --help``."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import chaos
from chaos.director import WITNESS, Director, Settings
from chaos.judge import Limits, Report, describe, judge
from chaos.plan import plan
from chaos.worker import SERVER

_RECOVERY_SECONDS = 12.0
_VARYING_DESCRIPTORS = {"TENSORPIPE": 4, "TENSORWIRE": 8}
"""Signs of life have connections that come and go; and over TENSORWIRE two workers that reach
for each other at the same time keep the connections of both, two descriptors more."""

_VARYING_THREADS = 8
"""Handlers that may run at once: as many as others have calls under way."""


def run(settings: Settings, seconds: float, seed: int) -> Report:
    """Makes one run and judges it."""
    faults = plan(seed, seconds, settings.victims, settings.bound * 2 + _RECOVERY_SECONDS)
    director = Director(settings)
    end = director.run(faults, seconds)
    descriptors = _VARYING_DESCRIPTORS[settings.backend]
    limits = Limits(settings.bound, descriptors=descriptors, threads=_VARYING_THREADS)
    told = settings.log.with_suffix(".events")
    told.write_text("".join(event.encode() + "\n" for event in director.events))
    report = judge(director.done, director.events, WITNESS, end, limits, called=SERVER)
    report.violations.extend(director.problems)
    return report


def main() -> int:
    about = (chaos.__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(prog="python -m chaos", description=about)
    add = parser.add_argument
    known = ["TENSORWIRE", "TENSORPIPE"]
    add("--backend", nargs="+", choices=known, default=known, help="one after the other (both)")
    add("--seconds", type=float, default=180.0, help="how long, for each backend (%(default)s)")
    add("--trainers", type=int, default=3, help="besides the server; nothing is done to the first "
        "(%(default)s)")  # fmt: skip
    add("--bound", type=float, default=2.0, help="the liveness timeout, in seconds (%(default)s)")
    add("--seed", type=int, default=0, help="of what is done to whom and when (%(default)s)")
    add("--tls", action="store_true", help="encrypt; for TENSORWIRE, which then uses TCP alone "
        "(workers of one host use memory and Unix sockets)")  # fmt: skip
    add("--log", type=Path, help="folder for what the workers print and tell (a new one, "
        "chaos-..., in the folder for temporary files)")  # fmt: skip
    options = parser.parse_args()
    folder = options.log or Path(tempfile.mkdtemp(prefix="chaos-"))
    folder.mkdir(parents=True, exist_ok=True)
    failed = False
    for backend in options.backend:
        log = folder / f"{backend.lower()}.log"
        certificates = folder if options.tls and backend == "TENSORWIRE" else None
        settings = Settings(backend, options.trainers, options.bound, log, certificates)
        print(f"{backend}: {options.seconds:g} s, liveness timeout {options.bound:g} s, {log}")
        report = run(settings, options.seconds, options.seed)
        print(describe(report), flush=True)
        failed = failed or bool(report.violations)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
