"""Calls in a context under no_grad and the like, and tensors that torch takes for constants."""

from __future__ import annotations

import asyncio

import pytest
import torch
from torch.futures import Future as TorchFuture

import autograd_dist
import rpc
from autograd_dist import gradients
from rpc.errors import EncodeError
from rpc.functions import async_execution
from tests.autograd_dist.passes import (
    echo,
    leaf,
    square,
)

MODES = [torch.no_grad, torch.inference_mode]


def double_with_gradients(x):
    with torch.enable_grad():
        return x * 2


def double_of(reference):
    return reference.to_here() * 2


@async_execution
def double_later(x):
    future = TorchFuture()
    future.set_result(x * 2)
    return future


async def double_in_steps(x):
    await asyncio.sleep(0)
    return x * 2


def double_at(name, x):
    return rpc.rpc_sync(name, double_in_steps, (x,))


def double_by_remote(x):
    return rpc.remote("bob", torch.mul, (x, 2))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "call",
    [
        lambda x: rpc.rpc_sync("bob", torch.mul, (x, 2)),
        lambda x: rpc.rpc_async("bob", torch.mul, (x, 2)).wait(),
        lambda x: rpc.remote("bob", torch.mul, (x, 2)).to_here(),
        lambda x: rpc.RRef(x).rpc_sync().mul(2),
        lambda x: rpc.rpc_sync("bob", double_of, (rpc.RRef(x),)),
        lambda x: rpc.rpc_sync("bob", double_later, (x,)),
        lambda x: rpc.rpc_sync("bob", double_in_steps, (x,)),
        lambda x: rpc.rpc_sync("bob", double_at, ("carol", x)),
    ],
    ids=["sync", "async", "remote", "proxy", "reference", "future", "coroutine", "nested"],
)
def test_what_is_computed_in_a_call_without_gradients_is_a_constant(workers, mode, call):
    x = leaf()
    with autograd_dist.context() as context_id:
        with mode():
            y = call(x)
        assert not y.requires_grad
        if mode is torch.no_grad:
            autograd_dist.backward(context_id, [(y.clone() * x).sum()])
            assert autograd_dist.get_gradients(context_id)[x].tolist() == [2.0, 4.0]


def test_a_value_made_remotely_without_gradients_stays_a_constant(workers):
    x = leaf()
    with autograd_dist.context() as context_id:
        with torch.no_grad():
            made = double_by_remote(x)
        autograd_dist.backward(context_id, [(rpc.rpc_sync("bob", double_of, (made,)) + x).sum()])
        assert autograd_dist.get_gradients(context_id)[x].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("mode", MODES)
def test_what_only_passes_through_a_call_without_gradients_keeps_its_own(workers, mode):
    x = leaf()
    with autograd_dist.context() as context_id:
        with mode():
            same = rpc.rpc_sync("bob", echo, (x,))
        assert same.requires_grad
        for _ in range(2):
            autograd_dist.backward(context_id, [(same * x).sum()], retain_graph=True)
        assert autograd_dist.get_gradients(context_id)[x].tolist() == [4.0, 8.0]


def test_a_handler_may_turn_gradients_on_again(workers):
    x = leaf()
    with autograd_dist.context() as context_id:
        with torch.no_grad():
            y = rpc.rpc_sync("bob", double_with_gradients, (x,))
        autograd_dist.backward(context_id, [(y * x).sum()])
        assert autograd_dist.get_gradients(context_id)[x].tolist() == [4.0, 8.0]


def test_no_call_without_gradients_leaves_its_mode_behind(workers):
    with autograd_dist.context():
        with torch.no_grad():
            for function in (square, double_in_steps):
                rpc.rpc_sync("bob", function, (leaf(),))
        for function in (square, double_in_steps):
            assert rpc.rpc_sync("bob", function, (leaf(),)).requires_grad


def test_what_was_made_in_inference_mode_is_no_part_of_a_graph(workers):
    x = leaf()
    with autograd_dist.context(), torch.inference_mode():
        assert not rpc.rpc_sync("bob", echo, (x.clone(),)).requires_grad


def test_a_leaf_made_in_inference_mode_is_sent_as_torch_uses_it(workers):
    with torch.inference_mode():
        x = leaf()
    assert not (x * x).requires_grad
    with autograd_dist.context() as context_id:
        autograd_dist.backward(context_id, [rpc.rpc_sync("bob", square, (x,)).sum()])
        assert autograd_dist.get_gradients(context_id) == {}


CONSTANTS_THAT_REQUIRE_GRAD = {
    "view made under no_grad": (torch.no_grad, lambda: leaf()[:1]),
    "leaf made in inference mode": (torch.inference_mode, leaf),
}


def make_constant(kind):
    mode, make = CONSTANTS_THAT_REQUIRE_GRAD[kind]
    with mode():
        return make()


def count_gradients(context_id):
    return len(autograd_dist.get_gradients(context_id))


@pytest.mark.parametrize("kind", CONSTANTS_THAT_REQUIRE_GRAD)
@pytest.mark.parametrize("direction", ["argument", "result"])
def test_what_torch_takes_for_a_constant_gets_no_gradient_anywhere(workers, kind, direction):
    x = leaf()
    with autograd_dist.context() as context_id:
        if direction == "argument":
            constant = rpc.rpc_sync("bob", square, (make_constant(kind),))
        else:
            constant = rpc.rpc_sync("bob", make_constant, (kind,))
        autograd_dist.backward(context_id, [(x * constant).sum()])
        assert list(autograd_dist.get_gradients(context_id)) == [x]
        assert rpc.rpc_sync("bob", count_gradients, (context_id,)) == 0


def test_a_leaf_that_is_a_view_gets_its_gradient(workers):
    x = torch.ones(3, 2)[1].requires_grad_()
    with autograd_dist.context() as context_id:
        autograd_dist.backward(context_id, [rpc.rpc_sync("bob", square, (x,)).sum()])
        assert autograd_dist.get_gradients(context_id)[x].tolist() == [2.0, 2.0]


def test_a_call_inside_a_transform_of_torch_says_where_to_make_it(workers):
    x = leaf()
    with autograd_dist.context() as context_id:
        with pytest.raises(EncodeError, match=r"shape \(2,\).*make the call outside"):
            torch.func.grad(lambda v: (v * rpc.rpc_sync("bob", square, (x,))).sum())(torch.ones(2))
        autograd_dist.backward(context_id, [rpc.rpc_sync("bob", square, (x,)).sum()])
        assert autograd_dist.get_gradients(context_id)[x].tolist() == [2.0, 4.0]


def test_a_pass_does_not_depend_on_the_default_device(workers):
    x = leaf()
    gradients.yardstick.cache_clear()
    with torch.device("meta"), autograd_dist.context() as context_id:
        autograd_dist.backward(context_id, [rpc.rpc_sync("bob", square, (x,)).sum()])
        assert autograd_dist.get_gradients(context_id)[x].tolist() == [2.0, 4.0]


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_whose_memory_is_whose_does_not_depend_on_the_mode_of_the_first_look(mode):
    usual = gradients.yardstick().exclusive
    gradients.yardstick.cache_clear()
    with mode():
        assert gradients.yardstick().exclusive == usual
    view, plain = torch.ones(2).view(1, 2), torch.ones(2)
    alias = plain.detach()
    assert gradients.yardstick().uses_of(view) in usual
    assert gradients.yardstick().uses_of(plain) not in usual
    del alias
    assert gradients.yardstick().uses_of(plain) in usual
