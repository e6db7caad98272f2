"""DistributedOptimizer, as users hold it, over the memory transport."""

from __future__ import annotations

import gc
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.optim import Optimizer

import autograd_dist
import optim_dist
import rpc
from optim_dist import DistributedOptimizer
from rpc.agent import Agent
from rpc.errors import StaleRRefError
from rpc.testing import as_worker, local_group
from rpc.transports.base import Transport
from tests import waiting

OWNERS = ("first", "second")


class Weights:
    """Holds one parameter, the same at every owner."""

    def __init__(self, requires_grad: bool = True) -> None:
        generator = torch.Generator().manual_seed(0)
        self.w = torch.rand(3, 3, generator=generator).requires_grad_(requires_grad)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w @ x

    def get(self) -> torch.Tensor:
        return self.w


class FailsToStep(Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:
        raise ValueError("Error running optimizer.")


class FailsToBeMade(Optimizer):
    def __init__(self, params: Any) -> None:
        raise FileNotFoundError(2, "Error creating optimizer.")


class Meets(optim.SGD):
    """Each of its methods returns only once both owners are in it."""

    meeting = threading.Barrier(2)

    def __init__(self, params: Any) -> None:
        self.meeting.wait(10)
        super().__init__(params, lr=1.0)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.meeting.wait(10)
        super().step()


class NoticesOthers(optim.SGD):
    """Fails if anyone else steps its parameter, or changes its gradient, during a step."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        parameter = self.param_groups[0]["params"][0]
        gradient = parameter.grad
        value, expected = parameter.clone(), gradient.clone()
        time.sleep(0.0005)  # gives the others a chance
        assert torch.equal(parameter, value)
        assert parameter.grad is gradient
        assert torch.equal(gradient, expected)
        super().step()


def weighted_sum(parameter: rpc.RRef[torch.Tensor], weight: torch.Tensor) -> torch.Tensor:
    return (parameter.local_value() * weight).sum()


def grad_of(parameter: rpc.RRef[torch.Tensor]) -> torch.Tensor | None:
    return parameter.local_value().grad


def set_grad(parameter: rpc.RRef[torch.Tensor], value: float) -> None:
    tensor = parameter.local_value()
    tensor.grad = torch.full_like(tensor, value)


def parameter_of(value: Sequence[float]) -> torch.Tensor:
    return torch.tensor(value, requires_grad=True)


def fail_to_create() -> torch.Tensor:
    raise OSError("no memory for this parameter")


def slow_parameter() -> torch.Tensor:
    time.sleep(0.05)
    return parameter_of([1.0])


def embed(table: rpc.RRef[nn.Embedding], rows: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = table.local_value()(rows)
    return result


def weight_of(table: rpc.RRef[nn.Embedding]) -> rpc.RRef[torch.Tensor]:
    return rpc.RRef(table.local_value().weight)


@pytest.fixture
def agents(make_transport: Callable[[], Transport] | None) -> Iterator[list[Agent]]:
    """A trainer, two owners and another trainer; the test's thread is the first trainer."""
    names = ("trainer", *OWNERS, "other")
    with local_group(*names, transport=make_transport) as agents, as_worker(agents[0]):
        yield agents


def make(owner: str, *value: float) -> rpc.RRef[torch.Tensor]:
    return rpc.remote(owner, parameter_of, (value or (1.0, 2.0),))


def differentiate(
    context_id: int, parameters: Sequence[rpc.RRef[torch.Tensor]], *gradients: float
) -> None:
    """Makes each of the parameters have the given gradient in the context."""
    losses = []
    for parameter, gradient in zip(parameters, gradients, strict=True):
        weight = torch.tensor(gradient)
        losses.append(rpc.rpc_sync(parameter.owner(), weighted_sum, (parameter, weight)))
    autograd_dist.backward(context_id, [torch.stack(losses).sum()])


def step_once(
    optimizer: DistributedOptimizer,
    parameters: Sequence[rpc.RRef[torch.Tensor]],
    *gradients: float,
) -> None:
    with autograd_dist.context() as context_id:
        differentiate(context_id, parameters, *gradients)
        optimizer.step(context_id)


eventually = partial(waiting.eventually, meanwhile=gc.collect)


def test_the_public_names_are_these() -> None:
    assert optim_dist.__all__ == ["DistributedOptimizer", "clip_grad_norm_", "lr_scheduler"]


# --- Numbers

CASES: list[tuple[type[Optimizer], dict[str, Any]]] = [
    (optim.Adagrad, {"lr": 0.05}),
    (optim.Adam, {"lr": 1e-2, "amsgrad": True}),
    (optim.AdamW, {"lr": 0.05, "amsgrad": True}),
    (optim.SGD, {"lr": 0.05}),
    (optim.SGD, {"lr": 1e-3, "momentum": 1, "weight_decay": 1, "nesterov": True}),
    (optim.Adadelta, {"rho": 0.95}),
    (optim.RMSprop, {"lr": 0.05}),
    (optim.Adamax, {"lr": 0.05}),
    (optim.Rprop, {"lr": 0.05}),
]


def inputs(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.rand(3, 3, generator=generator), torch.rand(3, 3, generator=generator)


def train_locally(
    kind: type[Optimizer], kwargs: dict[str, Any], second_learns: bool
) -> list[torch.Tensor]:
    modules = [Weights(), Weights(second_learns)]
    optimizer = kind([module.w for module in modules], **kwargs)
    for step in range(3):
        optimizer.zero_grad()
        x, offset = inputs(step)
        (modules[1].forward(modules[0].forward(x)) + offset).sum().backward()
        optimizer.step()
    return [module.w.detach() for module in modules]


def train_remotely(
    kind: type[Optimizer], kwargs: dict[str, Any], second_learns: bool
) -> list[torch.Tensor]:
    modules = [rpc.remote("first", Weights), rpc.remote("second", Weights, (second_learns,))]
    optimizer = DistributedOptimizer(kind, [m.remote().get() for m in modules], **kwargs)
    for step in range(3):
        with autograd_dist.context() as context_id:
            x, offset = inputs(step)
            hidden = modules[0].rpc_async().forward(x)
            output = modules[1].rpc_async().forward(hidden.wait())
            autograd_dist.backward(context_id, [(output.wait() + offset).sum()])
            optimizer.step(context_id)
    return [module.rpc_sync().get().detach() for module in modules]


@pytest.mark.parametrize(("kind", "kwargs"), CASES)
def test_training_gives_the_numbers_of_one_process(
    agents: list[Agent], kind: type[Optimizer], kwargs: dict[str, Any]
) -> None:
    ours = train_remotely(kind, kwargs, second_learns=True)
    torch.testing.assert_close(ours, train_locally(kind, kwargs, second_learns=True))
    assert not torch.equal(ours[0], Weights().w)
    assert not torch.equal(ours[1], Weights().w)


@pytest.mark.parametrize("kind", [optim.SGD, optim.RMSprop, optim.Rprop, optim.Adadelta])
def test_a_parameter_that_needs_no_gradient_stays(
    agents: list[Agent], kind: type[Optimizer]
) -> None:
    ours = train_remotely(kind, {"lr": 0.05}, second_learns=False)
    torch.testing.assert_close(ours, train_locally(kind, {"lr": 0.05}, second_learns=False))
    assert torch.equal(ours[1], Weights().w.detach())


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
@pytest.mark.parametrize("kind", [optim.SGD, optim.SparseAdam, optim.Adagrad])
def test_sparse_gradients_step_the_rows_they_name(
    agents: list[Agent], kind: type[Optimizer]
) -> None:
    table = rpc.remote("first", nn.Embedding, (5, 2), {"sparse": True})
    weight = rpc.rpc_sync("first", weight_of, (table,))
    local = nn.Embedding(5, 2, sparse=True)
    local.load_state_dict({"weight": weight.to_here().detach()})
    optimizer = DistributedOptimizer(kind, [weight], lr=0.1)
    local_optimizer = kind(local.parameters(), lr=0.1)  # type: ignore[call-arg]
    rows = torch.tensor([1, 3, 1])
    for _ in range(2):
        local_optimizer.zero_grad()
        local(rows).pow(2).sum().backward()
        local_optimizer.step()
        with autograd_dist.context() as context_id:
            output = rpc.rpc_sync("first", embed, (table, rows))
            autograd_dist.backward(context_id, [output.pow(2).sum()])
            optimizer.step(context_id)
    torch.testing.assert_close(weight.to_here().detach(), local.weight.detach())


def test_parameters_without_gradient_in_the_context_stay(agents: list[Agent]) -> None:
    used, unused, elsewhere = make("first"), make("first"), make("second")
    parameters = [used, unused, elsewhere]
    optimizer = DistributedOptimizer(optim.SGD, parameters, lr=1.0, weight_decay=0.5)
    step_once(optimizer, [used], 0.0)
    assert [p.to_here().tolist() for p in parameters] == [[0.5, 1.0], [1.0, 2.0], [1.0, 2.0]]


def test_a_step_leaves_grad_as_local_training_set_it(agents: list[Agent]) -> None:
    with_grad, without = make("first"), make("first")
    rpc.rpc_sync("first", set_grad, (with_grad, 9.0))
    optimizer = DistributedOptimizer(optim.SGD, [with_grad, without], lr=1.0)
    step_once(optimizer, [with_grad, without], 1.0, 1.0)
    assert with_grad.to_here().tolist() == [0.0, 1.0]
    grads = [rpc.rpc_sync("first", grad_of, (p,)) for p in (with_grad, without)]
    assert grads[0].tolist() == [9.0, 9.0]
    assert grads[1] is None


def test_each_optimizer_has_its_own_state(agents: list[Agent]) -> None:
    parameter = make("first", 0.0)
    momentum, plain = (
        DistributedOptimizer(optim.SGD, [parameter], lr=1.0, momentum=m) for m in (1.0, 0.0)
    )
    for optimizer, expected in ((momentum, -1.0), (plain, -2.0), (momentum, -4.0)):
        step_once(optimizer, [parameter], 1.0)
        assert parameter.to_here().item() == expected


def test_several_steps_in_one_context_use_the_same_gradients(agents: list[Agent]) -> None:
    parameter = make("first", 0.0)
    optimizer = DistributedOptimizer(optim.SGD, [parameter], lr=1.0)
    with autograd_dist.context() as context_id:
        differentiate(context_id, [parameter], 1.0)
        optimizer.step(context_id)
        optimizer.step(context_id)
    assert parameter.to_here().item() == -2.0


def test_a_step_from_another_thread_reaches_owners_outside_the_context(
    agents: list[Agent],
) -> None:
    used, unused = make("first", 0.0), make("second", 0.0)
    optimizer = DistributedOptimizer(optim.SGD, [used, unused], lr=1.0)

    def step(context_id: int) -> None:
        with as_worker(agents[0]):
            optimizer.step(context_id)

    with autograd_dist.context() as context_id, ThreadPoolExecutor(1) as pool:
        differentiate(context_id, [used], 1.0)
        pool.submit(step, context_id).result()
    assert [p.to_here().item() for p in (used, unused)] == [-1.0, 0.0]


# --- Who makes what, where


def test_there_is_one_local_optimizer_per_owner(agents: list[Agent]) -> None:
    parameters = [make(owner) for owner in ("first", "second", "first", "trainer")]
    optimizer = DistributedOptimizer(optim.SGD, iter(parameters), 0.5)
    owners = [remote.owner_name() for remote in optimizer.remote_optimizers]
    assert owners == ["first", "second", "trainer"]
    assert not optimizer.is_functional_optim
    step_once(optimizer, parameters, 1.0, 2.0, 3.0, 4.0)
    values = [p.to_here().tolist() for p in parameters]
    assert values == [[0.5, 1.5], [0.0, 1.0], [-0.5, 0.5], [-1.0, 0.0]]


@pytest.mark.parametrize(
    ("kind", "args", "kwargs", "rate"),
    [
        (optim.SGD, (), {}, 0.01),
        (optim.SGD, (), {"lr": 0.5, "momentum": 0.5}, 0.5),
        (optim.SGD, (0.25,), {}, 0.25),
        (optim.Adamax, (), {}, 0.001),
        (optim.Adam, (), {}, 0.001),
    ],
)
def test_learning_rates_that_nobody_gives_are_the_originals(
    agents: list[Agent],
    kind: type[Optimizer],
    args: tuple[float, ...],
    kwargs: dict[str, float],
    rate: float,
) -> None:
    optimizer = DistributedOptimizer(kind, [make("first")], *args, **kwargs)
    assert optimizer.remote_optimizers[0].to_here().optim.param_groups[0]["lr"] == rate


def test_one_owners_optimizer_can_be_stepped_alone_and_looked_at_from_afar(
    agents: list[Agent],
) -> None:
    parameters = [make("first", 0.0), make("second", 0.0)]
    optimizer = DistributedOptimizer(optim.SGD, parameters, lr=1.0, momentum=0.5)
    with autograd_dist.context() as context_id:
        differentiate(context_id, parameters, 1.0, 1.0)
        optimizer.remote_optimizers[0].rpc_sync().step(context_id)
    assert [p.to_here().item() for p in parameters] == [-1.0, 0.0]
    state = optimizer.remote_optimizers[0].to_here().optim.state_dict()["state"]
    assert state[0]["momentum_buffer"].item() == 1.0


def test_owners_make_and_step_their_optimizers_at_the_same_time(agents: list[Agent]) -> None:
    parameters = [make(owner) for owner in OWNERS]
    step_once(DistributedOptimizer(Meets, parameters), parameters, 1.0, 1.0)
    assert [p.to_here().tolist() for p in parameters] == [[0.0, 1.0]] * 2


def test_a_parameter_may_still_be_in_the_making(agents: list[Agent]) -> None:
    parameter = rpc.remote("first", slow_parameter)
    optimizer = DistributedOptimizer(optim.SGD, [parameter], lr=1.0)
    step_once(optimizer, [parameter], 1.0)
    assert parameter.to_here().item() == 0.0


def test_nothing_is_logged(agents: list[Agent], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        parameter = make("first")
        step_once(DistributedOptimizer(optim.SGD, [parameter], lr=1.0), [parameter], 1.0)
    assert not caplog.records


def test_the_local_optimizers_die_with_the_distributed_one(agents: list[Agent]) -> None:
    optimizer = DistributedOptimizer(optim.SGD, [make("first")], lr=1.0)
    assert agents[1].references.counts().num_owner_rrefs
    del optimizer
    assert eventually(lambda: not agents[1].references.counts().num_owner_rrefs)


# --- Several trainers


def train(parameters: list[rpc.RRef[torch.Tensor]], gradient: float, steps: int) -> None:
    """Does what a trainer does; runs as a handler."""
    optimizer = DistributedOptimizer(NoticesOthers, parameters, lr=1.0)
    for _ in range(steps):
        step_once(optimizer, parameters, gradient, 10 * gradient)


def test_concurrent_steps_of_several_trainers_do_not_mix(agents: list[Agent]) -> None:
    parameters = [make("first", 0.0), make("second", 0.0)]
    steps = 8
    trainers = ("trainer", "other", "trainer", "first")
    running = [
        rpc.rpc_async(trainer, train, (parameters, float(2**number), steps))
        for number, trainer in enumerate(trainers)
    ]
    for each in running:
        each.wait()
    total = steps * (1 + 2 + 4 + 8)
    assert [p.to_here().item() for p in parameters] == [-total, -10 * total]


# --- Errors


def test_an_error_in_a_constructor_has_its_type_and_names_the_owner(agents: list[Agent]) -> None:
    with pytest.raises(FileNotFoundError, match="Error creating optimizer") as caught:
        DistributedOptimizer(FailsToBeMade, [make("second")])
    assert "making the optimizer FailsToBeMade failed on 'second'\n" in str(caught.value)
    assert caught.value.errno == 2


def test_an_error_in_a_step_has_its_type_and_names_the_owner(agents: list[Agent]) -> None:
    parameter = make("first")
    optimizer = DistributedOptimizer(FailsToStep, [parameter])
    with pytest.raises(ValueError, match="Error running optimizer") as caught:
        step_once(optimizer, [parameter], 1.0)
    assert str(caught.value).startswith("the step of FailsToStep failed on 'first'\n")


def test_all_owners_that_fail_are_named(agents: list[Agent]) -> None:
    parameters = [make(owner) for owner in OWNERS]
    with pytest.raises(FileNotFoundError, match="failed on 'first', 'second'"):
        DistributedOptimizer(FailsToBeMade, parameters)
    optimizer = DistributedOptimizer(FailsToStep, parameters)
    with pytest.raises(ValueError, match="failed on 'first', 'second'"):
        step_once(optimizer, parameters, 1.0, 1.0)


def test_the_group_is_usable_after_a_failed_step(agents: list[Agent]) -> None:
    parameter = make("first", 0.0)
    failing = DistributedOptimizer(FailsToStep, [parameter])
    with pytest.raises(ValueError, match="Error running optimizer"):
        step_once(failing, [parameter], 1.0)
    step_once(DistributedOptimizer(optim.SGD, [parameter], lr=1.0), [parameter], 1.0)
    assert parameter.to_here().item() == -1.0
    assert rpc.rpc_sync("first", grad_of, (parameter,)) is None


def test_a_bad_hyperparameter_is_reported_by_torch_with_the_owner(agents: list[Agent]) -> None:
    with pytest.raises(ValueError, match=r"failed on 'first'\nfirst: Invalid learning rate: -1"):
        DistributedOptimizer(optim.SGD, [make("first")], lr=-1)
    with pytest.raises(
        TypeError, match=r"failed on 'first'\nfirst: .*unexpected keyword .*'speed'"
    ):
        DistributedOptimizer(optim.SGD, [make("first")], speed=3)


def test_a_parameter_that_could_not_be_made_is_reported(agents: list[Agent]) -> None:
    with pytest.raises(OSError, match="no memory for this parameter"):
        DistributedOptimizer(optim.SGD, [rpc.remote("first", fail_to_create)])


def test_a_value_that_is_no_tensor_is_reported_by_torch(agents: list[Agent]) -> None:
    with pytest.raises(TypeError, match="optimizer can only optimize Tensors"):
        DistributedOptimizer(optim.SGD, [rpc.remote("first", int, (3,))])


def test_a_parameter_given_twice_is_warned_about_by_torch(agents: list[Agent]) -> None:
    parameter = make("first", 0.0)
    with pytest.warns(UserWarning, match="duplicate parameters"):
        DistributedOptimizer(optim.SGD, [parameter, parameter], lr=1.0)


def test_a_lost_owner_is_named(agents: list[Agent]) -> None:
    parameters = [make(owner) for owner in OWNERS]
    optimizer = DistributedOptimizer(optim.SGD, parameters, lr=1.0)
    with autograd_dist.context() as context_id:
        differentiate(context_id, parameters, 1.0, 1.0)
        agents[2].shutdown(graceful=False)
        assert eventually(lambda: len(agents[0].group.living()) == 3)
        with pytest.raises(rpc.WorkerLostError, match="the step of SGD failed on 'second'"):
            optimizer.step(context_id)
    assert parameters[0].to_here().tolist() == [0.0, 1.0]


@pytest.mark.parametrize("context_id", [123456, -1])
def test_an_unknown_context_is_reported(agents: list[Agent], context_id: int) -> None:
    optimizer = DistributedOptimizer(optim.SGD, [make("first")], lr=1.0)
    with pytest.raises(
        RuntimeError, match=f"Could not find autograd context with id: {context_id}"
    ):
        optimizer.step(context_id)


def test_a_context_that_was_left_is_reported(agents: list[Agent]) -> None:
    parameter = make("first")
    optimizer = DistributedOptimizer(optim.SGD, [parameter], lr=1.0)
    with autograd_dist.context() as context_id:
        differentiate(context_id, [parameter], 1.0)
    with pytest.raises(RuntimeError, match="Could not find autograd context with id"):
        optimizer.step(context_id)
    assert parameter.to_here().tolist() == [1.0, 2.0]


# --- What is refused before anything is sent


def test_an_optimizer_of_no_parameters_steps_and_changes_nothing(agents: list[Agent]) -> None:
    optimizer = DistributedOptimizer(optim.SGD, [], lr=1.0)
    assert optimizer.remote_optimizers == []
    with autograd_dist.context() as context_id:
        optimizer.step(context_id)
    with pytest.raises(RuntimeError, match="Could not find autograd context"):
        optimizer.step(context_id)


def test_references_are_needed(agents: list[Agent]) -> None:
    with pytest.raises(TypeError, match=r"params_rref\[1\] must be an RRef .* is of type Tensor"):
        DistributedOptimizer(optim.SGD, [make("first"), torch.ones(1)], lr=1.0)  # type: ignore[list-item]
    for one in (make("first"), torch.ones(2)):
        with pytest.raises(TypeError, match="params_rref must be a list of RRefs, but got one"):
            DistributedOptimizer(optim.SGD, one, lr=1.0)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="params_rref must be a list of RRefs, but got 3"):
        DistributedOptimizer(optim.SGD, 3, lr=1.0)  # type: ignore[arg-type]


def test_the_optimizer_class_is_checked(agents: list[Agent]) -> None:
    with pytest.raises(TypeError, match=r"must be a subclass of torch\.optim\.Optimizer"):
        DistributedOptimizer(nn.Linear, [make("first")])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"LBFGS\.step needs closure"):
        DistributedOptimizer(optim.LBFGS, [make("first")])


def sgd(params: Sequence[torch.Tensor], lr: float) -> optim.SGD:
    return optim.SGD(params, lr=lr)


def test_a_function_may_make_the_optimizers(agents: list[Agent]) -> None:
    for made in (
        DistributedOptimizer(sgd, [make("first")], lr=0.5),
        DistributedOptimizer(partial(optim.SGD, lr=0.5), [make("first")]),
    ):
        assert len(made.remote_optimizers) == 1
    with pytest.raises(ValueError, match="making the optimizer sgd failed on 'first'"):
        DistributedOptimizer(sgd, [make("first")], lr=-1.0)


def test_an_argument_that_cannot_be_sent_is_named(agents: list[Agent]) -> None:
    with pytest.raises(TypeError, match=r"failed on 'first'\nfirst: .* cannot be sent"):
        DistributedOptimizer(optim.SGD, [make("first")], lr=threading.Lock())


def test_an_optimizer_of_an_earlier_session_is_stale_in_the_next() -> None:
    with local_group("trainer", *OWNERS) as agents, as_worker(agents[0]):
        parameters = [make(owner) for owner in OWNERS]
        old = DistributedOptimizer(optim.SGD, parameters, lr=0.1)
    with local_group("trainer", *OWNERS) as agents, as_worker(agents[0]):
        kept = [make(owner) for owner in OWNERS]
        DistributedOptimizer(optim.SGD, kept, lr=0.1)
        with autograd_dist.context() as context, pytest.raises(StaleRRefError, match="shut down"):
            old.step(context)
        with pytest.raises(StaleRRefError, match="shut down"):
            DistributedOptimizer(optim.SGD, parameters, lr=0.1)
