"""Contexts end everywhere, and nothing that outlives one brings it back."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import threading
import weakref

import pytest
import torch

import autograd_dist
import rpc
from autograd_dist.contexts import DistAutogradContext
from autograd_dist.errors import UnknownContextError
from autograd_dist.wire import EXTENSION_NAME
from tests.autograd_dist.passes import (
    SECONDS,
    debug,
    leaf,
    square,
    square_at,
    wait_until,
)


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
