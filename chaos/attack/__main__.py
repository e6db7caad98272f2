"""The command line: ``python -m chaos.attack --help``."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
from pathlib import Path

import chaos.attack
from chaos.attack.job import Settings, observe
from chaos.attack.judge import describe, violations


def run(settings: Settings) -> list[str]:
    """Makes one run, and says what it saw; returns what must not be."""
    job, seen = observe(settings)
    for line in describe(job, seen, os.geteuid() == 0):
        print(line)
    found = list(violations(job, seen))
    for line in found or ["the job did not notice; its rows have the bits of an undisturbed run"]:
        print(line, flush=True)
    return found


def main() -> int:
    about = (chaos.attack.__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(prog="python -m chaos.attack", description=about)
    add = parser.add_argument
    add("--seconds", type=float, default=600.0, help="how long (%(default)s)")
    add("--standalone", action="store_true", help="a job on its own, which makes its key, over "
        "Unix sockets (one with a key file and a port that is known, over TCP)")  # fmt: skip
    add("--kill-every", type=float, default=60.0, help="seconds after which a server is killed, so "
        "that somebody joins meanwhile; 0 for never (%(default)s)")  # fmt: skip
    add("--seed", type=int, default=0, help="of what is done when (%(default)s)")
    add("--log", type=Path, help="folder for what the workers print and tell (a new one, "
        "attack-..., in the folder for temporary files)")  # fmt: skip
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the job is ended then, too
    folder = options.log or Path(tempfile.mkdtemp(prefix="attack-"))
    folder.mkdir(parents=True, exist_ok=True)
    meets = "on its own" if options.standalone else "with a key file"
    print(f"a job {meets} is attacked for {options.seconds:g} s; {folder}", flush=True)
    settings = Settings(
        folder, options.seconds, options.standalone, options.kill_every, options.seed
    )
    return int(bool(run(settings)))


if __name__ == "__main__":
    sys.exit(main())
