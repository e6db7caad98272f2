"""Tensors retain gradients, and nodes run once, though parts of a pass come twice or in pieces."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.autograd.graph import get_gradient_edge

from autograd_dist.engine_run import running
from autograd_dist.retained import retained_is_kept
from tests.autograd_dist.local_passes import Counted, Counter, Node, param, skip_connection


def nested_border(x):
    """``h`` is made of ``x``, both are sent and used here with what was received."""
    node = Node()
    h = x * 3
    sends = [node.send(x), node.send(h)]
    (y,) = node.receive(5, torch.ones(2))
    return SimpleNamespace(node=node, x=x, h=h, y=y, sends=sends)


@pytest.mark.parametrize("is_observed", [False, True])
def test_what_leads_only_to_what_is_finished_runs_once_though_the_wave_is_replayed(is_observed):
    w, head, log = param(), param(), []
    head.grad = torch.tensor([9.0, 9.0])
    hook = Counter()
    head.register_hook(hook)
    if is_observed:
        w.register_post_accumulate_grad_hook(lambda p: None)
    case = nested_border(w * 2)
    m = Counted.apply(case.y, log)
    m.retain_grad()
    spine = (m + head * 5) + case.h
    spine.retain_grad()
    local = case.node.start((spine + case.x).sum())
    assert case.node.departed[5][0].tolist() == [2.0, 2.0]
    for sent in case.sends:
        local.add_gradients(sent, [torch.tensor([7.0, 7.0])])
    local.run_wave()
    assert case.node.gradient(w).tolist() == [2 * (3 * (1 + 7.0) + 1 + 7)] * 2
    assert case.node.gradient(head).tolist() == [5.0, 5.0]
    assert head.grad.tolist() == [9.0, 9.0]
    assert (len(log), len(hook.seen)) == (1, 1)
    assert [each.grad.tolist() for each in (m, spine)] == [[1.0, 1.0]] * 2


def test_a_sent_tensor_retains_its_whole_gradient():
    case = skip_connection()
    case.h.retain_grad()
    case.y.retain_grad()
    local = case.node.start((case.h * case.y).sum())
    local.add_gradients(case.sent, case.node.departed[5])
    local.run_wave()
    assert case.h.grad.tolist() == [2.0, 8.0]
    assert case.y.grad.tolist() == [1.0, 4.0]


def test_a_tensor_behind_the_border_retains_its_whole_gradient_in_every_pass():
    node, w = Node(), param()
    _, b = (w * 2).unbind()
    b.retain_grad()
    sent = node.send(b * 3)
    (y,) = node.receive(5, torch.tensor(1.0))
    loss = b + y
    for number in (1, 2):
        local = node.start(loss, retain_graph=True)
        local.add_gradients(sent, [torch.tensor(2.0)])
        local.run_wave()
        assert b.grad.item() == number * (1 + 6.0)


class Run:
    """A run that does nothing."""

    def received_gradients(self, origin, gradients):
        raise AssertionError("nothing was received")


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_what_a_tensor_retains_is_kept_whatever_the_mode_a_run_begins_in(mode):
    run, tensor = Run(), (torch.ones(2, requires_grad=True) * 2).unbind()[1]
    tensor.retain_grad()
    loss = tensor * 5
    with mode(), retained_is_kept(run, [tensor.grad_fn]), running(run):
        torch.autograd.grad(loss, [get_gradient_edge(tensor)])
    assert tensor.grad.item() == 0.0
