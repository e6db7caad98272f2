"""One owner's step: the numbers of torch.optim, and nothing left behind in ``.grad``."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from torch import optim
from torch.optim import Optimizer

from autograd_dist.grad_fields import GradFields
from optim_dist.local_optimizer import LocalOptimizer, require_usable
from tests.waiting import until

STEPS = 4

DENSE: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {"lr": 0.05}),
    ("SGD", {"lr": 0.05, "momentum": 0.9}),
    ("SGD", {"lr": 0.05, "momentum": 0.9, "nesterov": True}),
    ("SGD", {"lr": 0.05, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.1}),
    ("SGD", {"lr": 0.05, "maximize": True, "foreach": True, "weight_decay": 0.1}),
    ("Adam", {"lr": 0.01}),
    ("Adam", {"lr": 0.01, "amsgrad": True, "weight_decay": 0.1}),
    ("Adam", {"lr": 0.01, "fused": True}),
    ("AdamW", {"lr": 0.05, "amsgrad": True}),
    ("Adagrad", {"lr": 0.05}),
    ("Adadelta", {"rho": 0.95}),
    ("RMSprop", {"lr": 0.05, "centered": True, "momentum": 0.5}),
    ("Adamax", {"lr": 0.05}),
    ("Rprop", {"lr": 0.05}),
    ("NAdam", {"lr": 0.05}),
    ("RAdam", {"lr": 0.05}),
    ("ASGD", {"lr": 0.05}),
    ("Adafactor", {"lr": 0.05}),
    ("Muon", {"lr": 0.05}),
]
SPARSE: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {"lr": 0.05}),
    ("SGD", {"lr": 0.05, "momentum": 0.9}),
    ("SparseAdam", {"lr": 0.05}),
    ("Adagrad", {"lr": 0.05}),
]


def named(case: object) -> str:
    return case if isinstance(case, str) else "-".join(map(str, case)) if case else ""  # type: ignore[call-overload]


def optimizer_class(name: str) -> type[Optimizer]:
    found = getattr(optim, name, None)
    if found is None:
        pytest.skip(f"this torch has no {name}")
    kind: type[Optimizer] = found
    return kind


def parameters() -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [torch.nn.Parameter(torch.rand(4, 3, generator=generator)) for _ in range(3)]


def dense_gradients(step: int) -> list[torch.Tensor | None]:
    generator = torch.Generator().manual_seed(100 + step)
    first, second = (torch.randn(4, 3, generator=generator) for _ in range(2))
    return [first, second if step % 2 else None, None]


def sparse_gradients(step: int) -> list[torch.Tensor | None]:
    generator = torch.Generator().manual_seed(100 + step)
    values = torch.randn(3, 3, generator=generator)
    rows = torch.tensor([[step % 4, (step + 1) % 4, step % 4]])
    return [torch.sparse_coo_tensor(rows, values, (4, 3)), None, None]


def make(kind: Callable[..., Any], params: Any, *args: Any, **kwargs: Any) -> LocalOptimizer:
    return LocalOptimizer(kind, params, args, kwargs, GradFields())


def step_locally(
    kind: type[Optimizer], kwargs: dict[str, Any], gradients: Callable[[int], Any]
) -> list[torch.nn.Parameter]:
    params = parameters()
    optimizer = kind(params, **kwargs)
    for step in range(STEPS):
        for parameter, gradient in zip(params, gradients(step), strict=True):
            parameter.grad = gradient
        optimizer.step()
    return params


def step_ours(
    kind: type[Optimizer], kwargs: dict[str, Any], gradients: Callable[[int], Any]
) -> list[torch.nn.Parameter]:
    params = parameters()
    optimizer = make(kind, params, **kwargs)
    for step in range(STEPS):
        pairs = zip(params, gradients(step), strict=True)
        optimizer.step_with({p: gradient for p, gradient in pairs if gradient is not None})
    return params


@pytest.mark.parametrize(("name", "kwargs"), DENSE, ids=named)
def test_dense_gradients_give_the_numbers_of_torch(name: str, kwargs: dict[str, Any]) -> None:
    kind = optimizer_class(name)
    theirs = step_locally(kind, kwargs, dense_gradients)
    ours = step_ours(kind, kwargs, dense_gradients)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    assert not torch.equal(ours[0], parameters()[0])


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")  # Adagrad's own
@pytest.mark.parametrize(("name", "kwargs"), SPARSE, ids=named)
def test_sparse_gradients_give_the_numbers_of_torch(name: str, kwargs: dict[str, Any]) -> None:
    kind = optimizer_class(name)
    theirs = step_locally(kind, kwargs, sparse_gradients)
    ours = step_ours(kind, kwargs, sparse_gradients)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    assert not torch.equal(ours[0], parameters()[0])


def test_every_optimizer_of_torch_is_compared_here() -> None:
    exported = {
        name
        for name, kind in vars(optim).items()
        if isinstance(kind, type) and issubclass(kind, Optimizer) and kind is not Optimizer
    }
    assert exported <= {name for name, _ in DENSE + SPARSE} | {"LBFGS"}


def test_parameters_without_gradient_stay_even_if_grad_is_set() -> None:
    params = parameters()
    params[1].grad = torch.ones(4, 3)
    make(optim.SGD, params, lr=1.0, weight_decay=0.5, momentum=0.9).step_with(
        {params[0]: params[0] * 0}
    )
    torch.testing.assert_close(params[1:], parameters()[1:], rtol=0, atol=0)


def test_a_step_leaves_every_grad_as_it_was() -> None:
    params = parameters()
    before = torch.ones(4, 3)
    params[0].grad, params[1].grad = before, before
    gradient = torch.full((4, 3), 2.0)
    make(optim.SGD, params, lr=1.0).step_with({params[0]: gradient, params[2]: gradient})
    assert params[0].grad is before
    assert params[1].grad is before
    assert params[2].grad is None
    assert torch.equal(before, torch.ones(4, 3))
    assert torch.equal(gradient, torch.full((4, 3), 2.0))


class Failing(Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:
        assert self.param_groups[0]["params"][0].grad is not None
        raise ValueError("Error running optimizer.")


def test_a_failed_step_restores_grad_and_frees_the_lock() -> None:
    params = parameters()
    before = torch.ones(4, 3)
    params[0].grad = before
    optimizer = make(Failing, params)
    for _ in range(2):
        with pytest.raises(ValueError, match="Error running optimizer"):
            optimizer.step_with({params[0]: torch.zeros(4, 3)})
    assert params[0].grad is before


def test_a_gradient_that_does_not_fit_restores_every_grad() -> None:
    params = parameters()
    before = torch.ones(4, 3)
    params[0].grad = before
    optimizer = make(optim.SGD, params)
    with pytest.raises(RuntimeError):
        optimizer.step_with({params[0]: torch.zeros(4, 3), params[1]: torch.zeros(5)})
    assert params[0].grad is before
    assert params[1].grad is None


class Marked(torch.nn.Parameter):
    """Of a kind of its own, so that nothing stands for it."""


class Precise(Optimizer):
    """Makes its first parameter more precise, so that what was its gradient does not fit."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:
        first = self.param_groups[0]["params"][0]
        first.grad = None
        first.data = first.data.double()


def test_a_grad_that_cannot_be_restored_costs_no_other_parameter_its_own() -> None:
    params = [Marked(parameter.detach()) for parameter in parameters()]
    for parameter in params:
        parameter.grad = torch.ones_like(parameter)
    others = [parameter.grad for parameter in params[1:]]
    with pytest.raises(RuntimeError):
        make(Precise, params).step_with({})
    assert params[0].grad is None
    assert all(p.grad is other for p, other in zip(params[1:], others, strict=True))


class Widening(Optimizer):
    """Makes its first parameter more precise, and replaces it with what its gradient says."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:
        first = self.param_groups[0]["params"][0]
        first.data = first.data.double() - first.grad


def test_parameters_follow_an_optimizer_that_replaces_their_data() -> None:
    params = parameters()
    seen = params[0].detach()
    optimizer = make(Widening, params)
    for step in (1, 2):
        version = params[0]._version
        optimizer.step_with({params[0]: torch.ones(4, 3).to(params[0].dtype)})
        assert params[0]._version > version, "autograd notices"
        assert torch.equal(params[0], (seen.double() - step))


def test_a_step_follows_parameters_whose_data_was_replaced() -> None:
    params = parameters()
    optimizer = make(optim.SGD, params, lr=1.0, momentum=0.5)
    gradients = {params[0]: torch.ones(4, 3)}
    optimizer.step_with(gradients)
    params[0].data = torch.zeros(4, 3)
    kept = (params[0] * params[0]).sum()
    optimizer.step_with(gradients)
    assert params[0].tolist() == [[-1.5] * 3] * 4
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        kept.backward()


def test_autograd_notices_a_step() -> None:
    params = parameters()
    kept = (params[0] * params[0]).sum()
    make(optim.SGD, params).step_with({params[0]: torch.ones(4, 3)})
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        kept.backward()


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="this torch has none")
def test_a_gradient_may_have_the_dtype_that_its_parameter_allows() -> None:
    parameter: Any = torch.nn.Parameter(torch.ones(2, dtype=torch.float64))
    optimizer = make(optim.SGD, [parameter], lr=1.0)
    gradients = {parameter: torch.ones(2)}
    with pytest.raises(RuntimeError, match="dtype"):
        optimizer.step_with(gradients)
    parameter.grad_dtype = None
    optimizer.optim = Descent([*optimizer._shadows.tensors], lr=1.0)
    optimizer.step_with(gradients)
    assert parameter.tolist() == [0.0, 0.0]


def test_parameters_without_memory_may_be_stepped() -> None:
    parameter = torch.nn.Parameter(torch.ones(2, device="meta"))
    optimizer = make(optim.SGD, [parameter], lr=1.0)
    for gradients in ({}, {parameter: torch.ones(2, device="meta")}):
        optimizer.step_with(gradients)
    assert parameter.is_meta


def test_a_parameter_that_is_given_twice_is_one() -> None:
    params = parameters()[:1]
    with pytest.warns(UserWarning, match="duplicate parameters"):
        make(optim.SGD, params * 2)


def test_what_marks_a_parameter_can_be_seen_by_its_optimizer() -> None:
    params: Any = parameters()
    params[0].is_bias = True
    optimizer = make(optim.SGD, params)
    params[1].is_bias = False
    given = optimizer.optim.param_groups[0]["params"]
    assert [getattr(each, "is_bias", None) for each in given] == [True, False, None]


def test_parameters_that_are_of_a_kind_of_their_own_are_stepped_and_keep_their_grad() -> None:
    parameter, before = Marked(torch.ones(2)), torch.ones(2)
    parameter.grad = before
    optimizer = make(optim.SGD, [parameter], lr=1.0)
    assert optimizer.optim.param_groups[0]["params"][0] is parameter
    optimizer.step_with({parameter: torch.ones(2)})
    assert parameter.tolist() == [0.0, 0.0]
    assert parameter.grad is before


def test_local_training_goes_on_in_another_thread_during_steps() -> None:
    parameter = torch.zeros(3, requires_grad=True)
    optimizer = make(optim.SGD, [parameter], lr=1.0)
    over, wrong = threading.Event(), []

    def train() -> int:
        passes = 0
        while not over.is_set() or passes < 100:
            factor = torch.full((3,), float(passes))
            parameter.grad = None
            (parameter * factor).sum().backward()
            if parameter.grad is None or not torch.equal(parameter.grad, factor):
                wrong.append(passes)
            passes += 1
        return passes

    with ThreadPoolExecutor(1) as threads:
        training = threads.submit(train)
        try:
            for _ in range(500):
                optimizer.step_with({parameter: torch.ones(3)})
        finally:
            over.set()
        assert training.result(timeout=20) >= 100
    assert not wrong
    assert parameter.tolist() == [-500.0] * 3


def test_gradients_of_other_tensors_are_ignored() -> None:
    params = parameters()
    other = torch.ones(2, requires_grad=True)
    make(optim.SGD, params).step_with({other: torch.ones(2)})
    torch.testing.assert_close(params, parameters(), rtol=0, atol=0)
    assert other.grad is None


def test_parameters_added_later_are_stepped_too() -> None:
    params = parameters()
    optimizer = make(optim.SGD, params[:1], lr=1.0)
    optimizer.optim.add_param_group({"params": params[1:], "lr": 2.0})
    optimizer.step_with({params[2]: torch.ones(4, 3)})
    torch.testing.assert_close(params[2].detach(), parameters()[2].detach() - 2)


def test_nobody_else_uses_the_gradients_of_its_parameters_during_a_step() -> None:
    fields, params = GradFields(), parameters()[:1]
    optimizer = LocalOptimizer(optim.SGD, params, (), {}, fields)
    other = make(optim.SGD, parameters())
    order = []

    def use() -> None:
        with fields.used(params):
            order.append("used")

    with ThreadPoolExecutor(2) as threads:

        def meanwhile(*_: object) -> None:
            threads.submit(other.step_with, {}).result(timeout=20)
            threads.submit(use)
            until(lambda: fields.waiting == 1)
            order.append("stepped")

        optimizer.optim.register_step_pre_hook(meanwhile)
        optimizer.step_with({params[0]: torch.zeros(4, 3)})
    assert order == ["stepped", "used"]


def test_positional_arguments_reach_the_constructor() -> None:
    assert make(optim.SGD, parameters(), 0.25, 0.5).optim.defaults["momentum"] == 0.5


# --- What is refused before anything is made


@pytest.mark.parametrize("thing", ["SGD", 3, None, torch.nn.Linear])
def test_what_makes_no_optimizers_is_refused(thing: object) -> None:
    with pytest.raises(TypeError, match=r"must be a subclass of torch\.optim\.Optimizer or"):
        require_usable(thing)


def test_what_a_function_made_must_have_a_step() -> None:
    with pytest.raises(TypeError, match=r"<lambda> made 3, which has no step\(\)"):
        make(lambda params: 3, parameters())


class Descent:
    """Has a step, and knows nothing of torch's optimizers."""

    def __init__(self, params: Sequence[torch.Tensor], lr: float) -> None:
        self.params, self.lr = params, lr

    def step(self) -> None:
        with torch.no_grad():
            for parameter in self.params:
                if parameter.grad is not None:
                    parameter -= self.lr * parameter.grad


def descent(params: Sequence[torch.Tensor]) -> optim.SGD:
    return optim.SGD(params, lr=0.5)


@pytest.mark.parametrize("kind", [partial(optim.SGD, lr=0.5), descent, partial(Descent, lr=0.5)])
def test_whatever_makes_something_with_a_step_is_usable(kind: Callable[..., Any]) -> None:
    require_usable(kind)
    first, second = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    make(kind, [first, second]).step_with({first: torch.ones(2)})
    assert (first.tolist(), second.tolist()) == ([0.5, 0.5], [1.0, 1.0])
    assert first.grad is None


def test_a_class_that_only_looks_like_an_optimizer_is_usable() -> None:
    require_usable(Descent)


def test_an_optimizer_that_needs_a_closure_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"LBFGS\.step needs closure, to evaluate the loss again"):
        require_usable(optim.LBFGS)


class Variadic(optim.SGD):
    def step(self, *args: Any, **kwargs: Any) -> None:
        super().step(*args, **kwargs)


@pytest.mark.parametrize("kind", [optim.SGD, Variadic, Failing, Optimizer])
def test_any_other_optimizer_is_usable(kind: type[Optimizer]) -> None:
    require_usable(kind)
