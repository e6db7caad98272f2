"""Programs as users write them without a parameter server: by remote calls, or in one process."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.parameter_server.case import EPS, LR, Case, Program, join, join_torch
from benchmarks.stepping import Step


class Rows:
    """A dense table with row-wise Adagrad."""

    def __init__(self, case: Case) -> None:
        self.weight = torch.zeros(case.rows, case.dim)
        self.sums = torch.zeros(case.rows)

    def pull(self, ids: Tensor) -> Tensor:
        """The rows of these ids."""
        return self.weight[ids]

    def push(self, ids: Tensor, grad: Tensor) -> None:
        """Moves them."""
        self.sums[ids] += grad.square().mean(1)
        self.weight.index_add_(0, ids, grad / (self.sums[ids].sqrt() + EPS)[:, None], alpha=-LR)


class Numbers:
    """Dense parameters with plain SGD."""

    def __init__(self, case: Case) -> None:
        self.weight = torch.zeros(case.numbers)

    def step(self, grad: Tensor) -> Tensor:
        """Moves them; returns them as they are then."""
        return self.weight.add_(grad, alpha=-LR)


class _Server:
    """The state of a server process."""

    rows: Rows
    numbers: Numbers


def _begin_rows(case: Case) -> None:
    torch.set_num_threads(case.threads)
    _Server.rows = Rows(case)


def _pull(ids: Tensor) -> Tensor:
    return _Server.rows.pull(ids)


def _push(ids: Tensor, grad: Tensor) -> None:
    _Server.rows.push(ids, grad)


def _begin_numbers(case: Case) -> None:
    torch.set_num_threads(case.threads)
    _Server.numbers = Numbers(case)


def _step_numbers(grad: Tensor) -> Tensor:
    return _Server.numbers.step(grad)


def _stepping(case: Case, pull: Callable[..., Tensor], push: Callable[..., object]) -> Step:
    batches, gradient = itertools.cycle(case.batches()), case.gradient()

    def step() -> None:
        unique, places = torch.unique(next(batches), return_inverse=True)
        rows = pull(unique)
        looked_up = rows[places]  # a model would go on with these
        push(unique, torch.zeros_like(rows).index_add_(0, places, gradient))
        del looked_up

    return step


def _rows_over(rpc: Any, case: Case, rank: int) -> Step | None:
    if rank:
        return None
    rpc.rpc_sync("server", _begin_rows, args=(case,))
    return _stepping(
        case,
        lambda ids: rpc.rpc_sync("server", _pull, args=(ids,)),
        lambda ids, grad: rpc.rpc_sync("server", _push, args=(ids, grad)),
    )


def rows_over_torch(case: Case, rank: int, meeting: str) -> Step | None:
    """Pull, reduce and push on torch's RPC."""
    return _rows_over(join_torch(rank, meeting), case, rank)


def rows_over_ours(case: Case, rank: int, meeting: str) -> Step | None:
    """The same on this library's RPC."""
    return _rows_over(join(rank, meeting), case, rank)


def rows_here(case: Case, rank: int, meeting: str) -> Step | None:
    """The same without any server."""
    rows = Rows(case)
    return None if rank else _stepping(case, rows.pull, rows.push)


def _numbers_over(rpc: Any, case: Case, rank: int) -> Step | None:
    if rank:
        return None
    rpc.rpc_sync("server", _begin_numbers, args=(case,))
    model = nn.Linear(1, case.numbers, bias=False)
    grad = torch.ones_like(model.weight)

    @torch.no_grad()
    def step() -> None:
        moved = rpc.rpc_sync("server", _step_numbers, args=(grad.view(-1),))
        model.weight.copy_(moved.view(-1, 1))  # a model would go on with these

    return step


def numbers_over_torch(case: Case, rank: int, meeting: str) -> Step | None:
    """Dense gradients there, dense parameters back, in one call of torch's RPC."""
    return _numbers_over(join_torch(rank, meeting), case, rank)


def numbers_over_ours(case: Case, rank: int, meeting: str) -> Step | None:
    """The same on this library's RPC."""
    return _numbers_over(join(rank, meeting), case, rank)


# --- torch's own modules and optimizers


def _bag(case: Case) -> nn.EmbeddingBag:
    torch.set_num_threads(case.threads)
    weight = torch.zeros(case.rows, case.dim)
    return nn.EmbeddingBag(case.rows, case.dim, mode="sum", sparse=True, _weight=weight)


def bag_here(case: Case, rank: int, meeting: str) -> Step | None:
    """``nn.EmbeddingBag`` and ``torch.optim.Adagrad`` in one process."""
    if rank:
        return None
    bag = _bag(case)
    optimizer = torch.optim.Adagrad(bag.parameters(), lr=LR)
    batches, gradient = itertools.cycle(case.batches()), case.gradient()
    offsets = torch.arange(case.ids)

    def step() -> None:
        optimizer.zero_grad()
        torch.autograd.backward(bag(next(batches), offsets), gradient)
        optimizer.step()

    return step


def _autograd(rpc: Any, autograd: Any, kind: Any, case: Case, rank: int) -> Step | None:
    """The module lives at the server; backward and the optimizer's step go there."""
    if rank:
        return None
    bag = rpc.remote("server", _bag, args=(case,))
    weights = [rpc.remote("server", _weight, args=(bag,))]
    optimizer = kind(torch.optim.Adagrad, weights, lr=LR)
    batches, gradient = itertools.cycle(case.batches()), case.gradient()
    offsets = torch.arange(case.ids)

    def step() -> None:
        with autograd.context() as context:
            looked_up = bag.rpc_sync().forward(next(batches), offsets)
            autograd.backward(context, [(looked_up * gradient).sum()])
            optimizer.step(context)

    return step


def _weight(bag: Any) -> Tensor:
    weight: Tensor = bag.local_value().weight
    return weight


def autograd_over_torch(case: Case, rank: int, meeting: str) -> Step | None:
    """Torch's distributed autograd and optimizer, on its RPC."""
    from torch import distributed
    from torch.distributed.optim import DistributedOptimizer

    rpc, autograd = join_torch(rank, meeting), distributed.autograd
    return _autograd(rpc, autograd, DistributedOptimizer, case, rank)


def autograd_over_ours(case: Case, rank: int, meeting: str) -> Step | None:
    """``autograd_dist`` and ``optim_dist``, on this library's RPC."""
    import autograd_dist
    import optim_dist

    return _autograd(
        join(rank, meeting), autograd_dist, optim_dist.DistributedOptimizer, case, rank
    )


# --- others


class RayServer:
    """The same server as an actor of Ray's."""

    def __init__(self, case: Case) -> None:
        torch.set_num_threads(case.threads)
        self._rows = Rows(case)

    def pull(self, ids: Tensor) -> Tensor:
        """The rows of these ids."""
        return self._rows.pull(ids)

    def push(self, ids: Tensor, grad: Tensor) -> None:
        """Moves them."""
        self._rows.push(ids, grad)


def rows_over_ray(case: Case, rank: int, meeting: str) -> Step | None:
    """Pull, reduce and push by an actor of Ray's."""
    if rank:
        return None
    import ray  # type: ignore[import-not-found,unused-ignore]

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    server = ray.remote(RayServer).remote(case)
    return _stepping(
        case,
        lambda ids: ray.get(server.pull.remote(ids)),
        lambda ids, grad: ray.get(server.push.remote(ids, grad)),
    )


def missing(*names: str) -> list[str]:
    """Those of these modules that are not installed."""
    return [name for name in names if importlib.util.find_spec(name) is None]


PROGRAMS: dict[str, Program] = {
    "by hand, torch RPC": rows_over_torch,
    "by hand, our RPC": rows_over_ours,
    "autograd, torch RPC": autograd_over_torch,
    "autograd, our RPC": autograd_over_ours,
    "by hand, one process": rows_here,
    "EmbeddingBag, one process": bag_here,
}
