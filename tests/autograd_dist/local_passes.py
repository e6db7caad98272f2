"""One worker's share of a pass, driven by hand."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch.autograd.graph import get_gradient_edge

from autograd_dist.border import SentTensor
from autograd_dist.grad_fields import GradFields
from autograd_dist.gradients import LeafGradients
from autograd_dist.local_engine import LocalPass
from autograd_dist.recv_node import Origin, attach_recv

CONTEXT = 3


PEER = 1


class Node:
    """A worker whose peer is played by the test."""

    def __init__(self, context_id=CONTEXT):
        self.context_id = context_id
        self.sends = {}
        self.leaves = LeafGradients()
        self.departed = {}
        self.last = []
        self.grad_fields = GradFields()

    def send(self, *tensors):
        self.sends[len(self.sends) + 1] = [SentTensor.of(t) for t in tensors]
        return len(self.sends)

    def receive(self, message_id, *tensors):
        return attach_recv(Origin(self.context_id, PEER, message_id), [t.clone() for t in tensors])

    def depart(self, origin, grads, is_last):
        self.departed[origin.message_id] = grads
        self.last.append((origin.message_id, is_last))

    def start(self, *roots, retain_graph=False):
        local = LocalPass(
            self.context_id,
            self.sends,
            self.leaves,
            self.depart,
            self.grad_fields,
            retain_graph=retain_graph,
        )
        if roots:
            local.add_roots(
                [get_gradient_edge(r) for r in roots], [torch.ones_like(r) for r in roots]
            )
            local.run_wave()
        return local

    def gradient(self, leaf):
        return self.leaves.snapshot().get(leaf)


def param(*values):
    return torch.tensor(values or (1.0, 2.0), requires_grad=True)


class Counter:
    def __init__(self, change=lambda gradient: None):
        self.seen = []
        self.change = change

    def __call__(self, gradient):
        self.seen.append(gradient.clone())
        return self.change(gradient)


class Counted(torch.autograd.Function):
    """Doubles; counts how often its backward runs."""

    @staticmethod
    def forward(ctx, x, log):
        ctx.log = log
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        ctx.log.append(1)
        return gradient * 2, None


def skip_connection(hook=None):
    """``h`` is sent and also used locally; the answer to it comes back as ``y``."""
    node, w = Node(), param()
    h = w * w
    if hook is not None:
        h.register_hook(hook)
    sent = node.send(h)
    (y,) = node.receive(5, h.detach().clone())
    return SimpleNamespace(node=node, w=w, h=h, sent=sent, y=y)
