"""A convolutional network in stages, each on its own worker, with micro-batches in flight.

A batch that passes through the stages as a whole keeps one of them busy and the others
waiting. Cut into micro-batches, the second stage works on the first while the first
stage works on the second:

    stage1  1 2 3 4 . . . . 4'3'2'1'            1  forward of micro-batch 1
    stage2  . 1 2 3 4 4'3'2'1'. . . .           1' its backward
                                                .  nothing to do: the bubble

No line of this program schedules that. ``remote()`` returns a reference at once, so the
main worker starts every micro-batch's way through all stages and then asks for the
results; a stage that is given a reference fetches what it refers to from the stage before.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from tqdm import tqdm

import autograd_dist
import rpc
from optim_dist import DistributedOptimizer
from rpc.observe.tracing import Trace
from tutorials import launch, pictures
from tutorials.parameter_server.digits import Digits, load

_FORWARD = ("aten::conv2d", "aten::group_norm", "aten::relu")
_BACKWARD = "autograd::engine::evaluate_function"


def layers(width: int) -> list[nn.Module]:
    """The network as a list: nine blocks of a convolution, and what reads off the digit."""
    widths = [1, *[width] * 9]
    blocks: list[nn.Module] = [
        nn.Sequential(
            nn.Conv2d(before, after, kernel_size=3, padding=1),
            nn.GroupNorm(8, after),  # by image: a batch norm would see micro-batches only
            nn.ReLU(),
        )
        for before, after in pairwise(widths)
    ]
    end = nn.Sequential(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(width * 16, 10))
    return [*blocks, end]


class Stage:
    """Some consecutive layers. Lives on its own worker."""

    def __init__(self, number: int, stages: int, width: int, seed: int) -> None:
        torch.manual_seed(seed)
        everything = layers(width)
        first, end = (len(everything) * edge // stages for edge in (number, number + 1))
        self.layers = nn.Sequential(*everything[first:end])
        self._turn = threading.Lock()

    def forward(self, micro_batch: rpc.RRef[Tensor]) -> Tensor:
        """Take a reference, return a value: data moves only from one stage to the next."""
        images = micro_batch.to_here()
        # One at a time: the next stage gets the first sooner than if all shared this core.
        with self._turn:
            result: Tensor = self.layers(images)
        return result

    def parameter_references(self) -> list[rpc.RRef[Tensor]]:
        """References to this stage's weights."""
        return [rpc.RRef(parameter) for parameter in self.layers.parameters()]


class Pipeline:
    """What the main worker holds: a reference to each stage."""

    def __init__(self, workers: Sequence[str], width: int, seed: int) -> None:
        self.stages: list[Any] = [
            rpc.remote(worker, Stage, (number, len(workers), width, seed))
            for number, worker in enumerate(workers)
        ]
        parameters = [each.rpc_async().parameter_references() for each in self.stages]
        self._optimizer = DistributedOptimizer(
            torch.optim.Adam,
            [weight for some in torch.futures.wait_all(parameters) for weight in some],
            lr=2e-3,
        )

    def forward(self, images: Tensor, micro_batches: int) -> Tensor:
        """Start all micro-batches on their way, then wait for all."""
        results = []
        for part in images.chunk(micro_batches):
            passed_on = rpc.RRef(part)
            for stage in self.stages[:-1]:
                passed_on = stage.remote().forward(passed_on)
            results.append(self.stages[-1].rpc_async().forward(passed_on))
        return torch.cat(torch.futures.wait_all(results))

    def step(self, batch: Digits, micro_batches: int) -> float:
        """Run forward, backward and optimizer on one batch and return the loss."""
        with autograd_dist.context() as context:
            loss = cross_entropy(self.forward(batch.images, micro_batches), batch.labels)
            autograd_dist.backward(context, [loss])
            self._optimizer.step(context)
        return loss.item()

    def accuracy(self, digits: Digits) -> float:
        """The share, 0 to 1, that is read correctly."""
        with torch.no_grad():
            predicted = self.forward(digits.images, micro_batches=4).argmax(dim=1)
        return (predicted == digits.labels).float().mean().item()


def batches(digits: Digits, size: int) -> Iterable[Digits]:
    """Go through the digits in random order; an incomplete last batch is left out."""
    for chosen in torch.split(torch.randperm(len(digits)), size):
        if len(chosen) == size:
            yield Digits(digits.images[chosen], digits.labels[chosen])


def compare(
    pipeline: Pipeline, batch: Digits, counts: Sequence[int], rounds: int
) -> dict[int, float]:
    """Seconds per step for each number of micro-batches, the median of interleaved rounds."""
    seconds: dict[int, list[float]] = {count: [] for count in counts}
    for _ in tqdm(range(rounds), unit=" rounds", disable=None):
        for count in counts:
            started = time.perf_counter()
            pipeline.step(batch, count)
            seconds[count].append(time.perf_counter() - started)
    return {count: statistics.median(values) for count, values in seconds.items()}


def names(workers: int) -> list[str]:
    """The main worker, and a worker for each stage, from 1."""
    return ["main", *(f"stage{number}" for number in range(1, workers))]


def drive(options: argparse.Namespace, workers: Sequence[str]) -> None:
    """Train, then measure and draw; runs on the main worker."""
    training, test = load(options.seed)
    pipeline = Pipeline(workers[1:], options.width, options.seed)
    print(f"{len(pipeline.stages)} stages, batches of {options.batch_size}, "
          f"backend {options.backend}", flush=True)  # fmt: skip
    for epoch in tqdm(range(1, options.epochs + 1), unit=" epochs", disable=None):
        for batch in batches(training, options.batch_size):
            loss = pipeline.step(batch, options.micro_batches)
        tqdm.write(f"epoch {epoch}: loss {loss:.3f}, test accuracy {pipeline.accuracy(test):.1%}")
    print(f"final test accuracy: {pipeline.accuracy(test):.1%}", flush=True)

    batch = next(iter(batches(training, options.batch_size)))
    counts = [count for count in (1, 2, 4, 8, 16) if count <= options.batch_size]
    medians = compare(pipeline, batch, counts, options.rounds)
    for count, seconds in medians.items():
        print(f"{count:2} micro-batches: {1000 * seconds:.0f} ms a step, "
              f"speed-up {medians[1] / seconds:.2f}")  # fmt: skip
    _draw_steps(pipeline, batch, (1, options.micro_batches), options)


def _draw_steps(
    pipeline: Pipeline, batch: Digits, counts: Sequence[int], options: argparse.Namespace
) -> None:
    """Trace one step with each number of micro-batches and draw them to the same scale."""
    with rpc.tracing.trace(operators=True):  # what records operators sets itself up, only once
        pipeline.step(batch, counts[0])
    drawn = pictures.figure(10, 2.0 + 0.5 * len(counts) * len(pipeline.stages))
    charts = drawn.subplots(len(counts), 1, sharex=True)
    for chart, count in zip(charts, counts, strict=True):
        path = options.output / f"trace_{count}.json"
        with rpc.tracing.trace(path, operators=True) as trace:
            pipeline.step(batch, count)
        idle = _draw_step(chart, trace, count)
        print(f"{count} micro-batches: stages idle {idle:.0%} of the step; trace: {path}")
    charts[-1].set_xlabel("milliseconds")
    pictures.save(drawn, options.output / "bubble.png")


def _draw_step(chart: Any, trace: Trace, count: int) -> float:
    """Draw when stages computed; return the share of time they did not."""
    stages = sorted((each for each in trace.workers if each.name != "main"), key=lambda w: w.name)
    spans = [
        (row, operator.name.startswith(_BACKWARD),
         operator.began - trace.offsets[stage.worker].seconds, operator.ended - operator.began)
        for row, stage in enumerate(stages)
        for operator in stage.operators
        if operator.name in _FORWARD or operator.name.startswith(_BACKWARD)
    ]  # fmt: skip
    start = min(began for _, _, began, _ in spans)
    end = max(began + lasted for _, _, began, lasted in spans)
    for row, backward, began, lasted in spans:
        colour = "tab:orange" if backward else "tab:blue"
        chart.broken_barh([((began - start) * 1e3, lasted * 1e3)], (row - 0.4, 0.8), color=colour)
    chart.set_yticks(range(len(stages)), [stage.name for stage in stages])
    chart.invert_yaxis()
    chart.set_title(f"{count} micro-batches: forward blue, backward orange", fontsize=9)
    busy = sum(
        _covered([span[2:] for span in spans if span[0] == row]) for row in range(len(stages))
    )
    return 1 - busy / ((end - start) * len(stages))


def _covered(spans: Iterable[tuple[float, float]]) -> float:
    """Seconds that lie in at least one of some spans, each given by its start and length."""
    covered, until = 0.0, 0.0
    for began, lasted in sorted(spans):
        covered += max(0.0, began + lasted - max(began, until))
        until = max(until, began + lasted)
    return covered


def main() -> int:
    """Read the command line and run."""
    parser = launch.parser(__doc__, workers=3, output="pipeline")
    add = parser.add_argument
    add("--epochs", type=launch.positive, default=6, help="passes over the data (%(default)s)")
    add("--batch-size", type=launch.positive, default=128, help="images a step (%(default)s)")
    add("--micro-batches", type=launch.positive, default=8, help="of a batch (%(default)s)")
    add("--width", type=launch.positive, default=64, help="channels (%(default)s)")
    add("--rounds", type=launch.positive, default=6, help="of measuring (%(default)s)")
    return launch.run(parser.parse_args(), launch.Job(names, drive, fewest=3))


if __name__ == "__main__":
    sys.exit(main())
