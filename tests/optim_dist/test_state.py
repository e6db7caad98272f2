"""The state of a distributed optimizer travels between its owners and the one who uses it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import autograd_dist
import optim_dist
import rpc
from optim_dist import DistributedOptimizer
from rpc.agent import Agent
from rpc.testing import as_worker, local_group


@pytest.fixture
def group() -> Iterator[list[Agent]]:
    with local_group("here", "first", "second") as agents, as_worker(agents[0]):
        yield agents


class Layer:
    """A linear layer that lives on a worker."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.weight = nn.Parameter(torch.rand(3, 3, generator=generator))
        self.bias = nn.Parameter(torch.rand(3, generator=generator))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.weight + self.bias)

    def rrefs(self) -> list[rpc.RRef[nn.Parameter]]:
        return [rpc.RRef(self.weight), rpc.RRef(self.bias)]

    def values(self) -> list[torch.Tensor]:
        return [self.weight.detach(), self.bias.detach()]

    def set_grad(self) -> None:
        self.weight.grad = torch.ones(3, 3)

    def grads(self) -> list[torch.Tensor | None]:
        return [self.weight.grad, self.bias.grad]


def _layers(*owners: str) -> tuple[list[rpc.RRef[Layer]], list[rpc.RRef[nn.Parameter]]]:
    layers = [rpc.remote(owner, Layer, (seed,)) for seed, owner in enumerate(owners)]
    # In another order than by owner, so that positions matter.
    pairs = [layer.rpc_sync().rrefs() for layer in layers]
    return layers, [pair[kind] for kind in (0, 1) for pair in pairs]


_X = torch.linspace(-1, 1, 12).reshape(4, 3)


def _step(
    layers: Sequence[rpc.RRef[Any]], optimizer: DistributedOptimizer, clip: Any = None
) -> Any:
    with autograd_dist.context() as context:
        x = _X
        for layer in layers:
            x = layer.rpc_sync().forward(x)
        autograd_dist.backward(context, [x.square().sum()])
        norm = clip(context) if clip else None
        optimizer.step(context)
    return norm


def _values(layers: Sequence[rpc.RRef[Any]]) -> list[torch.Tensor]:
    return [value for layer in layers for value in layer.rpc_sync().values()]


def test_another_optimizer_goes_on_from_a_state_with_other_owners(group: list[Agent]) -> None:
    layers, parameters = _layers("first", "second")
    optimizer = DistributedOptimizer(torch.optim.Adam, parameters, lr=0.1)
    for _ in range(2):
        _step(layers, optimizer)
    state = optimizer.state_dict()
    assert sorted(state["state"]) == [0, 1, 2, 3]
    assert state["state"][2]["exp_avg"].shape == (3,)
    assert state["param_groups"][0]["params"] == [0, 1, 2, 3]

    others, their_parameters = _layers("second", "second")
    other = DistributedOptimizer(torch.optim.Adam, their_parameters, lr=0.7)
    for rref, value in zip(their_parameters, [p.to_here() for p in parameters], strict=True):
        rpc.rpc_sync(rref.owner(), _copy, (rref, value))
    other.load_state_dict(state)
    assert other.param_groups[0]["lr"] == 0.1
    for _ in range(2):
        _step(layers, optimizer)
        _step(others, other)
        assert all(map(torch.equal, _values(layers), _values(others)))


def _copy(parameter: rpc.RRef[torch.Tensor], value: torch.Tensor) -> None:
    with torch.no_grad():
        parameter.local_value().copy_(value)


def test_a_scheduler_changes_the_hyperparameters_of_every_owner(group: list[Agent]) -> None:
    layers, parameters = _layers("first", "second")
    optimizer = DistributedOptimizer(torch.optim.SGD, parameters, lr=0.1, momentum=0.9)
    scheduler = optim_dist.lr_scheduler(
        torch.optim.lr_scheduler.OneCycleLR, optimizer, max_lr=0.5, total_steps=6
    )
    local = [Layer(0), Layer(1)]
    parameter_list = [p for layer in local for p in (layer.weight, layer.bias)]
    reference = torch.optim.SGD(parameter_list, lr=0.1, momentum=0.9)
    its_scheduler = torch.optim.lr_scheduler.OneCycleLR(reference, max_lr=0.5, total_steps=6)
    for _ in range(5):
        _step(layers, optimizer)
        scheduler.step()
        local[1].forward(local[0].forward(_X)).square().sum().backward()  # type: ignore[no-untyped-call]
        reference.step()
        its_scheduler.step()
        reference.zero_grad()
        mine = [p.detach() for layer in local for p in (layer.weight, layer.bias)]
        assert all(map(torch.equal, _values(layers), mine))
    assert optimizer.param_groups[0]["momentum"] == reference.param_groups[0]["momentum"]


@pytest.mark.parametrize("norm_type", [2.0, torch.inf])
def test_gradients_are_clipped_by_their_norm_over_all_owners(
    group: list[Agent], norm_type: float
) -> None:
    layers, parameters = _layers("first", "second")
    optimizer = DistributedOptimizer(torch.optim.SGD, parameters, lr=0.1)
    local = [Layer(0), Layer(1)]
    mine = [local[0].weight, local[1].weight, local[0].bias, local[1].bias]
    local[1].forward(local[0].forward(_X)).square().sum().backward()  # type: ignore[no-untyped-call]
    wanted = nn.utils.clip_grad_norm_(mine, 0.5, norm_type)
    torch.optim.SGD(mine, lr=0.1).step()

    norm = _step(
        layers,
        optimizer,
        lambda context: optim_dist.clip_grad_norm_(context, parameters, 0.5, norm_type),
    )

    assert torch.equal(norm, wanted)
    for found, expected in zip(_values(layers), [p for each in local for p in each.values()],
                               strict=True):  # fmt: skip
        assert torch.equal(found, expected)


def test_a_norm_that_is_no_number_is_refused_if_one_wants(group: list[Agent]) -> None:
    layers, parameters = _layers("first")
    optimizer = DistributedOptimizer(torch.optim.SGD, parameters, lr=0.1)
    rpc.rpc_sync("first", _copy, (parameters[0], torch.full((3, 3), torch.nan)))
    with pytest.raises(RuntimeError, match="non-finite"):
        _step(
            layers,
            optimizer,
            lambda context: optim_dist.clip_grad_norm_(
                context, parameters, 1.0, error_if_nonfinite=True
            ),
        )


def test_the_parameters_own_gradients_are_cleared_where_they_are(group: list[Agent]) -> None:
    layers, parameters = _layers("first")
    optimizer = DistributedOptimizer(torch.optim.SGD, parameters, lr=0.1)
    layers[0].rpc_sync().set_grad()
    optimizer.zero_grad(set_to_none=False)
    assert layers[0].rpc_sync().grads()[0].eq(0).all()
    optimizer.zero_grad()
    assert layers[0].rpc_sync().grads() == [None, None]


def _by_dimension(parameters: Sequence[torch.Tensor], lr: float) -> torch.optim.Optimizer:
    groups = [{"params": [p]} for p in parameters]
    return torch.optim.SGD(groups, lr=lr)


def test_owners_with_different_groups_have_none_in_common(group: list[Agent]) -> None:
    _, parameters = _layers("first", "second")
    optimizer = DistributedOptimizer(_by_dimension, parameters, lr=0.1)
    assert [each["params"] for each in optimizer.param_groups] == [[0, 1], [2, 3]]
    uneven = DistributedOptimizer(_by_dimension, parameters[:3], lr=0.1)
    with pytest.raises(ValueError, match=r"different numbers of parameter groups: \[2, 1\]"):
        uneven.state_dict()
    with pytest.raises(ValueError, match="has 2 parameter groups, not 1"):
        optimizer.load_state_dict({"state": {}, "param_groups": [{"params": [0]}]})


class _NoState:
    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self.parameters = parameters

    def step(self) -> None: ...


def test_an_optimizer_without_a_known_state_says_so(group: list[Agent]) -> None:
    _, parameters = _layers("first")
    optimizer = DistributedOptimizer(_NoState, parameters)
    with pytest.raises(TypeError, match=r"is no torch\.optim\.Optimizer"):
        optimizer.state_dict()
