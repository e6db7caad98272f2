"""The distributed part: what the parameter server offers, and what a trainer does with it.

Read this file first. The server owns the network. Each trainer owns a shard of
the data and a reference to the server; weights never travel, only activations,
gradients and references do. One training step of a trainer:

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

import threading
from dataclasses import dataclass
from typing import Any

import torch
from digits import Digits, load, network
from report import History, Progress
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.parametrize import register_parametrization

import autograd_dist
import rpc
from optim_dist import DistributedOptimizer

SERVER = "server"
_over = threading.Event()  # on the server: the job is done


@dataclass(frozen=True, slots=True)
class Settings:
    """All that a run can be told. It travels to the trainers with their first call."""

    trainers: int
    epochs: int
    batch_size: int
    learning_rate: float
    seed: int


def trainer_name(index: int) -> str:
    """Return the name of trainer number ``index``, counted from 1."""
    return f"trainer{index}"


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


def train(server: rpc.RRef[ParameterServer], index: int, shard: Digits, settings: Settings) -> None:
    """Train on ``shard``. Runs on a trainer, called by the server."""
    torch.manual_seed(settings.seed + index)
    trainer = Trainer(server, settings.learning_rate)
    reports: list[torch.futures.Future[None]] = []
    for _ in range(settings.epochs):
        for batch in torch.split(torch.randperm(len(shard)), settings.batch_size):
            loss = trainer.step(shard.images[batch], shard.labels[batch])
            # Reporting must not slow training down: send it, and look at the answer later.
            reports.append(server.rpc_async().report(trainer_name(index), loss, len(batch)))
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


def serve_and_drive(settings: Settings) -> tuple[History, float]:
    """Run the whole job from the server: start every trainer, wait, and measure.

    Returns:
        What was noted on the way, and the final accuracy on the test set, 0 to 1.

    Raises:
        RuntimeError: as soon as one trainer fails or is lost; the message names it.
    """
    server = ParameterServer(settings)
    reference = rpc.RRef(server)
    finished: list[torch.futures.Future[None]] = [
        rpc.rpc_async(
            trainer_name(index + 1),
            train,
            args=(reference, index + 1, server.training.shard(index, settings.trainers), settings),
            timeout=0,  # no limit: this one call lasts as long as the training
        )
        for index in range(settings.trainers)
    ]
    torch.futures.wait_all(finished)
    _over.set()
    return server.finish(), server.accuracy()


def wait_until_over() -> None:
    """Runs on the server, called by each trainer's main thread.

    Everything a trainer does is done for calls from the server. This call of its
    own is how it learns that the server was lost.
    """
    _over.wait()
