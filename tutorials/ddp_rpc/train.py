"""Dense layers replicated among trainers, one large embedding table on a server.

The model reads a few lines of Python and tells which package of the standard library
they are from. It has two parts that want to be distributed in different ways:

* a table with a vector for each of 50 000 words: too large to copy, and a step touches
  few of its rows. It lives on the server, as a ``RemoteModule`` (model parallel);
* two dense layers: small, and every step touches all of them. Each trainer has a copy,
  kept equal by ``DistributedDataParallel`` (data parallel).

One autograd context spans both. Its backward pass averages the dense gradients among the
trainers, as DDP always does, and carries the table's to the server. Before training, one
step's gradients are compared with those of a single process that has the whole model.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import sysconfig
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import TCPStore
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

import autograd_dist
import rpc
from optim_dist import DistributedOptimizer
from remote_module import RemoteModule
from tutorials import pictures, taking_part

SERVER = "server:0"
_ROWS = 50_000
_WIDTH = 64
_LINES = 8
_PACKAGES = ("asyncio", "concurrent", "ctypes", "email", "html", "http", "importlib", "json",
             "logging", "multiprocessing", "sqlite3", "unittest", "urllib", "xml")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Snippets:
    """Excerpts of a few lines as bags of words.

    Args:
        words: rows of the table, of one excerpt after another, shape ``(all words,)``.
        starts: where each excerpt begins in ``words``, shape ``(excerpts,)``.
        labels: number of each excerpt's package, shape ``(excerpts,)``.
    """

    words: Tensor
    starts: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, chosen: Tensor) -> Snippets:
        """The excerpts with these numbers."""
        ends = torch.cat([self.starts[1:], torch.tensor([len(self.words)])])
        bags = [self.words[self.starts[each] : ends[each]] for each in chosen.tolist()]
        return _together(bags, self.labels[chosen])


@dataclass(frozen=True, slots=True)
class Task:
    """The task that a trainer is told with its first call."""

    index: int
    trainers: int
    host: str
    port: int
    seed: int


def load(packages: Sequence[str], seed: int) -> tuple[Snippets, Snippets]:
    """Cut the packages' sources into excerpts; return a training and a test set."""
    library = Path(sysconfig.get_paths()["stdlib"])
    bags, labels = [], []
    for label, package in enumerate(packages):
        for path in sorted((library / package).rglob("*.py")):
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
            for start in range(0, len(lines) - _LINES, _LINES):
                words = re.findall(r"\w+", " ".join(lines[start : start + _LINES]))
                if words:
                    bags.append(torch.tensor([zlib.crc32(w.encode()) % _ROWS for w in words]))
                    labels.append(label)
    everything = _together(bags, torch.tensor(labels))
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    test, training = order.tensor_split([len(order) // 10])
    return everything.take(training), everything.take(test)


def available_packages() -> list[str]:
    """Those of the packages that this Python came with."""
    library = Path(sysconfig.get_paths()["stdlib"])
    return [name for name in _PACKAGES if (library / name).is_dir()]


def _together(bags: Sequence[Tensor], labels: Tensor) -> Snippets:
    lengths = torch.tensor([0, *(len(bag) for bag in bags[:-1])])
    return Snippets(torch.cat(list(bags)), lengths.cumsum(dim=0), labels)


def dense_layers(classes: int) -> nn.Module:
    """The layers that every trainer has a copy of."""
    return nn.Sequential(nn.ReLU(), nn.Linear(_WIDTH, 64), nn.ReLU(), nn.Linear(64, classes))


class Trainer:
    """One trainer: a copy of the dense layers, and a handle on the table. Made by the server."""

    def __init__(self, task: Task, table: RemoteModule, classes: int) -> None:
        store = TCPStore(task.host, task.port, is_master=False)
        # Among the trainers only; the server has no part in averaging dense gradients.
        torch.distributed.init_process_group(
            "gloo", store=store, rank=task.index, world_size=task.trainers
        )
        torch.manual_seed(task.seed)  # DDP copies the first trainer's weights anyway
        self._table = table
        self._dense = DistributedDataParallel(dense_layers(classes))
        dense = [rpc.RRef(parameter) for parameter in self._dense.parameters()]
        self._optimizer = DistributedOptimizer(
            torch.optim.Adagrad, [*table.remote_parameters(), *dense], lr=0.05
        )

    def forward(self, snippets: Snippets) -> Tensor:
        """Scores of each excerpt for each package: over there, then here."""
        vectors = self._table.forward(snippets.words, snippets.starts)
        scores: Tensor = self._dense(vectors)
        return scores

    def train(self, snippets: Snippets, batch_size: int) -> list[float]:
        """Pass once over the excerpts and return the loss of each step."""
        losses = []
        for batch in torch.split(torch.randperm(len(snippets)), batch_size):
            part = snippets.take(batch)
            with autograd_dist.context() as context:
                loss = cross_entropy(self.forward(part), part.labels)
                autograd_dist.backward(context, [loss])
                self._optimizer.step(context)
            losses.append(loss.item())
        return losses

    def accuracy(self, snippets: Snippets) -> float:
        """The share, 0 to 1, whose package is told correctly."""
        with torch.no_grad():
            right = self.forward(snippets).argmax(dim=1) == snippets.labels
        return right.float().mean().item()

    def gradients(self, snippets: Snippets) -> tuple[list[Tensor], Tensor]:
        """Gradients of the dense layers' parameters and of the table, without a step."""
        with autograd_dist.context() as context:
            loss = cross_entropy(self.forward(snippets), snippets.labels)
            autograd_dist.backward(context, [loss])
            here = autograd_dist.get_gradients(context)
            (table,) = self._table.remote_parameters()
            there = rpc.rpc_sync(SERVER, _gradient_here, (context, table))
        return [here[parameter] for parameter in self._dense.parameters()], there

    def leave(self) -> None:
        """Leave the trainers' process group."""
        torch.distributed.destroy_process_group()


def _gradient_here(context: int, parameter: rpc.RRef[Tensor]) -> Tensor:
    """Runs on the server: one context's gradient of the table, made dense."""
    return autograd_dist.get_gradients(context)[parameter.local_value()].to_dense()


def compare(
    trainers: Sequence[rpc.RRef[Trainer]],
    table: RemoteModule,
    parts: Sequence[Snippets],
    task: Task,
) -> tuple[float, float]:
    """Compare one step's gradients with those of a single process that has the whole model.

    Each trainer takes one part, all of the same size; the single process takes them all.

    Returns:
        The largest difference of any gradient's element, and the largest element.
    """
    asked = [
        trainer.rpc_async().gradients(part) for trainer, part in zip(trainers, parts, strict=True)
    ]
    found = torch.futures.wait_all(asked)

    torch.manual_seed(task.seed)
    dense = dense_layers(len(available_packages()))
    whole_table = table.get_module_rref().local_value()
    loss = torch.stack(
        [cross_entropy(dense(whole_table(part.words, part.starts)), part.labels) for part in parts]
    ).mean()
    expected = torch.autograd.grad(loss, [*dense.parameters(), *whole_table.parameters()])
    table_gradient = torch.stack([there for _, there in found]).mean(dim=0)
    pairs = [
        (mine, right.to_dense())
        for here, _ in found  # DDP gave all trainers the same
        for mine, right in zip([*here, table_gradient], expected, strict=True)
    ]
    error = max((mine - right).abs().max().item() for mine, right in pairs)
    return error, max(right.abs().max().item() for _, right in pairs)


def drive(options: argparse.Namespace, workers: Sequence[str]) -> None:
    """Make the table and the trainers, compare gradients, train; runs on the server."""
    torch.sparse.check_sparse_tensor_invariants.disable()  # type: ignore[no-untyped-call]
    packages = available_packages()
    training, test = load(packages, options.seed)
    count = len(workers) - 1
    table = RemoteModule(
        SERVER, nn.EmbeddingBag, args=(_ROWS, _WIDTH), kwargs={"mode": "mean", "sparse": True}
    )
    here = os.environ["MASTER_ADDR"]
    store = TCPStore(here, 0, is_master=True)
    tasks = [Task(index, count, here, store.port, options.seed) for index in range(count)]
    # All at once: each one waits in its constructor until the others are there.
    trainers = [
        rpc.remote(name, Trainer, (task, table, len(packages)))
        for name, task in zip(workers[1:], tasks, strict=True)
    ]
    print(f"1 server with {_ROWS * _WIDTH:,} weights, {count} trainers, {len(training):,} excerpts "
          f"of {len(packages)} packages, backend {options.backend}", flush=True)  # fmt: skip
    parts = [training.take(torch.arange(rank * 64, rank * 64 + 64)) for rank in range(count)]
    error, largest = compare(trainers, table, parts, tasks[0])
    print(f"gradients differ from a single process's by at most {error:.1e}, "
          f"where the largest is {largest:.1e}", flush=True)  # fmt: skip
    even = len(training) // count * count  # all must make the same number of steps
    shares = [training.take(torch.arange(rank, even, count)) for rank in range(count)]
    losses, accuracy = _epochs(trainers, shares, test, options)
    print(f"final test accuracy: {accuracy:.1%}, by chance {1 / len(packages):.1%}")
    torch.futures.wait_all([trainer.rpc_async().leave() for trainer in trainers])
    _draw(losses, options)


def _epochs(
    trainers: Sequence[rpc.RRef[Trainer]], shares: Sequence[Snippets], test: Snippets,
    options: argparse.Namespace,
) -> tuple[list[float], float]:  # fmt: skip
    losses: list[float] = []
    accuracy = 0.0
    for epoch in tqdm(range(1, options.epochs + 1), unit=" epochs", disable=None):
        passes = [
            trainer.rpc_async(timeout=0).train(share, options.batch_size)
            for trainer, share in zip(trainers, shares, strict=True)
        ]
        found = torch.futures.wait_all(passes)
        losses += [sum(step) / len(step) for step in zip(*found, strict=True)]
        accuracy = trainers[0].rpc_sync().accuracy(test)
        tqdm.write(f"epoch {epoch}: loss {losses[-1]:.2f}, test accuracy {accuracy:.1%}")
    return losses, accuracy


def _draw(losses: Sequence[float], options: argparse.Namespace) -> None:
    drawn = pictures.figure(7, 3.5)
    axes = drawn.subplots()
    axes.plot(losses, linewidth=0.8)
    axes.set(xlabel="step", ylabel="training loss, mean of the trainers")
    pictures.save(drawn, options.output / "loss.png")


def main() -> int:
    """Read the command line and run."""
    parser = taking_part.parser(__doc__, "server:1 trainer:2,service", output="ddp_rpc")
    add = parser.add_argument
    add("--epochs", type=taking_part.positive, default=5, help="passes over the data (%(default)s)")
    add("--batch-size", type=taking_part.positive, default=64, help="per trainer (%(default)s)")
    return taking_part.run(parser.parse_args(), taking_part.Job(drive, fewest=2))


if __name__ == "__main__":
    sys.exit(main())
