"""A parameter server that waits for all trainers' gradients and updates once.

Every trainer computes gradients with the same weights, sends them, and gets new weights
back. The server can deal with them in two ways:

* ``update``: each trainer's gradients are a step of their own;
* ``update_in_batch``: add the gradients to a sum and return a *future*. The last trainer
  to come makes one step with the mean and completes it, which sends the new weights to all.
  No thread waits meanwhile: that is what ``rpc.functions.async_execution`` is for.

Fewer steps are less work for the server; and all trainers always hold the same weights, as
if one process had trained on the whole batch.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from tqdm import tqdm

import rpc
from tutorials import taking_part
from tutorials.batching import report
from tutorials.digits.digits import Digits, load

_WAYS = ("update", "update_in_batch")


def network(width: int) -> nn.Module:
    """A classifier with two wide hidden layers: much to update, little to compute."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(),
        nn.Linear(width, 10),
    )  # fmt: skip


class ParameterServer:
    """Owns the weights, and an optimizer that has two numbers to keep for each."""

    def __init__(self, trainers: int, width: int, seed: int) -> None:
        torch.manual_seed(seed)
        self._network = network(width)
        self._optimizer = torch.optim.Adam(self._network.parameters(), lr=1e-3)
        self._trainers = trainers
        self._lock = threading.Lock()
        self._sum: Tensor | None = None
        self._came = 0
        self._updated: torch.futures.Future[Tensor] = torch.futures.Future()
        self.steps = 0

    def weights(self) -> Tensor:
        """Return all weights as one vector."""
        return parameters_to_vector(self._network.parameters()).detach()

    def update(self, gradient: Tensor) -> Tensor:
        """Step with one trainer's gradient and return the new weights."""
        with self._lock:
            return self._step(gradient)

    @rpc.functions.async_execution
    def update_in_batch(self, gradient: Tensor) -> torch.futures.Future[Tensor]:
        """Step with the mean of all trainers' gradients, once they are here."""
        with self._lock:
            self._sum = gradient.clone() if self._sum is None else self._sum.add_(gradient)
            self._came += 1
            updated = self._updated
            if self._came < self._trainers:
                return updated
            weights = self._step(self._sum / self._trainers)
            self._sum, self._came, self._updated = None, 0, torch.futures.Future()
        updated.set_result(weights)  # and all the replies are on their way
        return updated

    def accuracy(self, digits: Digits) -> float:
        """Return the share, 0 to 1, that is read correctly."""
        with torch.no_grad():
            predicted = self._network(digits.images).argmax(dim=1)
        right: Tensor = predicted == digits.labels
        return right.float().mean().item()

    def _step(self, gradient: Tensor) -> Tensor:
        start = 0
        for parameter in self._network.parameters():
            end = start + parameter.numel()
            parameter.grad = gradient[start:end].view_as(parameter)
            start = end
        self._optimizer.step()
        self.steps += 1
        return self.weights()


class Trainer:
    """Computes gradients from its share of the digits. Lives on its own worker."""

    def __init__(self, digits: Digits, width: int) -> None:
        self._digits = digits
        self._network = network(width)

    def train(self, server: rpc.RRef[ParameterServer], way: str, steps: int, size: int) -> float:
        """Make that many steps and return the last loss."""
        any_server: Any = server
        weights = any_server.rpc_sync().weights()
        for _ in range(steps):
            vector_to_parameters(weights, self._network.parameters())
            chosen = torch.randint(len(self._digits), (size,))
            scores = self._network(self._digits.images[chosen])
            loss = cross_entropy(scores, self._digits.labels[chosen])
            gradients = torch.autograd.grad(loss, list(self._network.parameters()))
            gradient = torch.cat([each.flatten() for each in gradients])
            weights = getattr(any_server.rpc_sync(), way)(gradient)
        return loss.item()


def drive(options: argparse.Namespace, workers: Sequence[str]) -> None:
    """Train one network each way, in turn, and compare; runs on the server."""
    count = len(workers) - 1
    training, test = load(options.seed)
    trainers: list[Any] = [
        rpc.remote(worker, Trainer, (training.shard(index, count), options.width))
        for index, worker in enumerate(workers[1:])
    ]
    servers = {way: ParameterServer(count, options.width, options.seed) for way in _WAYS}
    rates: dict[str, list[float]] = {way: [] for way in _WAYS}
    print(f"1 server, {count} trainers, {len(servers['update'].weights()):,} weights, backend "
          f"{options.backend}", flush=True)  # fmt: skip
    for _ in tqdm(range(options.rounds), unit=" rounds", disable=None):
        for way, server in servers.items():
            reference = rpc.RRef(server)
            started = time.perf_counter()
            work = (reference, way, options.steps, options.batch_size)
            torch.futures.wait_all([each.rpc_async(timeout=0).train(*work) for each in trainers])
            gradients = options.steps * count
            rates[way].append(gradients / (time.perf_counter() - started))
    for way, server in servers.items():
        print(f"{way}: {statistics.median(rates[way]):.0f} gradients a second, {server.steps} "
              f"steps, final test accuracy {server.accuracy(test):.1%}")  # fmt: skip
    report.show_ratio(rates, "gradients a second", options.output / "updates.png")


def main() -> int:
    """Read the command line and run."""
    parser = taking_part.parser(__doc__, "server:1 trainer:4,service", output="batching")
    add = parser.add_argument
    add("--steps", type=taking_part.positive, default=20, help="of a trainer a round (%(default)s)")
    add("--rounds", type=taking_part.positive, default=5, help="of measuring (%(default)s)")
    add("--batch-size", type=taking_part.positive, default=8, help="per trainer (%(default)s)")
    add("--width", type=taking_part.positive, default=1024, help="of the network (%(default)s)")
    return taking_part.run(parser.parse_args(), taking_part.Job(drive, fewest=2))


if __name__ == "__main__":
    sys.exit(main())
