"""Hooks of tensors where runs border on nodes that must wait, and how tensors are described."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
import torch
from torch.autograd.graph import get_gradient_edge

from autograd_dist.border import Border, SentTensor
from autograd_dist.engine_run import running
from tests.autograd_dist.local_passes import Node


class Run:
    """A run that does nothing."""

    def received_gradients(self, origin, gradients):
        raise AssertionError("nothing was received")


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_however_runs_overlap_each_keeps_the_hooks_quiet_and_leaves_none_changed(order):
    leaf = torch.ones(2, requires_grad=True)
    seen = []
    leaf.register_hook(seen.append)
    hooks = dict(leaf._backward_hooks)
    (key,) = hooks
    runs = [Run() for _ in order]
    blocks = [ExitStack() for _ in order]
    for run, block in zip(runs, blocks, strict=True):
        border = Border(run, {get_gradient_edge(leaf).node}, ())
        block.enter_context(border.watched(()))
    for number in order:
        with running(runs[number]):
            leaf._backward_hooks[key](torch.zeros(2))
        assert seen == []
        blocks[number].close()
    assert dict(leaf._backward_hooks) == hooks


def test_a_hook_that_is_removed_during_a_run_stays_removed():
    leaf = torch.ones(2, requires_grad=True)
    handle = leaf.register_hook(lambda gradient: None)
    with Border(Run(), {get_gradient_edge(leaf).node}, ()).watched(()):
        handle.remove()
    assert not leaf._backward_hooks


def test_describing_a_leaf_leaves_its_hooks_to_those_who_register_them():
    leaf = torch.ones(2, requires_grad=True)
    SentTensor.of(leaf)
    assert leaf._backward_hooks is None


@pytest.mark.parametrize("described", [False, True])
def test_a_tensor_that_was_described_treats_hooks_as_any_other(described):
    leaf = torch.ones(2, requires_grad=True)
    tensor = leaf * 2
    if described:
        SentTensor.of(tensor)
    seen = []
    handle = tensor.register_hook(lambda gradient: seen.append(gradient.tolist()) or gradient * 5)
    tensor.register_hook(lambda gradient: seen.append(gradient.tolist()))
    tensor.retain_grad()
    tensor.sum().backward(retain_graph=True)
    handle.remove()
    tensor.sum().backward()
    assert seen == [[1.0, 1.0], [5.0, 5.0], [1.0, 1.0]]
    assert leaf.grad.tolist() == [12.0, 12.0]
    assert tensor.grad.tolist() == [6.0, 6.0]


def test_hooks_that_come_after_a_tensor_was_described_are_known():
    tensor = torch.ones(2, requires_grad=True) * 2
    described = SentTensor.of(tensor)
    tensor.register_hook(print)
    assert list(described.hooks.values()) == [print]


class Starts(torch.autograd.Function):
    """Changes nothing; its backward starts what it is given."""

    @staticmethod
    def forward(ctx, tensor, start):
        ctx.start = start
        return tensor.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.start()
        return gradient, None


STARTERS = {
    "a hook": lambda tensor, start: tensor.register_hook(lambda _: start()) and tensor,
    "a hook of the node": lambda tensor, start: (
        tensor.grad_fn.register_prehook(lambda _: start()) and tensor
    ),
    "a function": Starts.apply,
    "nobody": lambda tensor, start: tensor,
}


class InnerRun:
    """A computation in whose backward another is run, from ``y`` to ``t``, and its outcome.

    Args:
        send: gives what comes back from another worker for a tensor sent there.
        is_leaf: whether the tensor that is sent is a leaf.
        starter: what starts the inner run.
        is_early: whether that is the first thing that runs.
    """

    def __init__(self, send, is_leaf, starter, is_early):
        self.x = torch.tensor([1.0, 2.0], requires_grad=True)
        self.t = self.x if is_leaf else self.x * 1.0
        self.seen, self.inner = [], []
        self.t.register_hook(lambda gradient: self.seen.append(gradient.tolist()))
        if not is_leaf:
            self.t.retain_grad()
        came_back = send(self.t)
        self.y = self.t * self.t
        late = self.y * 3 if is_early else STARTERS[starter](self.y * 3, self.start)
        loss = late.sum() + came_back.sum()
        self.loss = STARTERS[starter](loss, self.start) if is_early else loss

    def start(self):
        edge, hundreds = get_gradient_edge(self.y), torch.full((2,), 100.0)
        self.inner += torch.autograd.grad(edge, self.t, hundreds, retain_graph=True)


@pytest.mark.parametrize("is_early", [False, True])
@pytest.mark.parametrize("starter", STARTERS)
@pytest.mark.parametrize("is_leaf", [False, True])
def test_a_run_that_something_in_a_pass_starts_is_as_in_torch_and_no_part_of_the_pass(
    is_leaf, starter, is_early
):
    plain = InnerRun(torch.clone, is_leaf, starter, is_early)
    plain.loss.backward()
    node = Node()

    def send(tensor):
        node.send(tensor)
        return node.receive(5, tensor.detach())[0]

    ours = InnerRun(send, is_leaf, starter, is_early)
    local = node.start(ours.loss)
    local.add_gradients(1, node.departed[5])
    local.run_wave()
    assert node.gradient(ours.x).tolist() == plain.x.grad.tolist()
    assert ours.seen == plain.seen
    assert str(ours.inner) == str(plain.inner)
    if not is_leaf:
        assert ours.t.grad.tolist() == plain.t.grad.tolist()
