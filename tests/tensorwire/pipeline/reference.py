"""A pipeline's stages in one process, under plain autograd: what the pipeline must equal."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

import rpc
from remote_module import RemoteModule
from rpc.testing import as_worker, local_group
from tensorwire.pipeline import Kind, Pipeline, Table, Wiring, seed_of
from tensorwire.pipeline.randomness import seeded
from tensorwire.pipeline.wiring import ALL, FromStage

CPU = torch.device("cpu")


def given(module: nn.Module) -> nn.Module:
    """Makes a stage of a module that is sent along."""
    return module


def place(modules: Sequence[nn.Module], workers: Sequence[str]) -> list[RemoteModule]:
    """Puts a copy of each module on a worker."""
    return [
        RemoteModule(worker, given, (copy.deepcopy(module),))
        for module, worker in zip(modules, workers, strict=True)
    ]


@contextmanager
def group(*workers: str, **options: Any) -> Iterator[list[Any]]:
    """Workers in this process; the current one is the driver."""
    with local_group("driver", *workers, **options) as agents, as_worker(agents[0]):
        yield agents


def _gradients(module: rpc.RRef[nn.Module]) -> list[torch.Tensor | None]:
    return [each.grad for each in module.local_value().parameters()]


def gradients(module: RemoteModule) -> list[torch.Tensor | None]:
    """The gradients of a module's parameters, fetched from its worker."""
    rref = module.get_module_rref()
    return rpc.rpc_sync(rref.owner(), _gradients, (rref,))


def require_equal_gradients(pipe: Pipeline, modules: Sequence[nn.Module]) -> None:
    """Checks bit for bit that the stages have the gradients of local modules."""
    for index, (stage, module) in enumerate(zip(pipe.stages, modules, strict=True)):
        found = gradients(stage)
        expected = [each.grad for each in module.parameters()]
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert (one is None) == (other is None), index
            assert one is None or other is None or torch.equal(one, other), index


class Reference:
    """Stages in one process.

    Args:
        modules: the stages.
        loss: of the last stage's output and the target.
        inputs: as for ``Pipeline``.
        seed: as for ``Pipeline``.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        loss: Callable[[Any, Any], torch.Tensor],
        inputs: Mapping[int, Sequence[Any]] | None = None,
        seed: int | None = None,
    ) -> None:
        self.modules = list(modules)
        self.wiring = Wiring.chain(len(self.modules), inputs)
        self._loss = loss
        self._seed = seed

    def forward(
        self, arguments: tuple[Any, ...], keywords: Mapping[str, Any], step: int, microbatch: int
    ) -> Any:
        """Runs all stages."""
        outputs: list[Any] = []
        for stage, module in enumerate(self.modules):
            values: list[Any] = []
            for source in self.wiring.sources[stage]:
                if isinstance(source, FromStage):
                    whole = outputs[source.stage]
                    parts = whole if isinstance(whole, tuple) else (whole,)
                    values.extend(parts if source.output == ALL else [parts[source.output]])
                else:
                    values.extend([keywords[source.name]] if source.name else arguments)
            if self._seed is None:
                outputs.append(module(*values))
            else:
                with seeded(seed_of(self._seed, step, stage, microbatch), CPU):
                    outputs.append(module(*values))
        return outputs[-1]

    def train_step(
        self,
        table: Table,
        xs: Sequence[Any],
        ys: Sequence[Any],
        step: int = 0,
        keywords: Sequence[Mapping[str, Any]] | None = None,
    ) -> torch.Tensor:
        """Trains on micro-batches in the order of the table's backward passes."""
        rows = [len(x[0]) if isinstance(x, tuple) else len(x) for x in xs]
        last = len(self.modules) - 1
        order = [a.microbatch for a in table if a.stage == last and a.kind is not Kind.FORWARD]
        before = {id(p): p.grad for module in self.modules for p in module.parameters()}
        for module in self.modules:
            module.zero_grad()
        losses: dict[int, torch.Tensor] = {}
        for at in dict.fromkeys(order):
            arguments = xs[at] if isinstance(xs[at], tuple) else (xs[at],)
            output = self.forward(arguments, keywords[at] if keywords else {}, step, at)
            loss = self._loss(output, ys[at])
            (loss * (rows[at] / sum(rows))).backward()
            losses[at] = loss.detach() * (rows[at] / sum(rows))
        for parameter in (p for module in self.modules for p in module.parameters()):
            if (old := before[id(parameter)]) is not None:
                parameter.grad = old if parameter.grad is None else old + parameter.grad
        return torch.stack([losses[at] for at in range(len(xs))]).sum()
