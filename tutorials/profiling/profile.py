"""Four ways to see where the time of a distributed step goes, on one small job.

A network is split over two workers; the trainer calls the first, which itself calls the
second. Scanned digits go in, and after a few epochs most are read correctly. Then:

1. ``torch.profiler`` around a step: a span for every call among the trainer's operators;
2. ``rpc.profiling.profile``: besides, what ran for these calls on the other workers;
3. ``rpc.tracing.trace``: every call at both ends, stage by stage, on one clock, as a file
   for chrome://tracing or ui.perfetto.dev, and here as a picture;
4. ``rpc.metrics``: what is always counted, for each method and peer, as a table and in
   the text format that Prometheus reads.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from itertools import groupby, islice, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from tqdm import tqdm

import autograd_dist
import rpc
import rpc.profiling
from optim_dist import DistributedOptimizer
from rpc.observe.trace_records import CallRecord, HandlerRecord
from rpc.tracing import Trace
from tutorials import pictures, taking_part
from tutorials.digits.digits import Digits, load

_STAGES = ("sending", "wire to", "queued", "decoding", "running", "encoding", "wire back",
           "receiving")  # fmt: skip
_MESSAGE = "there and back"


class Features:
    """The convolutions; hands what it finds to the classifier on the next worker."""

    def __init__(self, classifier: rpc.RRef[Classifier]) -> None:
        self._classifier: Any = classifier
        self.layers = nn.Sequential(
            nn.Conv2d(1, 32, kernel_size=3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()
        )

    def read(self, images: Tensor) -> Tensor:
        """Return scores of each image for each digit."""
        scores: Tensor = self._classifier.rpc_sync().classify(self.layers(images))
        return scores

    def parameter_references(self) -> list[rpc.RRef[Tensor]]:
        """References to the weights."""
        return [rpc.RRef(parameter) for parameter in self.layers.parameters()]


class Classifier:
    """Two dense layers."""

    def __init__(self) -> None:
        self.layers = nn.Sequential(nn.Linear(512, 128), nn.ReLU(), nn.Linear(128, 10))

    def classify(self, features: Tensor) -> Tensor:
        """Return scores for each digit."""
        scores: Tensor = self.layers(features)
        return scores

    def parameter_references(self) -> list[rpc.RRef[Tensor]]:
        """References to the weights."""
        return [rpc.RRef(parameter) for parameter in self.layers.parameters()]


class Training:
    """The job that is looked at."""

    def __init__(self, workers: Sequence[str]) -> None:
        classifier: Any = rpc.remote(workers[2], Classifier)
        self._features: Any = rpc.remote(workers[1], Features, (classifier,))
        parameters = self._features.rpc_sync().parameter_references()
        parameters += classifier.rpc_sync().parameter_references()
        self._optimizer = DistributedOptimizer(torch.optim.Adam, parameters, lr=2e-3)

    def step(self, digits: Digits) -> float:
        """Run forward, backward and optimizer once and return the loss."""
        with autograd_dist.context() as context:
            loss = cross_entropy(self._features.rpc_sync().read(digits.images), digits.labels)
            autograd_dist.backward(context, [loss])
            self._optimizer.step(context)
        return loss.item()

    def accuracy(self, digits: Digits) -> float:
        """The share, 0 to 1, that is read correctly."""
        with torch.no_grad():
            predicted = self._features.rpc_sync().read(digits.images).argmax(dim=1)
        right: Tensor = predicted == digits.labels
        return right.float().mean().item()


def stages(call: CallRecord, handler: HandlerRecord, clock: float) -> list[tuple[str, float]]:
    """The time that each stage of a call took, in seconds and in order.

    Args:
        call: as the caller saw it.
        handler: as the callee saw it.
        clock: seconds by which the callee's clock is ahead of the caller's.
    """
    times = [
        call.begun, call.sent, handler.arrived - clock, handler.started - clock,
        handler.running - clock, handler.ran - clock, handler.left - clock, call.replied,
        call.ended,
    ]  # fmt: skip
    return [
        (name, end - start) for name, (start, end) in zip(_STAGES, pairwise(times), strict=True)
    ]


def staged_calls(trace: Trace) -> list[tuple[str, float, list[tuple[str, float]]]]:
    """Name, begin on the common clock and stages of every call in the trace, by begin."""
    handlers = {
        handler.span: (handler, worker) for worker in trace.workers for handler in worker.handlers
    }
    known = {worker.worker: worker.name for worker in trace.workers}
    found = []
    for worker in trace.workers:
        for call in worker.calls:
            handler, callee = handlers.get(call.span, (None, None))
            here = trace.offsets[worker.worker].seconds
            if handler is not None and callee is not None and handler.running and call.replied:
                name = f"{call.name} ({worker.name} -> {callee.name})"
                parts = stages(call, handler, trace.offsets[callee.worker].seconds - here)
            elif call.ended:  # gradients of the backward pass, for which no function runs
                name = f"{call.name} ({worker.name} -> {known[call.to]})"
                parts = [(_MESSAGE, call.ended - call.begun)]
            else:  # it was not answered before the trace ended
                continue
            found.append((name, call.begun - here, parts))
    return sorted(found, key=lambda one: one[1])


def drive(options: argparse.Namespace, workers: Sequence[str]) -> None:
    """Train, then look at one more step in each way; runs on the trainer."""
    training, test = load(options.seed)
    job = Training(workers)
    print(f"features on {workers[1]}, classifier on {workers[2]}, backend {options.backend}")
    for epoch in tqdm(range(1, options.epochs + 1), unit=" epochs", disable=None):
        for part in torch.split(torch.randperm(len(training)), options.batch_size):
            loss = job.step(Digits(training.images[part], training.labels[part]))
        tqdm.write(f"epoch {epoch}: loss {loss:.2f}")
    print(f"final test accuracy: {job.accuracy(test):.1%}", flush=True)

    batch = Digits(training.images[: options.batch_size], training.labels[: options.batch_size])
    show_torch_profile(job, batch)
    show_remote_profile(job, batch)
    show_trace(job, batch, options)
    show_metrics(options)


def show_torch_profile(job: Training, batch: Digits) -> None:
    """Calls among the operators of this worker."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        job.step(batch)
    print("\n1. torch.profiler: calls of the trainer")
    for event in profile.events():
        if event.name.startswith(("rpc_", "to_here")):
            print(f"   {event.time_range.elapsed_us():8.0f} µs  {event.name}")


def show_remote_profile(job: Training, batch: Digits) -> None:
    """Operators that ran on other workers."""
    with rpc.profiling.profile() as profile:  # type: ignore[no-untyped-call]
        job.step(batch)
    remote = [event for event in profile.function_events if event.is_remote]
    remote.sort(key=lambda event: (event.node_id, -event.time_range.elapsed_us()))
    print("\n2. rpc.profiling: the longest of what ran for them elsewhere")
    for _, events in groupby(remote, key=lambda event: event.node_id):
        for event in islice(events, 6):
            call, _, what = event.name.rpartition("#remote_op: ")
            took = event.time_range.elapsed_us()
            print(f"   {took:8.0f} µs  worker {event.node_id}: {what}, for {call}")


def show_trace(job: Training, batch: Digits, options: argparse.Namespace) -> None:
    """All calls at both ends."""
    path = options.output / "trace.json"
    with rpc.tracing.trace(path, operators=True) as trace:
        job.step(batch)
    calls = staged_calls(trace)
    width = max(len(name) for name, _, _ in calls)
    print(f"\n3. rpc.tracing: each call's stages in µs; all of it in {path}")
    print(f"   {'':{width}}  {'  '.join(_STAGES)}")
    for name, _, parts in calls:
        cells = [f"{1e6 * seconds:{len(stage)}.0f}" for stage, seconds in parts]
        print(f"   {name:{width}}  {'  '.join(cells)}{_remark(parts)}")
    _draw(calls, options)


def _remark(parts: Sequence[tuple[str, float]]) -> str:
    return f" {_MESSAGE}" if len(parts) == 1 else ""


def show_metrics(options: argparse.Namespace) -> None:
    """Shows what this worker has counted since it started, though nobody asked it to."""
    metrics = rpc.metrics()
    print("\n4. rpc.metrics: calls of the trainer")
    print("     calls  errors  median µs   99 % µs    bytes out     bytes in  method, peer")
    for row in sorted(metrics.made, key=lambda row: -row.latency.sum):
        errors = sum(row.errors.values())
        median, slowest = (1e6 * row.latency.quantile(share) for share in (0.5, 0.99))
        print(f"   {row.calls:7}  {errors:6}  {median:9.0f}  {slowest:8.0f}  {row.bytes_out:11,}"
              f"  {row.bytes_in:11,}  {row.method}, {row.peer}")  # fmt: skip
    path = options.output / "metrics.prom"
    path.write_text(metrics.to_prometheus())
    print(f"for Prometheus: {path}", flush=True)


def _draw(
    calls: Sequence[tuple[str, float, Sequence[tuple[str, float]]]], options: argparse.Namespace
) -> None:
    drawn = pictures.figure(11, 1.5 + 0.3 * len(calls))
    axes = drawn.subplots()
    origin = calls[0][1]
    colours = {stage: f"C{number}" for number, stage in enumerate((*_STAGES, _MESSAGE))}
    for row, (_, begun, parts) in enumerate(calls):
        at = begun - origin
        for stage, seconds in parts:
            axes.barh(row, 1e3 * seconds, left=1e3 * at, color=colours[stage])
            at += seconds
    for stage, colour in colours.items():
        axes.barh(0, 0, color=colour, label=stage)
    axes.set_yticks(range(len(calls)), [name for name, _, _ in calls], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds")
    axes.legend(ncols=5, fontsize=8, loc="lower left", bbox_to_anchor=(0, 1))
    pictures.save(drawn, options.output / "step.png")


def main() -> int:
    """Read the command line and run."""
    parser = taking_part.parser(
        __doc__, "trainer:1 features:1,service classifier:1,service", output="profiling"
    )
    add = parser.add_argument
    add("--epochs", type=taking_part.positive, default=5, help="before looking (%(default)s)")
    add("--batch-size", type=taking_part.positive, default=64, help="images a step (%(default)s)")
    return taking_part.run(parser.parse_args(), taking_part.Job(drive, fewest=3, most=3))


if __name__ == "__main__":
    sys.exit(main())
