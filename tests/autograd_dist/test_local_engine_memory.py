"""The memory of leaf gradients: copied where something else sees it, and nowhere else."""

from __future__ import annotations

import torch

from tests.autograd_dist.local_passes import (
    Node,
    param,
)


def test_gradients_of_leaves_do_not_share_memory():
    node, a, b = Node(), param(), param()
    gradient = torch.ones(2)
    sent = node.send(a + b)
    local = node.start()
    local.add_gradients(sent, [gradient])
    local.run_wave()
    node.gradient(a).mul_(100)
    assert node.gradient(b).tolist() == [1.0, 1.0]
    assert gradient.tolist() == [1.0, 1.0]


def test_gradient_kept_by_a_hook_does_not_change_when_more_is_added():
    node, w = Node(), param()
    kept = []
    w.register_hook(kept.append)
    loss = (w * w).sum()
    node.start(loss, retain_graph=True)
    node.start(loss)
    assert [g.tolist() for g in kept] == [[2.0, 4.0], [2.0, 4.0]]


def gradient_of_a_weight(note):
    """The gradient of a linear layer's weight, after ``note`` saw what the engine computed."""
    node, weight = Node(), torch.zeros(3, 4, requires_grad=True)
    out = torch.nn.functional.linear(torch.ones(2, 4), weight)
    out.grad_fn.next_functions[-1][0].register_hook(lambda outgoing, _: note(outgoing[0]))
    node.start(out.sum())
    return node.gradient(weight)


def test_gradient_of_a_large_leaf_is_not_copied():
    addresses = []
    gradient = gradient_of_a_weight(lambda computed: addresses.append(computed.data_ptr()))
    assert [gradient.data_ptr()] == addresses


def test_a_gradient_whose_memory_something_else_sees_is_copied():
    kept = []
    gradient = gradient_of_a_weight(lambda computed: kept.append(computed.detach()))
    assert gradient.data_ptr() != kept[0].data_ptr()
    assert gradient.equal(kept[0])


def seen_by(node, weight, keep=lambda gradient: None):
    """Addresses of the values of a sparse gradient before and after the pass that made it."""
    addresses, index = [], torch.tensor([1, 3])
    out = torch.nn.functional.embedding(index, weight, sparse=True)

    def note(outgoing, _):
        addresses.append(outgoing[0]._values().data_ptr())
        keep(outgoing[0])

    out.grad_fn.register_hook(note)
    node.start((out * 2).sum())
    gradient = node.gradient(weight)
    assert gradient.to_dense()[:, 0].tolist() == [0.0, 2.0, 0.0, 2.0]
    assert gradient._indices().data_ptr() != index.data_ptr()
    return addresses[0], gradient._values().data_ptr()


def test_the_values_of_a_sparse_gradient_are_not_copied():
    before, after = seen_by(Node(), torch.zeros(4, 2, requires_grad=True))
    assert before == after


def test_the_values_of_a_sparse_gradient_that_something_else_sees_are_copied():
    kept = []
    before, after = seen_by(
        Node(), torch.zeros(4, 2, requires_grad=True), lambda g: kept.append(g._values())
    )
    assert before != after


def test_of_two_leaves_that_share_a_gradient_only_one_gets_a_copy():
    addresses = []

    class Sum(torch.autograd.Function):
        @staticmethod
        def forward(ctx, left, right):
            return left + right

        @staticmethod
        def backward(ctx, gradient):
            addresses.append(gradient.data_ptr())
            return gradient, gradient

    node, left, right = Node(), param(), param()
    node.start(Sum.apply(left, right).exp().sum())
    gradients = [node.gradient(leaf) for leaf in (left, right)]
    assert [gradient.data_ptr() for gradient in gradients].count(addresses[0]) == 1


def test_gradient_has_the_strides_of_its_leaf():
    node = Node()
    w = torch.zeros(2, 3).t().requires_grad_()
    node.start((w * torch.ones(3, 2)).sum())
    assert node.gradient(w).stride() == w.stride()


def test_sparse_gradients_stay_sparse_until_a_dense_one_joins():
    node = Node()
    table = torch.zeros(4, 2, requires_grad=True)

    def lookup(index):
        return torch.nn.functional.embedding(torch.tensor(index), table, sparse=True).sum()

    node.start(lookup([1, 1]))
    node.start(lookup([3]))
    assert node.gradient(table).is_sparse
    assert node.gradient(table).to_dense()[:, 0].tolist() == [0.0, 2.0, 0.0, 1.0]
    node.start(table.sum())
    node.start(lookup([0]))
    assert node.gradient(table)[:, 0].tolist() == [2.0, 3.0, 1.0, 2.0]


def test_sparse_gradients_cross_workers():
    node = Node()
    (table,) = node.receive(5, torch.zeros(4, 2))
    node.start(torch.nn.functional.embedding(torch.tensor([1]), table, sparse=True).sum())
    owner, w = Node(), torch.zeros(4, 2, requires_grad=True)
    sent = owner.send(w)
    local = owner.start()
    local.add_gradients(sent, node.departed[5])
    local.run_wave()
    assert owner.gradient(w).is_sparse
    assert owner.gradient(w).to_dense()[1].tolist() == [1.0, 1.0]
