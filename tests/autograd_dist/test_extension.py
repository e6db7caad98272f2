"""Distributed autograd between agents of one process, over the memory transport."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import pickle
import threading
import weakref
from functools import partial

import pytest
import torch
from torch.futures import Future as TorchFuture

import autograd_dist
import rpc
from autograd_dist import gradients
from autograd_dist.contexts import DistAutogradContext
from autograd_dist.errors import UnknownContextError
from autograd_dist.wire import EXTENSION_NAME
from rpc.errors import AgentClosedError, EncodeError
from rpc.functions import async_execution
from rpc.testing import as_worker, local_group
from tests import waiting

SECONDS = 10.0


@pytest.fixture
def workers(make_transport):
    names = ("alice", "bob", "carol")
    with local_group(*names, transport=make_transport) as group, as_worker(group[0]):
        yield group


def leaf(*values):
    return torch.tensor(values or (1.0, 2.0), requires_grad=True)


def debug(agent, key):
    return agent.debug_info().get(key, 0)


wait_until = partial(waiting.until, seconds=SECONDS)


def square(x):
    return x * x


def square_at(name, x):
    return rpc.rpc_sync(name, square, (x,)) + 1


def bounce(hops, x):
    """Multiplies by 2 at every hop, over all workers in turn."""
    if not hops:
        return x
    target = ["alice", "bob", "carol"][hops % 3]
    return rpc.rpc_sync(target, bounce, (hops - 1, x * 2))


def echo(x):
    return x


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


def test_leaving_the_context_releases_it_everywhere(workers):
    with autograd_dist.context() as context_id:
        rpc.rpc_sync("bob", square_at, ("carol", leaf()))
        assert [debug(agent, "num_autograd_contexts") for agent in workers] == [1, 1, 1]
    for agent in workers:
        wait_until(lambda agent=agent: not debug(agent, "num_autograd_contexts"))
    message = f"Could not find autograd context with id: {context_id}"
    with pytest.raises(autograd_dist.UnknownContextError, match=message):
        autograd_dist.get_gradients(context_id)
    with pytest.raises(RuntimeError, match=message):
        autograd_dist.backward(context_id, [square(leaf()).sum()])


class Tracked(torch.autograd.Function):
    """Puts an object into the graph whose end can be observed."""

    @staticmethod
    def forward(ctx, x):
        ctx.token = torch.nn.Identity()
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


def test_graph_is_freed_with_its_context_and_not_by_the_garbage_collector(workers):
    gc.disable()
    try:
        with autograd_dist.context() as context_id:
            hidden = Tracked.apply(leaf())
            saved = weakref.ref(hidden.grad_fn.token)
            y = hidden * rpc.rpc_sync("bob", square, (hidden,))
            rpc.rpc_sync("bob", square, (hidden,))
            autograd_dist.backward(context_id, [y.sum()], retain_graph=True)
            del hidden, y
            assert saved() is not None
        wait_until(lambda: saved() is None)
    finally:
        gc.enable()


def test_call_that_outlives_its_context_does_not_bring_it_back(workers):
    with autograd_dist.context() as context_id:
        rpc.rpc_sync("bob", square, (leaf(),))
        extension = workers[1].extensions.load(EXTENSION_NAME)
    wait_until(lambda: not debug(workers[1], "num_autograd_contexts"))
    assert extension.contexts.join(context_id) is None


def test_a_handler_that_long_outlives_its_context_does_not_bring_it_back(workers):
    started, go_on = threading.Event(), threading.Event()

    def scaled(x):
        started.set()
        assert go_on.wait(SECONDS)
        return rpc.rpc_sync("carol", square, (x,)) * leaf()

    workers[1].scaled = scaled
    extension = workers[1].extensions.load(EXTENSION_NAME)
    with autograd_dist.context():
        future = rpc.rpc_async("bob", call_scaled, (leaf(),))
        assert started.wait(SECONDS)
    wait_until(lambda: not debug(workers[1], "num_autograd_contexts"))
    for context_id in range(5000):
        extension.contexts.release(context_id)
    go_on.set()
    assert future.wait().tolist() == [1.0, 8.0]
    assert [debug(worker, "num_autograd_contexts") for worker in workers] == [0, 0, 0]


def test_a_context_that_ends_as_a_call_is_made_is_not_left_behind_at_its_callee(
    workers, monkeypatch
):
    extension = workers[1].extensions.load(EXTENSION_NAME)
    add_worker = DistAutogradContext.add_worker

    def ended_meanwhile(context, worker_id):
        if worker_id == workers[2].info.id:
            extension.release(context.context_id)
        add_worker(context, worker_id)

    workers[1].scaled = lambda x: rpc.rpc_sync("carol", square, (x,))
    with autograd_dist.context():
        rpc.rpc_sync("bob", square, (leaf(),))
        with monkeypatch.context() as patched:
            patched.setattr(DistAutogradContext, "add_worker", ended_meanwhile)
            assert rpc.rpc_sync("bob", call_scaled, (leaf(),)).tolist() == [1.0, 4.0]
    wait_until(lambda: not any(debug(each, "num_autograd_contexts") for each in workers))


def call_scaled(x):
    return rpc.current.current_agent().scaled(x)


def test_contexts_cannot_be_nested(workers):
    with autograd_dist.context():
        with pytest.raises(RuntimeError, match="Already have an autograd context id"):
            autograd_dist.context().__enter__()
        with pytest.raises(RuntimeError, match="Already have an autograd context id"):
            rpc.rpc_sync("bob", autograd_dist.context().__enter__)
    with autograd_dist.context():
        pass


def test_a_task_that_outlives_the_context_it_was_made_in_may_open_another(workers):
    async def step():
        with autograd_dist.context() as context_id:
            loss = await rpc.rpc_async("bob", square, (leaf(),))
            autograd_dist.backward(context_id, [loss.sum()])
            return len(autograd_dist.get_gradients(context_id))

    async def main():
        with autograd_dist.context():
            task = asyncio.create_task(step())
        return await task

    assert asyncio.run(main()) == 1


def test_a_context_may_be_left_by_another_thread_than_entered_it(workers):
    def held():
        with autograd_dist.context():
            yield

    generator = held()
    next(generator)
    thread = threading.Thread(target=generator.close)
    thread.start()
    thread.join()
    assert debug(workers[0], "num_autograd_contexts") == 0
    with autograd_dist.context():
        pass


def test_one_context_is_entered_once_at_a_time(workers):
    context, inside = autograd_dist.context(), contextvars.copy_context()
    with context:
        with pytest.raises(RuntimeError, match="entered already"):
            inside.run(context.__enter__)
        assert debug(workers[0], "num_autograd_contexts") == 1
    with context:
        pass
    assert debug(workers[0], "num_autograd_contexts") == 0


@pytest.mark.parametrize(
    ("roots", "error", "text"),
    [
        (None, TypeError, "incompatible function arguments"),
        ([], RuntimeError, "No tensors provided for gradient computation"),
        ([torch.rand(3)], RuntimeError, "requires_grad not set on"),
        ([torch.rand(3, requires_grad=True)], RuntimeError, "is not a scalar, all roots need to"),
        ([torch.rand(1, requires_grad=True)], RuntimeError, "does not have a valid gradient fun"),
    ],
)
def test_unusable_roots_are_refused(workers, roots, error, text):
    with autograd_dist.context() as context_id, pytest.raises(error, match=text):
        autograd_dist.backward(context_id, roots)


@pytest.mark.parametrize("roots", [[], [torch.rand(3)]])
def test_an_unknown_context_is_named_before_its_roots(workers, roots):
    with pytest.raises(UnknownContextError, match="99"):
        autograd_dist.backward(99, roots)


@pytest.mark.parametrize("context_id", ["1", 1.0, [1], None])
def test_what_is_no_id_of_a_context_is_refused(workers, context_id):
    with pytest.raises(TypeError, match=f"context_id: int.*{type(context_id).__name__}"):
        autograd_dist.get_gradients(context_id)


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
