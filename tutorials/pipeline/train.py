"""A language model in stages, each on its own worker, with micro-batches in flight.

A batch that passes through the stages as a whole keeps one of them busy and the others
waiting. Cut into micro-batches, the second stage works on the first while the first
stage works on the second:

    stage1  1 2 3 4 . . . . 4'3'2'1'            1  forward of micro-batch 1
    stage2  . 1 2 3 4 4'3'2'1'. . . .           1' its backward
                                                .  nothing to do: the bubble

``Pipeline.split`` cuts the model, ``train_step`` runs a schedule such as this one. Each
worker knows its row of the table and sends what comes of it to whoever needs it; the main
worker only says that a step begins.

With ``--kill`` the last stage's worker is killed on the way. Each stage has a backup in another
worker's memory then, and the losses are those of a run in which nobody dies.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import signal
import statistics
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

import rpc
from tensorwire import checkpoint
from tensorwire.pipeline import Pipeline
from tutorials import pictures, taking_part
from tutorials.getting_started.language_model import ALPHABET, Corpus, load
from tutorials.pipeline.model import beginnings, loss, transformer

_STAGES_PER_WORKER = {"interleaved": 2, "looped_bfs": 2}
_COMPARED = ("gpipe", "1f1b", "zb-h1", "interleaved")
SAVED_EVERY = 100
_Batch = tuple[int, Tensor]
"""The number of a step, and its texts with what follows each character."""


def make_pipeline(
    model: nn.Sequential,
    workers: Sequence[str],
    schedule: str,
    microbatches: int,
    length: int,
    backups: int = 0,
) -> Pipeline:
    """Cut the model into stages, in turn on the workers."""
    homes = [*workers] * _STAGES_PER_WORKER.get(schedule, 1)
    return Pipeline.split(
        model,
        at=beginnings(model, len(homes)),
        workers=homes,
        example=torch.zeros(1, length, dtype=torch.long),
        schedule=schedule,
        microbatches=microbatches,
        loss=loss,
        backups=backups,
    )


def batches(corpus: Corpus, first: int, options: argparse.Namespace) -> Iterator[_Batch]:
    """Steps from ``first`` on, each with its excerpts, which depend on the step alone."""
    for step in range(first, options.steps):
        torch.manual_seed(options.seed * 1_000_003 + step)
        yield step, torch.stack(corpus.batch(options.batch_size, options.length)).transpose(1, 2)


def train(pipe: Pipeline, corpus: Corpus, options: argparse.Namespace) -> list[float]:
    """Train from the latest checkpoint on, if ``--resume`` says so; return bits per character."""
    optimizer = pipe.optimizer(torch.optim.AdamW, lr=2e-3, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps)
    state: dict[str, Any] = {
        "model": pipe,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "bits": [],
    }
    first = 0
    if not options.resume:  # an earlier training's would be in the way, or be taken for this one's
        shutil.rmtree(options.output / "checkpoints", ignore_errors=True)
    saved = checkpoint.latest(options.output / "checkpoints") if options.resume else None
    if saved is not None:
        state = checkpoint.load(saved, state)
        first = state["step"]
        print(f"goes on from {saved.path}", flush=True)
    bits: list[float] = state["bits"]
    shown = pipe.progress(batches(corpus, first, options), count=_characters, disable=None)
    for step, (text, following) in shown:
        bits.append(pipe.train_step(text, target=following).item() / math.log(2))
        pipe.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        if options.kill and step == options.steps // 2:
            kill(pipe.workers[-1])
        if (done := step + 1) % SAVED_EVERY == 0 or done == options.steps:
            checkpoint.save(options.output / "checkpoints" / str(done),
                            {**state, "step": done}, keep=2)  # fmt: skip
            recent = bits[-SAVED_EVERY:]
            tqdm.write(f"step {done}: {statistics.fmean(recent):.2f} bits per character")
    return bits


def kill(worker: str) -> None:
    """Have a worker die in a moment, most likely in the middle of a step."""
    tqdm.write(f"{worker} is killed")
    rpc.rpc_sync(worker, _die_soon)


def _die_soon() -> None:
    threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGKILL)).start()


def _characters(batch: _Batch) -> int:
    return batch[1][0].numel()


def unseen_bits(pipe: Pipeline, corpus: Corpus, length: int) -> float:
    """Bits per character of text that was held out, which streams through the pipe."""
    excerpts = corpus.held_out[: 64 * (length + 1)].view(-1, length + 1)
    parts = excerpts.chunk(8)
    found = pipe.stream(part[:, :-1] for part in parts)
    losses = [loss(scores, part[:, 1:]) for scores, part in zip(found, parts, strict=True)]
    return torch.stack(losses).mean().item() / math.log(2)


def write(pipe: Pipeline, beginning: str, count: int, length: int) -> str:
    """Go on after ``beginning``, one character at a time, drawn from the predictions."""
    codes = [ALPHABET.index(each) for each in beginning]
    for _ in range(count):
        (scores,) = pipe.eval_step([torch.tensor([codes[-length:]])])
        codes.append(int(torch.multinomial((scores[0, -1] / 0.6).softmax(0), 1)))
    return "".join(ALPHABET[code] for code in codes).replace("\t", "    ")


def compare(
    model: nn.Sequential, workers: Sequence[str], corpus: Corpus, options: argparse.Namespace
) -> None:
    """Measure and draw a step of each schedule, and one of a whole batch."""
    cases = [("gpipe", 1), *((schedule, options.micro_batches) for schedule in _COMPARED)]
    drawn = pictures.figure(9, 0.8 + (0.6 + 0.4 * len(workers)) * len(cases))
    charts = drawn.subplots(len(cases), 1, sharex=True)
    text, following = next(batches(corpus, 0, options))[1]
    pipes = [make_pipeline(model, workers, each, n, options.length) for each, n in cases]
    seconds: list[list[float]] = [[] for _ in cases]
    for _ in range(options.rounds):
        for pipe, own in zip(pipes, seconds, strict=True):
            began = time.perf_counter()
            pipe.train_step(text, target=following)
            own.append(time.perf_counter() - began)
    for (schedule, count), pipe, own, chart in zip(cases, pipes, seconds, charts, strict=True):
        pipe.train_step(text, target=following)
        trace = pipe.trace()
        assert trace is not None, "a step was done"
        trace.draw(chart, f"{schedule}, {count} micro-batch{'es' if count > 1 else ''}")
        chart.set_xlabel("")
        milliseconds = statistics.median(own) * 1e3
        print(f"{schedule}, {count} micro-batch{'es' if count > 1 else ''}: {milliseconds:.0f} ms "
              f"a step; idle {trace.bubble:.0%}, by the schedule {trace.theory().idle:.0%}; "
              f"at most {max(pipe.most_held.values())} held", flush=True)  # fmt: skip
        pipe.close()
    charts[-1].set_xlabel("milliseconds")
    pictures.save(drawn, options.output / "schedules.png")


def drive(options: argparse.Namespace, workers: Sequence[str]) -> None:
    """Train, then measure and draw; runs on the main worker."""
    corpus = load()
    torch.manual_seed(options.seed)
    model = transformer(len(ALPHABET), options.length, options.width, options.blocks)
    with make_pipeline(
        model, workers[1:], options.schedule, options.micro_batches, options.length,
        int(options.kill),
    ) as pipe:  # fmt: skip
        print(f"{len(pipe.stages)} stages, schedule {options.schedule}, "
              f"{sum(each.numel() for each in model.parameters()):,} parameters, "
              f"backend {options.backend}", flush=True)  # fmt: skip
        bits = train(pipe, corpus, options)
        print(f"held-out text: {unseen_bits(pipe, corpus, options.length):.2f} bits per character; "
              f"{corpus.bits_without_context():.2f} if one knows only how frequent each character "
              "is")  # fmt: skip
        written = write(pipe, "\n\tdef ", options.written, options.length)
        print(f"--- written by the model{written}\n---", flush=True)
    _draw_loss(bits, options)
    compare(model, workers[1:], corpus, options)


def _draw_loss(bits: Sequence[float], options: argparse.Namespace) -> None:
    drawn = pictures.figure(7, 3.5)
    axes = drawn.subplots()
    axes.plot(bits, linewidth=0.8)
    if options.kill:
        axes.axvline(options.steps // 2, color="tab:red", linewidth=0.8, label="a stage is killed")
        axes.legend()
    axes.set(xlabel="step", ylabel="bits per character")
    pictures.save(drawn, options.output / "loss.png")


def main() -> int:
    """Read the command line and run."""
    parser = taking_part.parser(__doc__, "main:1 stage:2,service", output="pipeline")
    add = parser.add_argument
    add("--schedule", choices=(*_COMPARED, "looped_bfs"), default="1f1b", help="(%(default)s)")
    add("--steps", type=taking_part.positive, default=400, help="of training (%(default)s)")
    add("--batch-size", type=taking_part.positive, default=32, help="excerpts a step (%(default)s)")
    add("--micro-batches", type=taking_part.positive, default=8, help="of a batch (%(default)s)")
    add("--length", type=taking_part.positive, default=64, help="of an excerpt (%(default)s)")
    add("--width", type=taking_part.positive, default=128, help="of the vectors (%(default)s)")
    add("--blocks", type=taking_part.positive, default=4, help="of the transformer (%(default)s)")
    add("--rounds", type=taking_part.positive, default=6, help="of measuring (%(default)s)")
    add("--written", type=taking_part.positive, default=300, help="characters (%(default)s)")
    add("--kill", action="store_true", help="kill the last stage's worker on the way")
    add("--resume", action="store_true", help="go on from the latest checkpoint in --output")
    return taking_part.run(parser.parse_args(), taking_part.Job(drive, fewest=3))


if __name__ == "__main__":
    sys.exit(main())
