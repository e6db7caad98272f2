"""Compares ways to train rows of a table that a server keeps.

    python -m benchmarks.parameter_server --rows 1000000 --ids 65536

Each step looks up a batch of ids, Zipf distributed, takes a gradient for each of them as a model
would compute it (the same at each step, as the model's work is the same for all), and moves the
rows by row-wise Adagrad. One server and one trainer, each a process. All pairs are alive at the
same time; the measurement goes round them, and those whose turn it is not are stopped.

=================  ===========================================================================
``ours``           ``ps.Embedding`` under ``ps.BSP()``, fetched on demand
``ours, ahead``    the same with ``ps.prefetch``: one message a step, the same results
``ours, stale``    under ``ps.SSP(1)`` with ``ps.prefetch``
``tw, by hand``    pull, reduce and push as a user writes them, on this library's RPC
``torch, by hand`` the same program on ``torch.distributed.rpc``
``one process``    the same without any server
=================  ===========================================================================
"""

from __future__ import annotations

import argparse
import enum
import itertools
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from benchmarks.stepping import Step, SteppingGroup

_BATCHES = 8
_LR, _EPS = 0.05, 1e-10


@dataclass(frozen=True, slots=True)
class Case:
    """The size of what is trained.

    Args:
        rows: of the table.
        ids: of a batch.
        dim: columns.
        threads: of torch, in each process.
    """

    rows: int
    ids: int
    dim: int
    threads: int

    def batches(self) -> list[Tensor]:
        """Ids with Zipf's distribution, exponent 1.05, the same in every process."""
        draw = torch.Generator().manual_seed(0)
        weights = torch.arange(1.0, self.rows + 1, dtype=torch.float64) ** -1.05
        ends = torch.cumsum(weights / weights.sum(), 0)
        names = torch.randperm(self.rows, generator=draw)
        uniform = torch.rand(_BATCHES, self.ids, generator=draw, dtype=torch.float64)
        found = torch.searchsorted(ends, uniform).clamp_(max=self.rows - 1)
        return list(names[found].unbind())

    def gradient(self) -> Tensor:
        """The gradient of a batch of rows that were looked up."""
        return torch.randn(self.ids, self.dim, generator=torch.Generator().manual_seed(1))


class Rows:
    """A dense table with row-wise Adagrad, as a user writes it."""

    def __init__(self, case: Case) -> None:
        self.weight = torch.zeros(case.rows, case.dim)
        self.sums = torch.zeros(case.rows)

    def pull(self, ids: Tensor) -> Tensor:
        """The rows of these ids."""
        return self.weight[ids]

    def push(self, ids: Tensor, grad: Tensor) -> None:
        """Moves them."""
        self.sums[ids] += grad.square().mean(1)
        self.weight.index_add_(0, ids, grad / (self.sums[ids].sqrt() + _EPS)[:, None], alpha=-_LR)


_rows: Rows | None = None


def _begin(case: Case) -> None:
    global _rows
    torch.set_num_threads(case.threads)
    _rows = Rows(case)


def _pull(ids: Tensor) -> Tensor:
    assert _rows is not None
    return _rows.pull(ids)


def _push(ids: Tensor, grad: Tensor) -> None:
    assert _rows is not None
    _rows.push(ids, grad)


def _by_hand(case: Case, pull: Callable[..., Tensor], push: Callable[..., object]) -> Step:
    batches, gradient = itertools.cycle(case.batches()), case.gradient()

    def step() -> None:
        unique, places = torch.unique(next(batches), return_inverse=True)
        rows = pull(unique)
        looked_up = rows[places]
        push(unique, torch.zeros_like(rows).index_add_(0, places, gradient))
        del looked_up

    return step


def one_process(case: Case, rank: int, meeting: str) -> Step | None:
    """No server."""
    if rank:
        return None
    rows = Rows(case)
    return _by_hand(case, rows.pull, rows.push)


def _over(module: Any, case: Case) -> Step:
    module.rpc_sync("server", _begin, args=(case,))
    return _by_hand(
        case,
        lambda ids: module.rpc_sync("server", _pull, args=(ids,)),
        lambda ids, grad: module.rpc_sync("server", _push, args=(ids, grad)),
    )


def torch_by_hand(case: Case, rank: int, meeting: str) -> Step | None:
    """On torch's RPC."""
    from torch import distributed

    rpc: Any = distributed.rpc
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{meeting}", rpc_timeout=0)
    rpc.init_rpc(("trainer", "server")[rank], rank=rank, world_size=2, rpc_backend_options=options)
    return None if rank else _over(rpc, case)


def _join(rank: int, meeting: str) -> Any:
    import rpc

    options = rpc.TensorWireRpcBackendOptions(init_method=f"file://{meeting}", rpc_timeout=0)
    rpc.init_rpc(("trainer", "server")[rank], rank=rank, world_size=2, rpc_backend_options=options)
    return rpc


def tensorwire_by_hand(case: Case, rank: int, meeting: str) -> Step | None:
    """On this library's RPC."""
    rpc = _join(rank, meeting)
    return None if rank else _over(rpc, case)


class Kind(enum.Enum):
    """The ways in which ours fetches rows."""

    PLAIN = "on demand"
    AHEAD = "with the step before"
    STALE = "before that step"


def _ours(kind: Kind, case: Case, rank: int, meeting: str) -> Step | None:
    from tensorwire import parameter_server as ps

    _join(rank, meeting)
    if rank:
        return None
    consistency = ps.SSP(1) if kind is Kind.STALE else ps.BSP()
    cluster = ps.connect(["server"], consistency=consistency)
    table = cluster.table("items", case.dim, ps.RowwiseAdagrad(_LR, _EPS))
    begin = torch.arange(case.rows)
    for some in torch.split(begin, 1 << 18):  # as many rows as the others have
        table.push(some, torch.zeros(len(some), case.dim))
    module = ps.Embedding(table)
    optimizer = ps.Optimizer(cluster, module)
    batches: Iterator[Tensor] = itertools.cycle(case.batches())
    gradient = case.gradient()
    if kind is not Kind.PLAIN:
        batches = iter(ps.prefetch(batches, module, ids=lambda batch: batch))

    def step() -> None:
        torch.autograd.backward(module(next(batches)), gradient)
        optimizer.step()

    return step


COLUMNS: dict[str, Callable[[Case, int, str], Step | None]] = {
    "ours": partial(_ours, Kind.PLAIN),
    "ours, ahead": partial(_ours, Kind.AHEAD),
    "ours, stale": partial(_ours, Kind.STALE),
    "tw, by hand": tensorwire_by_hand,
    "torch, by hand": torch_by_hand,
    "one process": one_process,
}


def compare(case: Case, rounds: int, steps: int) -> dict[str, list[float]]:
    """Milliseconds per step of each column in each round."""
    found: dict[str, list[float]] = {column: [] for column in COLUMNS}
    with ExitStack() as stack:
        pairs = {}
        for column in COLUMNS:
            begin = partial(COLUMNS[column], case)
            pairs[column] = SteppingGroup(begin, 2, case.threads, _BATCHES)
            stack.callback(pairs[column].close)
        for _ in tqdm(range(rounds), unit=" rounds", disable=None):
            for column, pair in pairs.items():
                found[column].append(1e3 * pair.measure(steps))
    return found


def report(case: Case, found: dict[str, list[float]]) -> str:
    """Medians with quartiles, and how many times as long as ours each takes, round by round."""
    lines = [
        f"{case.rows} rows of {case.dim}, {case.ids} ids a step, {case.threads} threads of torch"
    ]
    for column, taken in found.items():
        low, middle, high = statistics.quantiles(taken, n=4)
        ratio = statistics.median(b / a for a, b in zip(found["ours, ahead"], taken, strict=True))
        spread = f"({low:.1f} to {high:.1f})"
        lines.append(f"  {column:<15}{middle:8.1f} ms {spread:>16}; {ratio:.2f} x ours, ahead")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and prints; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--rows", type=int, nargs="+", default=[1_000_000], help="(%(default)s)")
    add("--ids", type=int, default=65_536, help="in a batch (%(default)s)")
    add("--dim", type=int, default=64, help="(%(default)s)")
    add("--threads", type=int, nargs="+", default=[1, 2], help="of torch (%(default)s)")
    add("--rounds", type=int, default=9, help="(%(default)s)")
    add("--steps", type=int, default=10, help="of a round (%(default)s)")
    options = parser.parse_args(arguments)
    for rows, threads in itertools.product(options.rows, options.threads):
        case = Case(rows, options.ids, options.dim, threads)
        print(report(case, compare(case, options.rounds, options.steps)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
