"""The cost for a job of being looked at: ``python -m benchmarks.watching --help``.

Counts what a worker does for one answer, which an open page asks for once a second. Then trains
the tutorial's click-through model on one server with one trainer, by turns while somebody looks,
as a page does, and while nobody does. Needs a quiet machine, except for the counts.
"""

from __future__ import annotations

import argparse
import itertools
import json
import mmap
import os
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Final

import torch
from torch.nn.functional import binary_cross_entropy_with_logits

import rpc
from rpc.observe.reporter import Reporter
from rpc.observe.watching import progress_of
from rpc.testing import as_worker, local_group
from tensorwire import parameter_server as ps
from tensorwire.watching.hub import Hub, Viewer
from tensorwire.watching.jobs import find_job
from tensorwire.watching.machine import look_at
from tutorials.parameter_server.clicks import World
from tutorials.parameter_server.train import ids_of, make_model, make_optimizer

_ANSWERS: Final = 20
_SECONDS_TO_START: Final = 120.0
_WARM_STEPS: Final = 50
_WORD: Final = struct.Struct("Q")


# --- the trainer's program


def train(counter: str) -> None:
    """Trains until it is ended, and counts its steps in a file that others map, too."""
    torch.set_num_threads(1)
    rpc.init_rpc()
    cluster = ps.connect(["ps:0"])
    model = make_model(cluster, 1)
    optimizer = make_optimizer(cluster, model)
    with Path(counter).open("r+b") as file, mmap.mmap(file.fileno(), _WORD.size) as steps:
        batches = World(1).batches(0, 1, 1 << 40, 1024)
        for step, batch in enumerate(ps.prefetch(batches, model, ids=ids_of), 1):
            optimizer.zero_grad()
            loss = binary_cross_entropy_with_logits(model(batch.ids, batch.numbers), batch.clicked)
            torch.autograd.backward(loss)
            optimizer.step()
            _WORD.pack_into(steps, 0, step)


# --- counts


def count() -> tuple[float, int]:
    """Python calls of a worker for one answer, and the bytes of it."""
    calls = itertools.count()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            next(calls)

    with tempfile.TemporaryDirectory() as folder, local_group("a", "b") as (a, _), as_worker(a):
        rpc.rpc_sync("b", len, args=("",))
        hub = Hub(f"{folder}/hub", lambda question: None)
        hub.start()
        threading.setprofile(note)
        try:
            progress = progress_of(a.states, a.clock)
            reporter = Reporter(hub.path, a, progress, lambda function: _as(a, function))
        finally:
            threading.setprofile(None)
        try:
            while not hub.pids():
                time.sleep(0.01)
            answers = [hub.ask("a", {"ask": "facts"}, 30.0) for _ in range(_ANSWERS + 1)]
        finally:
            reporter.close()
            hub.close()
    return next(calls) / (_ANSWERS + 1), len(json.dumps(answers[-1]))


def _as(agent: Any, function: Any) -> Any:
    with as_worker(agent):
        return function()


# --- pairs


@dataclass(frozen=True, slots=True)
class Window:
    """Some seconds of training.

    Args:
        rate: steps a second.
        agent: processors that rpcrun kept busy.
        workers: likewise, all workers together.
    """

    rate: float
    agent: float
    workers: float


@contextmanager
def job(folder: str) -> Iterator[tuple[str, str]]:
    """A job that trains; the socket to look at it, and the file that counts its steps."""
    counter = f"{folder}/steps"
    Path(counter).write_bytes(bytes(_WORD.size))
    os.environ["XDG_RUNTIME_DIR"] = folder
    command = [
        sys.executable, "-m", "tensorwire.launch", "--standalone", "--stall-timeout", "0",
        "--role", "ps:1,service=tensorwire.parameter_server", "--role", "trainer:1",
        "-m", "benchmarks.watching", "--train", counter,
    ]  # fmt: skip
    agent = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + _SECONDS_TO_START
        while steps(counter) < _WARM_STEPS:
            if agent.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the job does not train; rpcrun's exit code: {agent.poll()}")
            time.sleep(0.2)
        yield find_job(None).path, counter
    finally:
        agent.terminate()
        agent.wait()


def steps(counter: str) -> int:
    """The number of steps made so far."""
    found: int = _WORD.unpack(Path(counter).read_bytes())[0]
    return found


def window(counter: str, pids: dict[str, int], seconds: float, viewer: Viewer | None) -> Window:
    """Looks on for some seconds; with a viewer asks once a second, as a page does."""
    before, began, first = steps(counter), time.monotonic(), _processor(pids)
    while (left := began + seconds - time.monotonic()) > 0:
        if viewer is not None:
            viewer.ask({"ask": "job"})
        time.sleep(min(1.0, left))
    took, last = time.monotonic() - began, _processor(pids)
    used = {name: (last[name] - first[name]) / took for name in pids}
    agent = used.pop("agent")
    return Window((steps(counter) - before) / took, agent, sum(used.values()))


def _processor(pids: dict[str, int]) -> dict[str, float]:
    return {name: look_at(pid).cpu_seconds for name, pid in pids.items()}


def pairs(times: int, seconds: float) -> list[tuple[Window, Window]]:
    """So many windows while nobody looks, each beside one while somebody does."""
    with tempfile.TemporaryDirectory() as folder, job(folder) as (path, counter):
        with Viewer(path) as viewer:
            workers = viewer.ask({"ask": "job"})["workers"]
            pids = {each["name"]: each["process"]["pid"] for each in workers}
            pids["agent"] = find_job(None).pid
            found = []
            for _ in range(times):
                time.sleep(6.0)  # whoever looked has gone by then
                closed = window(counter, pids, seconds, None)
                found.append((closed, window(counter, pids, seconds, viewer)))
        return found


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.watching", description=__doc__)
    parser.add_argument("--pairs", type=int, default=10, help="windows of each kind (%(default)s)")
    parser.add_argument("--seconds", type=float, default=6.0, help="of a window (%(default)s)")
    parser.add_argument("--train", metavar="FILE", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        train(options.train)
        return
    calls, size = count()
    print(f"one answer of a worker, once a second: {calls:.0f} Python calls, {size} bytes")
    if not options.pairs:
        return
    found = pairs(options.pairs, options.seconds)
    ratios = [opened.rate / closed.rate for closed, opened in found]
    for name, windows in zip(
        ("nobody looks", "a page is open"), zip(*found, strict=True), strict=True
    ):
        rate, agent, workers = (
            statistics.median(getattr(each, what) for each in windows)
            for what in ("rate", "agent", "workers")
        )
        print(
            f"{name}: {rate:.1f} steps/s; rpcrun {agent:.3f} and workers {workers:.3f} processors"
        )
    spread = f"{min(ratios):.3f} to {max(ratios):.3f}"
    print(f"steps a second, open beside closed: {statistics.median(ratios):.3f} ({spread})")


if __name__ == "__main__":
    main()
