"""Trains a digit classifier that one server owns, and any number of trainers teach.

    rpcrun --standalone --role server:1 --role trainer:2,service -m tutorials.digits.train

The server owns the network. Each trainer owns a shard of the data and a reference to the
server; weights never travel, only activations, gradients and references do. One training
step of a trainer:

    trainer                                     server
    images  ── forward, by RPC ───────────────▶ network(images)
    scores  ◀────────────────────────────────── (autograd remembers the way)
    loss.backward ── gradient of the scores ──▶ gradients of the weights, kept
                                                in this step's context
    optimizer.step ── a few bytes ────────────▶ weights updated where they live
    report  ── loss ──────────────────────────▶ progress bar, history

Trainers do not wait for each other. What keeps them apart is the autograd
context: each step has its own, and gradients accumulate in it, not in ``.grad``.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.parametrize import register_parametrization

import autograd_dist
import rpc
from optim_dist import DistributedOptimizer
from tutorials import taking_part
from tutorials.digits.digits import Digits, load, network
from tutorials.digits.report import History, Progress


@dataclass(frozen=True, slots=True)
class Settings:
    """All that a run can be told. It travels to the trainers with their first call."""

    epochs: int
    batch_size: int
    learning_rate: float
    seed: int


class ParameterServer:
    """Lives on the server; its methods are called by trainers, several at a time."""

    def __init__(self, settings: Settings) -> None:
        torch.manual_seed(settings.seed)
        self.training, self._test = load(settings.seed)
        self._network = _computing_with_copies(network())
        self._samples_per_epoch = len(self.training)
        self._progress = Progress(settings.epochs * self._samples_per_epoch)
        self._history_lock = threading.Lock()
        self._history = History()
        self._samples = 0

    def forward(self, images: Tensor) -> Tensor:
        """Return the scores of each image for each digit."""
        scores: Tensor = self._network(images)
        return scores

    def parameter_references(self) -> list[rpc.RRef[Tensor]]:
        """Return one reference per weight tensor, for the trainers' optimizers."""
        return [rpc.RRef(weight) for weight in self._network.parameters()]

    def report(self, trainer: str, loss: float, samples: int) -> None:
        """Note one step of a trainer; measure the accuracy whenever an epoch is full."""
        with self._history_lock:
            epochs_before = self._samples // self._samples_per_epoch
            self._samples += samples
            self._history.add_loss(trainer, loss)
            epoch = self._samples // self._samples_per_epoch
        self._progress.advance(samples, loss)
        if epoch > epochs_before:
            self._finish_epoch(epoch)

    def accuracy(self) -> float:
        """Return the share of the test set, 0 to 1, that the network reads correctly."""
        with torch.no_grad():
            predicted = self.forward(self._test.images).argmax(dim=1)
        return (predicted == self._test.labels).float().mean().item()

    def finish(self) -> History:
        """Close the progress bar and return everything that was noted."""
        self._progress.close()
        return self._history

    def _finish_epoch(self, epoch: int) -> None:
        accuracy = self.accuracy()
        with self._history_lock:
            self._history.add_accuracy(epoch, accuracy)
        self._progress.note(f"epoch {epoch}: test accuracy {accuracy:.1%}")


class _Copy(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.clone()


def _computing_with_copies(network: nn.Module) -> nn.Module:
    """Let each forward pass read copies of the weights; gradients still reach the originals.

    Another trainer may step between a forward pass and its backward pass, and
    autograd rightly refuses to go back through weights that changed meanwhile.
    """
    for module in list(network.modules()):
        for name, _ in list(module.named_parameters(recurse=False)):
            register_parametrization(module, name, _Copy())
    return network


def train(server: rpc.RRef[ParameterServer], shard: Digits, settings: Settings) -> None:
    """Train on ``shard``. Runs on a trainer, called by the server."""
    me = rpc.get_worker_info()
    torch.manual_seed(settings.seed + me.id)
    trainer = Trainer(server, settings.learning_rate)
    reports: list[torch.futures.Future[None]] = []
    for _ in range(settings.epochs):
        for batch in torch.split(torch.randperm(len(shard)), settings.batch_size):
            loss = trainer.step(shard.images[batch], shard.labels[batch])
            # Reporting must not slow training down: send it, and look at the answer later.
            reports.append(server.rpc_async().report(me.name, loss, len(batch)))
        torch.futures.wait_all(reports)
        reports.clear()


class Trainer:
    """One trainer's side of a step: a reference to the server, and an optimizer there."""

    def __init__(self, server: rpc.RRef[ParameterServer], learning_rate: float) -> None:
        self._server: Any = server  # the methods of its proxies are the server's own
        weights = self._server.rpc_sync().parameter_references()
        # The optimizer's state, here the momentum, lives beside the weights, on the server.
        self._optimizer = DistributedOptimizer(
            torch.optim.SGD, weights, lr=learning_rate, momentum=0.9
        )

    def step(self, images: Tensor, labels: Tensor) -> float:
        """Run forward, backward and optimizer once and return the loss."""
        with autograd_dist.context() as context:
            scores = self._server.rpc_sync().forward(images)
            loss = cross_entropy(scores, labels)
            autograd_dist.backward(context, [loss])
            self._optimizer.step(context)
        return loss.item()


def drive(options: argparse.Namespace, workers: Sequence[str]) -> None:
    """Have the trainers train, and measure; runs on the server."""
    trainers = workers[1:]
    print(f"1 server, {len(trainers)} trainers, backend {options.backend}", flush=True)
    settings = Settings(options.epochs, options.batch_size, options.learning_rate, options.seed)
    server, started = ParameterServer(settings), time.monotonic()
    reference = rpc.RRef(server)
    finished: list[torch.futures.Future[None]] = [
        rpc.rpc_async(
            trainer,
            train,
            args=(reference, server.training.shard(index, len(trainers)), settings),
            timeout=0,  # no limit: this one call lasts as long as the training
        )
        for index, trainer in enumerate(trainers)
    ]
    torch.futures.wait_all(finished)
    history, seconds = server.finish(), time.monotonic() - started
    steps = sum(len(losses) for losses in history.losses.values())
    print(f"{steps} steps in {seconds:.1f} s, {steps / seconds:.0f} steps per second")
    print(f"final test accuracy: {server.accuracy():.1%}")
    from tutorials.digits.picture import draw  # only the server loads the plotting library

    draw(history, options.output / "curves.png")


def main() -> int:
    """Read the command line and run."""
    parser = taking_part.parser(__doc__, "server:1 trainer:2,service", output="digits")
    add = parser.add_argument
    add(
        "--epochs", type=taking_part.positive, default=20, help="passes over the data (%(default)s)"
    )
    add("--batch-size", type=taking_part.positive, default=32, help="images per step (%(default)s)")
    add("--learning-rate", type=float, default=0.05, help="step size (%(default)s)")
    return taking_part.run(parser.parse_args(), taking_part.Job(drive, fewest=2))


if __name__ == "__main__":
    sys.exit(main())
