"""Distributed autograd between agents of one process, over the memory transport."""

from __future__ import annotations

import pickle
import threading

import pytest
import torch
from torch.futures import Future as TorchFuture

import autograd_dist
import rpc
from autograd_dist.wire import EXTENSION_NAME
from rpc.errors import AgentClosedError, EncodeError
from rpc.functions import async_execution
from rpc.testing import as_worker, local_group
from tests.autograd_dist.passes import (
    SECONDS,
    debug,
    echo,
    leaf,
    square,
    square_at,
    wait_until,
)


def bounce(hops, x):
    """Multiplies by 2 at every hop, over all workers in turn."""
    if not hops:
        return x
    target = ["alice", "bob", "carol"][hops % 3]
    return rpc.rpc_sync(target, bounce, (hops - 1, x * 2))


class Wrapped(torch.Tensor):
    """Has its numbers in another tensor, which autograd does not see."""

    @staticmethod
    def __new__(cls, inner):
        wrapped = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        wrapped.inner = inner
        return wrapped

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return cls(func(args[0].inner))


def make_wrapped():
    return Wrapped(torch.ones(2)).requires_grad_().neg()


def test_a_tensor_that_would_lose_its_gradient_is_refused_within_a_context(workers):
    wrapped = make_wrapped()
    assert rpc.rpc_sync("bob", echo, (wrapped,)).inner.tolist() == [-1.0, -1.0]
    with autograd_dist.context():
        assert rpc.rpc_sync("bob", echo, (wrapped.detach(),)).inner.tolist() == [-1.0, -1.0]
        refused = "a Wrapped that is part of a graph cannot be sent within an autograd context"
        with pytest.raises(EncodeError, match=f"a call of echo cannot be sent: {refused}"):
            rpc.rpc_sync("bob", echo, (wrapped,))
        with pytest.raises(EncodeError, match=refused):
            rpc.rpc_sync("bob", make_wrapped)


def test_gradient_comes_back_from_another_worker(workers):
    x = leaf()
    with autograd_dist.context() as context_id:
        autograd_dist.backward(context_id, [rpc.rpc_sync("bob", square, (x,)).sum()])
        assert autograd_dist.get_gradients(context_id)[x].tolist() == [2.0, 4.0]
    assert x.grad is None


def test_gradient_comes_back_over_nested_calls_that_return_to_the_caller(workers):
    x = leaf()
    with autograd_dist.context() as context_id:
        y = rpc.rpc_sync("bob", square_at, ("alice", x))
        autograd_dist.backward(context_id, [(x * y).sum()])
        assert autograd_dist.get_gradients(context_id)[x].tolist() == [1 + 3.0, 1 + 12.0]


def test_gradient_comes_back_over_many_hops(workers):
    x = leaf()
    with autograd_dist.context() as context_id:
        y = rpc.rpc_sync("bob", bounce, (10, x))
        autograd_dist.backward(context_id, [y.sum()])
        assert autograd_dist.get_gradients(context_id)[x].tolist() == [1024.0, 1024.0]


def test_call_to_oneself_takes_part(workers):
    x = leaf()
    with autograd_dist.context() as context_id:
        autograd_dist.backward(context_id, [rpc.rpc_sync("alice", square, (x,)).sum()])
        assert autograd_dist.get_gradients(context_id)[x].tolist() == [2.0, 4.0]


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor([3.0, 4.0]))

    def forward(self, x):
        return x * self.weight


def gradient_of_weight(model, context_id):
    return autograd_dist.get_gradients(context_id)[model.local_value().weight]


@pytest.mark.parametrize("by_name", [False, True])
def test_leaf_gets_its_gradient_where_it_lives(workers, by_name):
    model = rpc.remote("bob", Model)
    x = leaf(5.0, 5.0)
    with autograd_dist.context() as context_id:
        forward = model.rpc_sync().forward
        y = forward(x=x) if by_name else forward(x)
        assert y.requires_grad
        autograd_dist.backward(context_id, [y.sum()])
        gradient = rpc.rpc_sync("bob", gradient_of_weight, (model, context_id))
        assert autograd_dist.get_gradients(context_id)[x].tolist() == [3.0, 4.0]
    assert gradient.tolist() == [5.0, 5.0]


def test_value_fetched_from_a_reference_takes_part(workers):
    x = leaf()
    with autograd_dist.context() as context_id:
        y = rpc.remote("bob", square, (x,)).to_here()
        autograd_dist.backward(context_id, [y.sum()])
        assert autograd_dist.get_gradients(context_id)[x].tolist() == [2.0, 4.0]


def test_backward_may_start_at_the_owner_of_a_reference(workers):
    x = leaf()
    with autograd_dist.context() as context_id:
        loss = rpc.remote("bob", torch.sum, (rpc.rpc_sync("carol", square, (x,)),))
        loss.backward(context_id)
        assert autograd_dist.get_gradients(context_id)[x].tolist() == [2.0, 4.0]


@async_execution
def square_later(x):
    result = TorchFuture()
    return rpc.rpc_async("carol", square, (x,)).then(lambda f: f.value() * 2) or result


async def square_in_a_coroutine(x):
    return await rpc.rpc_async("carol", square, (x,)) * 2


@pytest.mark.parametrize("handler", [square_later, square_in_a_coroutine])
def test_asynchronous_handlers_stay_in_the_context(workers, handler):
    x = leaf()
    with autograd_dist.context() as context_id:
        y = rpc.rpc_async("bob", handler, (x,)).wait()
        autograd_dist.backward(context_id, [y.sum()])
        assert autograd_dist.get_gradients(context_id)[x].tolist() == [4.0, 8.0]


def test_callbacks_of_futures_stay_in_the_context(workers):
    x = leaf()
    with autograd_dist.context() as context_id:
        future = rpc.rpc_async("bob", square, (x,)).then(
            lambda f: rpc.rpc_sync("carol", square, (f.value(),))
        )
        autograd_dist.backward(context_id, [future.wait().sum()])
        assert autograd_dist.get_gradients(context_id)[x].tolist() == [4.0, 32.0]


def current_context_id():
    return autograd_dist._current_context().context_id


def test_context_travels_without_any_tensor(workers):
    with autograd_dist.context() as context_id:
        assert rpc.rpc_sync("bob", current_context_id) == context_id
        assert (
            rpc.rpc_async("bob", rpc.rpc_sync, ("carol", current_context_id)).wait() == context_id
        )


def test_id_names_the_creator(workers):
    with as_worker(workers[2]), autograd_dist.context() as context_id:
        assert context_id >> 48 == 2


def pair(x):
    return {"product": x * 2, "count": torch.tensor([1, 2]), "sum": x + 1}


def test_tensors_in_containers_and_integers_among_them(workers):
    x = leaf()
    with autograd_dist.context() as context_id:
        result = rpc.rpc_sync("bob", pair, (x,))
        assert not result["count"].requires_grad
        autograd_dist.backward(context_id, [(result["product"] * result["count"]).sum()])
        assert autograd_dist.get_gradients(context_id)[x].tolist() == [2.0, 4.0]


def test_parameter_sent_in_a_context_is_tracked(workers):
    p = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    with autograd_dist.context() as context_id:
        autograd_dist.backward(context_id, [rpc.rpc_sync("bob", square, (p,)).sum()])
        assert autograd_dist.get_gradients(context_id)[p].tolist() == [2.0, 4.0]


def can_be_optimized(module):
    weight = module.weight
    if weight.is_leaf:
        torch.optim.SGD(module.parameters(), lr=0.1)
    else:
        with pytest.raises(ValueError, match="non-leaf"):
            torch.optim.SGD(module.parameters(), lr=0.1)
    return weight.is_leaf, isinstance(weight, torch.nn.Parameter)


def test_a_module_sent_in_a_context_is_no_leaf_and_one_sent_outside_is(workers):
    module = torch.nn.Linear(2, 1)
    with autograd_dist.context():
        assert rpc.rpc_sync("bob", can_be_optimized, (module,)) == (False, True)
    assert rpc.rpc_sync("bob", can_be_optimized, (module,)) == (True, True)


def is_leaf(x):
    return x.is_leaf and x.requires_grad


def test_outside_a_context_a_tensor_arrives_as_a_leaf(workers):
    with autograd_dist.context():
        pass
    assert rpc.rpc_sync("bob", is_leaf, (leaf(),))
    assert rpc.rpc_sync("bob", square, (leaf(),)).is_leaf


def test_unused_results_neither_hang_nor_change_anything(workers):
    x = leaf()
    with autograd_dist.context() as context_id:
        h = x * 2
        used = rpc.rpc_sync("bob", square, (h,))
        rpc.rpc_sync("bob", square, (h,))
        rpc.rpc_sync("carol", square_at, ("bob", h))
        autograd_dist.backward(context_id, [(used * h).sum()])
        # (2x)^3 by x is 24 x^2
        assert autograd_dist.get_gradients(context_id)[x].tolist() == [24.0, 96.0]


def test_second_forward_and_backward_in_one_context_adds_up(workers):
    x = leaf()
    with autograd_dist.context() as context_id:
        for _ in range(3):
            autograd_dist.backward(context_id, [rpc.rpc_sync("bob", square, (x,)).sum()])
        assert autograd_dist.get_gradients(context_id)[x].tolist() == [6.0, 12.0]


def test_retain_graph_holds_on_every_worker(workers):
    x = leaf()
    with autograd_dist.context() as context_id:
        loss = rpc.rpc_sync("bob", square_at, ("carol", x)).sum()
        autograd_dist.backward(context_id, [loss], retain_graph=True)
        autograd_dist.backward(context_id, [loss])
        assert autograd_dist.get_gradients(context_id)[x].tolist() == [4.0, 8.0]
        with pytest.raises(RuntimeError, match=r"Error on Node \d: .*a second time"):
            autograd_dist.backward(context_id, [loss])


def test_contexts_in_many_threads_do_not_mix(workers):
    model = rpc.remote("bob", Model)
    outcomes = {}

    def train(number):
        with as_worker(workers[number % 3]):
            for _ in range(5):
                with autograd_dist.context() as context_id:
                    y = rpc.rpc_sync("bob", Model.forward, (model.to_here(), torch.ones(2)))
                    z = rpc.rpc_sync("carol", square, (y,))
                    autograd_dist.backward(context_id, [(z * number).sum()])
                    outcomes.setdefault(number, []).append(debug(workers[1], EXTENSION_NAME))

    threads = [threading.Thread(target=train, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == list(range(6))
    for agent in workers:
        wait_until(lambda agent=agent: not debug(agent, "num_autograd_contexts"))


class Broken(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        raise ValueError("Simulate error on backward pass")


def broken(x):
    return Broken.apply(x) * 2


@pytest.mark.parametrize("where", ["alice", "bob"])
def test_error_comes_to_the_root_and_names_the_worker(workers, where):
    x = leaf()
    with autograd_dist.context() as context_id:
        y = rpc.rpc_sync("carol", square, (rpc.rpc_sync(where, broken, (x,)),))
        node = 0 if where == "alice" else 1
        with pytest.raises(
            autograd_dist.BackwardError,
            match=f"^Error on Node {node}: Simulate error on backward pass",
        ):
            autograd_dist.backward(context_id, [y.sum()])
        z = rpc.rpc_sync("bob", square, (leaf(3.0),))
        autograd_dist.backward(context_id, [z.sum()])


def test_a_pass_over_what_a_step_changed_says_what_to_do(workers):
    with autograd_dist.context() as context_id:
        x = leaf()
        y = rpc.rpc_sync("bob", square, (x * x,))
        with torch.no_grad():
            x.add_(1.0)
        with pytest.raises(autograd_dist.BackwardError, match="modified by an inplace") as caught:
            autograd_dist.backward(context_id, [y.sum()])
    assert "maybe another trainer's" in str(caught.value)
    assert "docs/guides/autograd.md" in str(caught.value)


def test_lost_worker_fails_the_pass_at_once(workers):
    with autograd_dist.context() as context_id:
        y = rpc.rpc_sync("bob", square_at, ("carol", leaf()))
        workers[2].shutdown(graceful=False)
        wait_until(lambda: len(workers[1].group.living()) == 2)
        with pytest.raises(autograd_dist.BackwardError, match=r"^Error on Node 1: ") as caught:
            autograd_dist.backward(context_id, [y.sum()])
    assert "gradients for worker 2 cannot be sent: worker 'carol'" in str(caught.value)
    for error in (caught.value, pickle.loads(pickle.dumps(caught.value))):
        assert isinstance(error, autograd_dist.WorkerLostInBackwardError)
        assert isinstance(error, rpc.WorkerLostError)
        assert (error.name, error.incarnation, error.reason) == ("carol", 0, "it left the group")
        assert str(error) == str(caught.value)


def test_worker_lost_during_the_pass_fails_it(workers):
    entered, go_on = threading.Event(), threading.Event()

    class Slow(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, gradient):
            entered.set()
            go_on.wait(SECONDS)
            return gradient

    def slow(x):
        return Slow.apply(x)

    workers[1].slow = slow
    outcome = []

    def run():
        with as_worker(workers[0]), autograd_dist.context() as context_id:
            y = rpc.rpc_sync("bob", call_slow, (leaf(),))
            try:
                autograd_dist.backward(context_id, [y.sum()])
            except autograd_dist.WorkerLostInBackwardError as error:
                outcome.append((error.name, error.reason))

    thread = threading.Thread(target=run)
    thread.start()
    assert entered.wait(SECONDS)
    workers[0].inbound.peer_lost(workers[1].life, "the test says so")
    thread.join(SECONDS)
    go_on.set()
    assert outcome == [("bob", "the test says so")]


def call_slow(x):
    return rpc.current.current_agent().slow(x)


def test_contexts_of_a_lost_worker_are_dropped(workers):
    with as_worker(workers[2]):
        context = autograd_dist.context()
        context.__enter__()
        rpc.rpc_sync("alice", square, (leaf(),))
        assert debug(workers[0], "num_autograd_contexts") == 1
    workers[0].inbound.peer_lost(workers[2].life, "the test says so")
    assert debug(workers[0], "num_autograd_contexts") == 0
    context.__exit__()


def look_up(table):
    return torch.nn.functional.embedding(torch.tensor([1, 1]), table, sparse=True)


def test_sparse_gradients_travel(workers):
    table = torch.zeros(4, 2, requires_grad=True)
    with autograd_dist.context() as context_id:
        index = torch.tensor([1, 1])
        y = rpc.rpc_sync(
            "bob", torch.nn.functional.embedding, (index, table, None, None, 2.0, False, True)
        )
        autograd_dist.backward(context_id, [y.sum()])
        gradient = autograd_dist.get_gradients(context_id)[table]
    assert gradient.is_sparse
    assert gradient.to_dense()[:, 0].tolist() == [0.0, 2.0, 0.0, 0.0]


def entries():
    return torch.sparse_coo_tensor([[0, 1, 1], [2, 0, 0]], [3.0, 4.0, 5.0], (2, 3))


def test_a_sparse_tensor_keeps_its_place_in_the_graph(workers):
    sent = entries().requires_grad_()
    with autograd_dist.context() as context_id:
        total = rpc.rpc_sync("bob", torch.add, (sent, sent * 2))
        assert total.grad_fn.name() == "torch::distributed::autograd::RecvRpcBackward"
        assert total._nnz() >= sent._nnz()
        autograd_dist.backward(context_id, [torch.sparse.sum(total)])
        gradient = autograd_dist.get_gradients(context_id)[sent]
    assert gradient.is_sparse
    assert gradient.to_dense().tolist() == [[0.0, 0.0, 3.0], [3.0, 0.0, 0.0]]


def test_a_sparse_tensor_gets_a_dense_gradient(workers):
    sent = entries().requires_grad_()
    with autograd_dist.context() as context_id:
        total = rpc.rpc_sync("bob", torch.Tensor.to_dense, (sent,)).sum()
        autograd_dist.backward(context_id, [total])
        gradient = autograd_dist.get_gradients(context_id)[sent]
    assert gradient.to_dense().sum().item() > 0


def test_two_passes_at_once_in_one_context(workers):
    x = leaf()
    with autograd_dist.context() as context_id:
        losses = [rpc.rpc_sync("bob", square_at, ("carol", x * k)).sum() for k in range(1, 5)]
        threads = [
            threading.Thread(target=pass_of, args=(workers[0], context_id, loss)) for loss in losses
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        # sum of k^2 for k up to 4, times 2x
        assert autograd_dist.get_gradients(context_id)[x].tolist() == [60.0, 120.0]


def pass_of(agent, context_id, loss):
    with as_worker(agent):
        autograd_dist.backward(context_id, [loss])


def test_public_names_are_the_documented_ones():
    assert sorted(autograd_dist.__all__) == [
        "BackwardError",
        "DistAutogradContext",
        "UnknownContextError",
        "WorkerLostInBackwardError",
        "backward",
        "context",
        "get_gradients",
        "grad_fields",
        "is_available",
    ]
    assert all(hasattr(autograd_dist, name) for name in autograd_dist.__all__)


def test_a_worker_that_shut_down_begins_no_context():
    with local_group("alice", "bob") as (alice, bob):
        with as_worker(bob), autograd_dist.context():
            pass
        alice.shutdown(graceful=False)
        with as_worker(alice), pytest.raises(AgentClosedError, match="autograd_dist cannot be"):
            autograd_dist.context().__enter__()
        assert alice.extensions.all() == []
        bob.shutdown(graceful=False)
        assert bob.extensions.load(EXTENSION_NAME) in bob.extensions.all()
