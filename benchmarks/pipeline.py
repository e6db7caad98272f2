"""Compares pipelines: ours, torch.distributed.pipelining over gloo, and one by hand on torch's RPC.

    python -m benchmarks.pipeline --stages 2 4

All train the same transformer, with as many processes as stages and one thread in each, and
step its optimizer. All groups are alive at the same time; the measurement goes round them in
slices of a second, and those whose turn it is not are stopped. The losses of a first few steps
must agree.

    python -m benchmarks.pipeline --delay 1 --width 256 --batch 64
    python -m benchmarks.pipeline --backups --stages 2 --width 1024

``--delay`` puts two stages into two networks, between which a relay delays each packet by so many
milliseconds, and compares a step of ours with its schedule's theory. It needs root. ``--backups``
compares ours with and without backups, the optimizer being AdamW.

``ours`` and ``pipelining`` run 1F1B. ``by hand`` is torch's RPC tutorial: references that are
passed from stage to stage, distributed autograd, ``DistributedOptimizer``.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from benchmarks.parameter_server.relay import NETWORK_DEVICE, Relay, relayed
from benchmarks.stepping import SteppingGroup
from tutorials.pipeline.model import beginnings, loss, transformer

_CHARACTERS, _LENGTH = 97, 64
_SECONDS = 1.0
_STEPS_COMPARED = 3
_LEARNING_RATE = 0.05
_BEFORE_ALL_OTHERS = -20
"""The relay's priority, as its packets are late if it waits for a core."""


@dataclass(frozen=True, slots=True)
class Case:
    """The size of what is trained.

    Args:
        stages: of the pipeline, and processes.
        width: of the transformer.
        blocks: of the transformer.
        batch: texts in a step.
        microbatches: of a step.
        optimizer: of all stages.
    """

    stages: int
    width: int
    blocks: int
    batch: int
    microbatches: int
    optimizer: type[torch.optim.Optimizer] = torch.optim.SGD

    def layers(self) -> list[nn.Sequential]:
        """The stages, with the same values in every process."""
        torch.manual_seed(0)
        model = transformer(_CHARACTERS, _LENGTH, self.width, self.blocks)
        model[-1] = nn.Linear(self.width, _CHARACTERS, bias=False)  # torch's ties no weights
        cuts = [0, *map(int, beginnings(model, self.stages)), len(model)]
        layers = list(model)
        return [nn.Sequential(*layers[a:b]) for a, b in itertools.pairwise(cuts)]

    def data(self) -> tuple[Tensor, Tensor]:
        """One batch, the same everywhere."""
        torch.manual_seed(1)
        text = torch.randint(0, _CHARACTERS, (self.batch, _LENGTH + 1))
        return text[:, :-1].contiguous(), text[:, 1:].contiguous()

    @property
    def tokens(self) -> int:
        """The number of tokens in a step."""
        return self.batch * _LENGTH


Step = Callable[[], float]
"""One step of training. Returns the loss where it is known, else 0."""


@dataclass(frozen=True, slots=True)
class Length:
    """The length of a step.

    Args:
        seconds: from the beginning of its first action until the end of its last.
        theory: the same of its schedule, if every action takes its stage's mean time and every
            message between stages none.
    """

    seconds: float
    theory: float


def ours(
    case: Case,
    rank: int,
    meeting: str,
    relay: Relay | None = None,
    told: Callable[[Any], Any] | None = None,
    backups: int = 0,
) -> Callable[[], Any] | None:
    """This library's pipeline over TENSORWIRE; rank 0 drives and has the first stage.

    Args:
        case: its size.
        rank: of this process.
        meeting: a file to meet at.
        relay: between networks of which each process enters one; None: all are on one host.
        told: what a step returns, of the pipeline; default its loss.
        backups: of each stage.
    """
    import rpc
    from remote_module import RemoteModule
    from tensorwire.pipeline import Pipeline

    options = rpc.TensorWireRpcBackendOptions(
        init_method=f"file://{meeting}", bind_address=None if relay is None else relay.enter(rank),
        local_paths=relay is None, group_key=bytes(range(32)),
        liveness_timeout=0,  # a group whose turn it is not is stopped
    )  # fmt: skip
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=case.stages, rpc_backend_options=options)
    if rank:
        return None
    stages = [RemoteModule(f"worker{n}", _as_it_is, (s,)) for n, s in enumerate(case.layers())]
    pipe = Pipeline(stages, "1f1b", case.microbatches, loss, backups=backups)
    optimizer = pipe.optimizer(case.optimizer, lr=_LEARNING_RATE)
    text, following = case.data()

    def step() -> Any:
        value = pipe.train_step(text, target=following)
        optimizer.step()
        optimizer.zero_grad()
        return value.item() if told is None else told(pipe)

    return step


def _as_it_is(module: nn.Module) -> nn.Module:
    return module


def pipelining(case: Case, rank: int, meeting: str, relay: Relay | None = None) -> Step:
    """torch.distributed.pipelining over gloo; every rank runs its part."""
    from torch import distributed
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    if relay is not None:
        relay.enter(rank)
        os.environ["GLOO_SOCKET_IFNAME"] = NETWORK_DEVICE
    distributed.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=case.stages
    )
    module = case.layers()[rank]
    stage = PipelineStage(module, rank, case.stages, torch.device("cpu"))
    schedule = Schedule1F1B(stage, case.microbatches, loss_fn=loss)
    optimizer = torch.optim.SGD(module.parameters(), lr=_LEARNING_RATE)
    text, following = case.data()

    def step() -> float:
        found: list[Tensor] = []
        if rank == case.stages - 1:
            schedule.step(target=following, losses=found)
        else:
            schedule.step(*([text] if rank == 0 else []))
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack(found).mean().item() if found else 0.0

    return step


class _Stage:
    """A stage of the pipeline by hand, as torch's RPC tutorial writes it."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._turn = threading.Lock()

    def forward(self, microbatch: Any) -> Tensor:
        """Take a reference, return a value."""
        x = microbatch.to_here()
        with self._turn:
            output: Tensor = self._module(x)
        return output

    def parameter_references(self) -> list[Any]:
        """References to this stage's weights."""
        from torch import distributed

        rpc: Any = distributed.rpc
        return [rpc.RRef(parameter) for parameter in self._module.parameters()]


def by_hand(case: Case, rank: int, meeting: str) -> Step | None:
    """References passed from stage to stage on torch's RPC; rank 0 drives as in ``ours``."""
    from torch import distributed

    rpc: Any = distributed.rpc
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{meeting}")
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=case.stages, rpc_backend_options=options)
    if rank:
        return None
    stages: list[Any] = [
        rpc.remote(f"worker{n}", _Stage, (module,)) for n, module in enumerate(case.layers())
    ]
    references = [each.rpc_sync().parameter_references() for each in stages]
    parameters = [reference for some in references for reference in some]
    optimizer = _torch_optimizer(parameters)
    text, following = case.data()
    autograd: Any = distributed.autograd

    def step() -> float:
        with autograd.context() as context:
            results = []
            for part in text.chunk(case.microbatches):
                passed_on = rpc.RRef(part)
                for stage in stages[:-1]:
                    passed_on = stage.remote().forward(passed_on)
                results.append(stages[-1].rpc_async().forward(passed_on))
            value = loss(torch.cat(torch.futures.wait_all(results)), following)
            autograd.backward(context, [value])
            optimizer.step(context)
        return value.item()

    return step


def _torch_optimizer(parameters: list[Any]) -> Any:
    from torch.distributed import optim

    cls: Any = optim.DistributedOptimizer
    return cls(torch.optim.SGD, parameters, lr=_LEARNING_RATE)


Begin = Callable[[int, str], Step | None]
"""Begins one process of a program, given its rank and a file to meet at."""


def on_one_host(case: Case) -> dict[str, Begin]:
    """The three programs."""
    return {
        "ours": partial(ours, case),
        "pipelining": partial(pipelining, case),
        "by hand": partial(by_hand, case),
    }


def with_backups(case: Case) -> dict[str, Begin]:
    """Ours without backups and with them."""
    return {"ours": partial(ours, case), "backups=1": partial(ours, case, backups=1)}


def between_hosts(case: Case, relay: Relay) -> dict[str, Begin]:
    """The programs whose processes are in two networks."""
    return {
        "ours": partial(ours, case, relay=relay),
        "pipelining": partial(pipelining, case, relay=relay),
    }


def compare(case: Case, rounds: int, programs: Mapping[str, Begin]) -> dict[str, list[float]]:
    """Tokens per second of each program in each round."""
    found: dict[str, list[float]] = {column: [] for column in programs}
    with ExitStack() as stack:
        groups = {}
        for column, begin in programs.items():
            groups[column] = SteppingGroup(begin, case.stages, 1, _STEPS_COMPARED)
            stack.callback(groups[column].close)
        losses = {column: [max(each) for each in group.first] for column, group in groups.items()}
        _require_same_losses(losses)
        steps = max(1, round(_SECONDS / groups["ours"].measure(2)))
        for _ in tqdm(range(rounds), unit=" rounds", disable=None):
            for column, group in groups.items():
                found[column].append(case.tokens / group.measure(steps))
    return found


def lengths(case: Case, relay: Relay, steps: int) -> list[Length]:
    """The lengths of some steps of ours between two networks."""
    begin = partial(ours, case, relay=relay, told=_length)
    group = SteppingGroup(begin, case.stages, 1, _STEPS_COMPARED)
    try:
        found: list[Length] = []
        for _ in range(steps):
            group.measure(1)
            found += group.told
    finally:
        group.close()
    return found


def _length(pipe: Any) -> Length:
    trace = pipe.trace()
    return Length(trace.length, trace.theory().length)


def _require_same_losses(losses: dict[str, list[float]]) -> None:
    expected = torch.tensor(losses["ours"])
    for column, own in losses.items():
        if not torch.allclose(torch.tensor(own), expected, rtol=1e-4):
            raise RuntimeError(f"{column} loses {own}, ours {losses['ours']}")


def report(case: Case, found: dict[str, list[float]]) -> str:
    """Medians, their quartiles, and how many times as fast ours is, round by round."""
    lines = [
        f"{case.stages} stages, {case.blocks} blocks {case.width} wide, batches of {case.batch} "
        f"texts of {_LENGTH}, {case.microbatches} micro-batches"
    ]
    for column, rates in found.items():
        ratio = _spread([a / b for a, b in zip(found["ours"], rates, strict=True)], ".2f")
        lines.append(f"  {column:<11}{_spread(rates, '.0f')} tokens/s; ours / this {ratio}")
    return "\n".join(lines)


def report_lengths(found: Sequence[Length], delay: float) -> str:
    """A step beside its schedule's theory plus one delay there and one back, in seconds each."""
    ratios = [each.seconds / (each.theory + 2 * delay) for each in found]
    seconds = _spread([1e3 * each.seconds for each in found], ".1f")
    return f"  a step of ours {seconds} ms; / theory and a delay a hop {_spread(ratios, '.2f')}"


def _spread(values: Sequence[float], form: str) -> str:
    """The median, with the quartiles in brackets."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"{middle:{form}} ({low:{form}} to {high:{form}})"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--stages", type=int, nargs="+", default=[2, 4], help="(%(default)s)")
    add("--width", type=int, nargs="+", default=[64, 256], help="(%(default)s)")
    add("--blocks", type=int, default=8, help="of the transformer (%(default)s)")
    add("--batch", type=int, default=16, help="texts in a step (%(default)s)")
    add("--microbatches", type=int, default=8, help="(%(default)s)")
    add("--rounds", type=int, default=7, help="(%(default)s)")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--backups", action="store_true", help="ours without and with backups")
    how.add_argument(
        "--delay", type=float, metavar="MS", help="of each packet between two hosts, one way"
    )
    options = parser.parse_args(arguments)
    for width, stages in itertools.product(options.width, options.stages):
        case = Case(stages, width, options.blocks, options.batch, options.microbatches)
        print(_measured(case, options), flush=True)
    return 0


def _measured(case: Case, options: argparse.Namespace) -> str:
    """The report of one size."""
    if options.backups:
        case = replace(case, optimizer=torch.optim.AdamW)
        return report(case, compare(case, options.rounds, with_backups(case)))
    if options.delay is None:
        return report(case, compare(case, options.rounds, on_one_host(case)))
    case, seconds = replace(case, stages=2), options.delay / 1e3
    with relayed(seconds, megabits=0) as relay:
        os.setpriority(os.PRIO_PROCESS, relay.process, _BEFORE_ALL_OTHERS)
        told = report(case, compare(case, options.rounds, between_hosts(case, relay)))
        found = lengths(case, relay, options.rounds)
    return f"{told}\n{report_lengths(found, seconds)}"


if __name__ == "__main__":
    sys.exit(main())
