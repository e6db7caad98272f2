"""A parameter server in several processes: each keeps a share of the weights.

``train.py`` keeps the network whole and sends it the images. Here it is the weights that
travel, as in the parameter servers of large systems: no server needs to hold all of
them or to compute, and the traffic is spread. A step of a trainer:

    trainer                                    every server
    ask all at once  ── weights ─────────────▶ copies of its share
    network(images) with what came back
    backward         ── their gradients ─────▶ kept in this step's context
    optimizer.step   ── a few bytes each ────▶ updates its share

The copies are results of calls within an autograd context. So they are ordinary
tensors that need gradients, and backward knows the way from each to its original.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy
from tqdm import tqdm

import autograd_dist
import rpc
from optim_dist import DistributedOptimizer
from tutorials import pictures, taking_part
from tutorials.digits.digits import Digits, load, network


class Shard:
    """Some of the weights, by name. Lives on a server."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self._weights = {name: nn.Parameter(weight) for name, weight in weights.items()}

    def weights(self) -> dict[str, Tensor]:
        """Return copies; autograd remembers of what."""
        return {name: weight.clone() for name, weight in self._weights.items()}

    def parameter_references(self) -> list[rpc.RRef[nn.Parameter]]:
        """Return a reference to each weight, for the trainers' optimizers."""
        return [rpc.RRef(weight) for weight in self._weights.values()]


def divide(weights: Mapping[str, Tensor], shares: int) -> list[dict[str, Tensor]]:
    """Divide weights into shares of similar size: the largest first, always to the smallest."""
    divided: list[dict[str, Tensor]] = [{} for _ in range(shares)]
    for name, weight in sorted(weights.items(), key=lambda item: -item[1].numel()):
        smallest = min(divided, key=lambda share: sum(each.numel() for each in share.values()))
        smallest[name] = weight
    return divided


class ShardedNetwork:
    """A trainer's stand-in for weights: their layout and a reference to each shard."""

    def __init__(self, shards: Sequence[rpc.RRef[Shard]]) -> None:
        self.shards: list[Any] = list(shards)
        self._layout = network().requires_grad_(requires_grad=False).to("meta")

    def __call__(self, images: Tensor) -> Tensor:
        """Return the scores of each image for each digit."""
        under_way = [shard.rpc_async().weights() for shard in self.shards]
        weights: dict[str, Tensor] = {}
        for share in torch.futures.wait_all(under_way):
            weights |= share
        scores: Tensor = functional_call(self._layout, weights, (images,))
        return scores

    def accuracy(self, digits: Digits) -> float:
        """Return the share, 0 to 1, that is read correctly."""
        with torch.no_grad():
            predicted = self(digits.images).argmax(dim=1)
        return (predicted == digits.labels).float().mean().item()


def train(
    shards: Sequence[rpc.RRef[Shard]], digits: Digits, batch_size: int, learning_rate: float
) -> list[float]:
    """Pass once over ``digits`` and return the loss of each step. Runs on a trainer."""
    model = ShardedNetwork(shards)
    references = [shard.rpc_sync().parameter_references() for shard in model.shards]
    optimizer = DistributedOptimizer(
        torch.optim.SGD, [each for some in references for each in some], lr=learning_rate
    )
    losses = []
    for batch in torch.split(torch.randperm(len(digits)), batch_size):
        with autograd_dist.context() as context:
            loss = cross_entropy(model(digits.images[batch]), digits.labels[batch])
            autograd_dist.backward(context, [loss])
            optimizer.step(context)
        losses.append(loss.item())
    return losses


def drive(options: argparse.Namespace, workers: Sequence[str]) -> None:
    """Spread the weights, have the trainers train, and measure; runs on the coordinator."""
    torch.manual_seed(options.seed)
    training, test = load(options.seed)
    shares = divide(dict(network().state_dict()), options.servers)
    servers, trainers = workers[1 : 1 + options.servers], workers[1 + options.servers :]
    shards = [
        rpc.remote(server, Shard, (share,)) for server, share in zip(servers, shares, strict=True)
    ]
    print(f"{len(servers)} servers, {len(trainers)} trainers, backend {options.backend}")
    for server, share in zip(servers, shares, strict=True):
        weights = sum(weight.numel() for weight in share.values())
        print(f"{server} keeps {weights} weights: {', '.join(sorted(share))}", flush=True)
    model = ShardedNetwork(shards)
    accuracies, losses, started = [model.accuracy(test)], list[float](), time.monotonic()
    for epoch in tqdm(range(1, options.epochs + 1), unit=" epochs", disable=None):
        finished: list[torch.futures.Future[list[float]]] = [
            rpc.rpc_async(
                trainer, train,
                (shards, training.shard(index, len(trainers)), options.batch_size, options.rate),
                timeout=0,
            )
            for index, trainer in enumerate(trainers)
        ]  # fmt: skip
        losses += [loss for each in torch.futures.wait_all(finished) for loss in each]
        accuracies.append(model.accuracy(test))
        tqdm.write(f"epoch {epoch}: test accuracy {accuracies[-1]:.1%}")
    print(f"{len(losses)} steps in {time.monotonic() - started:.1f} s")
    print(f"final test accuracy: {accuracies[-1]:.1%}")
    _show_traffic()
    _draw(accuracies, options)


def _show_traffic() -> None:
    """Print what this worker's calls to each server moved; ``rpc`` always counts it."""
    for row in rpc.metrics().made:
        if row.method.endswith("weights"):
            print(f"{row.peer}: {row.calls} times {row.method}, {row.bytes_in // row.calls} bytes")


def _draw(accuracies: Sequence[float], options: argparse.Namespace) -> None:
    drawn = pictures.figure(6, 3.5)
    axes = drawn.subplots()
    axes.plot([100 * accuracy for accuracy in accuracies], "o-")
    axes.set(xlabel="epoch", ylabel="test accuracy, %")
    axes.grid(visible=True, alpha=0.3)
    pictures.save(drawn, options.output / "sharded.png")


def main() -> int:
    """Read the command line and run."""
    roles = "coordinator:1 server:2,service trainer:2,service"
    parser = taking_part.parser(__doc__, roles, output="digits")
    add = parser.add_argument
    add("--servers", type=taking_part.positive, default=2, help="of the workers (%(default)s)")
    add(
        "--epochs", type=taking_part.positive, default=10, help="passes over the data (%(default)s)"
    )
    add("--batch-size", type=taking_part.positive, default=32, help="images per step (%(default)s)")
    add("--rate", type=float, default=0.2, help="of learning (%(default)s)")
    options = parser.parse_args()
    fewest = options.servers + 2
    return taking_part.run(options, taking_part.Job(drive, fewest))


if __name__ == "__main__":
    sys.exit(main())
