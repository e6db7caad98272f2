"""Hooks of tensors where runs border on nodes that must wait, and how tensors are described."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
import torch
from torch.autograd.graph import get_gradient_edge

from autograd_dist.border import Border, SentTensor
from autograd_dist.engine_run import running


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
