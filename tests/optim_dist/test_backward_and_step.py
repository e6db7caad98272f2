"""``backward_and_step``: owners step as soon as their gradients are complete."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch

import autograd_dist
import optim_dist
import rpc
from optim_dist import DistributedOptimizer
from rpc.testing import MemoryHub, as_worker, local_group
from rpc.transports.base import FrameKind
from tests.optim_dist.test_frames import Noting

OWNERS = ("first", "second")
Loss = Callable[[list[rpc.RRef[torch.Tensor]]], torch.Tensor]


@pytest.fixture
def requests() -> Iterator[Counter[FrameKind]]:
    hub, counts = MemoryHub(), Counter[FrameKind]()
    workers = local_group("trainer", *OWNERS, transport=lambda: Noting(hub, counts))
    with workers as agents, as_worker(agents[0]):
        yield counts


def leaf(seed: int) -> torch.Tensor:
    return torch.rand(5, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def parameters(owners: tuple[str, ...] = OWNERS) -> list[rpc.RRef[torch.Tensor]]:
    made = [rpc.remote(owner, leaf, (number,)) for number, owner in enumerate(owners)]
    for each in made:
        each.to_here()  # it is made then
    return made


def times(param: rpc.RRef[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return (param.local_value() * x).sin()


def times_there(
    param: rpc.RRef[torch.Tensor], x: torch.Tensor, other: rpc.RRef[torch.Tensor]
) -> torch.Tensor:
    """A call within a call: its gradient goes through both workers."""
    there: torch.Tensor = rpc.rpc_sync(other.owner(), times, (other, x))
    return param.local_value() * there


def one_each(params: list[rpc.RRef[torch.Tensor]]) -> torch.Tensor:
    x = torch.arange(5.0)
    return torch.stack([rpc.rpc_sync(p.owner(), times, (p, x)) for p in params]).sum()


def shared(params: list[rpc.RRef[torch.Tensor]]) -> torch.Tensor:
    """The same parameters three times, at last through each other."""
    x = one_each(params) * torch.ones(5) + one_each(params)
    first, second = params[0], params[-1]
    found: torch.Tensor = rpc.rpc_sync(first.owner(), times_there, (first, x, second))
    return found.sum() + x.sum()


def with_unused_output(params: list[rpc.RRef[torch.Tensor]]) -> torch.Tensor:
    rpc.rpc_sync(params[0].owner(), times, (params[0], torch.ones(5)))
    return one_each(params)


def values_after(
    loss: Loss,
    step: Callable[[DistributedOptimizer, int, torch.Tensor], None],
    owners: tuple[str, ...],
) -> list[torch.Tensor]:
    params = parameters(owners)
    optimizer = DistributedOptimizer(torch.optim.Adam, params, lr=0.1)
    for _ in range(2):
        with autograd_dist.context() as context_id:
            step(optimizer, context_id, loss(params))
    return [param.to_here() for param in params]


def fused(optimizer: DistributedOptimizer, context_id: int, loss: torch.Tensor) -> None:
    optimizer.backward_and_step(context_id, [loss])


def apart(optimizer: DistributedOptimizer, context_id: int, loss: torch.Tensor) -> None:
    autograd_dist.backward(context_id, [loss])
    optimizer.step(context_id)


@pytest.mark.parametrize("loss", [one_each, shared, with_unused_output])
@pytest.mark.parametrize("owners", [OWNERS, ("first",), ("trainer", "second")], ids="-".join)
def test_parameters_become_those_of_a_pass_and_a_step(
    requests: Counter[FrameKind], loss: Loss, owners: tuple[str, ...]
) -> None:
    together, one_by_one = (values_after(loss, step, owners) for step in (fused, apart))
    for one, other in zip(together, one_by_one, strict=True):
        assert one.equal(other)


def test_a_step_takes_two_requests_of_each_owner(requests: Counter[FrameKind]) -> None:
    params = parameters()
    optimizer = DistributedOptimizer(torch.optim.SGD, params, lr=0.1)
    with autograd_dist.context() as context_id:
        requests.clear()
        optimizer.backward_and_step(context_id, [one_each(params)])
        assert (requests[FrameKind.REQUEST], requests[FrameKind.REPLY]) == (4, 4)


class Failing(torch.optim.SGD):
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        raise ArithmeticError("no step today")


def make(params: list[torch.Tensor], failing: list[float]) -> torch.optim.Optimizer:
    kind = Failing if params[0][0].item() in failing else torch.optim.SGD
    return kind(params, lr=0.1)


def in_turn(params: list[rpc.RRef[torch.Tensor]]) -> torch.Tensor:
    """Gradients reach the first owner only from the second, which is complete before it is."""
    first, second = params
    x: torch.Tensor = rpc.rpc_sync(first.owner(), times, (first, torch.ones(5)))
    return rpc.rpc_sync(second.owner(), times, (second, x)).sum()


def test_where_one_owner_fails_the_error_names_those_that_had_stepped(
    requests: Counter[FrameKind],
) -> None:
    params = parameters()
    before = [param.to_here() for param in params]
    failing = partial(make, failing=[before[0][0].item()])
    optimizer = DistributedOptimizer(failing, params)
    told = r"(?s)no step today.*owners that had stepped: second\)"
    with autograd_dist.context() as context_id, pytest.raises(RuntimeError, match=told):
        optimizer.backward_and_step(context_id, [in_turn(params)])
    assert params[0].to_here().equal(before[0])
    assert not params[1].to_here().equal(before[1]), "nothing is undone"


def test_gradients_that_were_used_already_are_not_clipped(requests: Counter[FrameKind]) -> None:
    params = parameters()
    optimizer = DistributedOptimizer(torch.optim.SGD, params, lr=0.1)
    with autograd_dist.context() as context_id:
        optimizer.backward_and_step(context_id, [one_each(params)])
        with pytest.raises(RuntimeError, match="used by backward_and_step"):
            optim_dist.clip_grad_norm_(context_id, params, 1.0)
