"""Passes that share a leaf wait for each other; those that do not, do not."""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager

import pytest
import torch

import autograd_dist
import rpc
from autograd_dist.grad_fields import GradFields
from rpc.agent import AgentOptions
from rpc.runtime import deadlines
from rpc.testing import MemoryHub, as_worker, connect
from tests.waiting import until


@pytest.fixture
def fields() -> GradFields:
    return GradFields()


A, B, C = (torch.ones(1) for _ in range(3))


def test_who_shares_no_leaf_does_not_wait(fields: GradFields) -> None:
    with fields.used([A, B]), ThreadPoolExecutor(1) as other:
        other.submit(_use, fields, [C]).result(timeout=20)
        other.submit(_use, fields, []).result(timeout=20)


def test_who_shares_a_leaf_waits_until_it_is_free(fields: GradFields) -> None:
    order = []
    with ThreadPoolExecutor(1) as other:
        with fields.used([A, B]):
            waiting = other.submit(_use, fields, [B, C], lambda: order.append("second"))
            until(lambda: fields.waiting == 1)
            order.append("first")
        waiting.result(timeout=20)
    assert order == ["first", "second"]


def test_who_waits_for_one_leaf_keeps_none_from_others(fields: GradFields) -> None:
    with ThreadPoolExecutor(2) as others:
        with fields.used([A]):
            waiting = others.submit(_use, fields, [A, B])
            until(lambda: fields.waiting == 1)
            others.submit(_use, fields, [B]).result(timeout=20)
        waiting.result(timeout=20)


def test_blocks_nest_and_the_outermost_gives_back(fields: GradFields) -> None:
    with ThreadPoolExecutor(1) as other:
        with fields.used([A]):
            with fields.used([A, B]):
                pass
            other.submit(_use, fields, [B]).result(timeout=20)
            waiting = other.submit(_use, fields, [A])
            until(lambda: fields.waiting == 1)
        waiting.result(timeout=20)


def test_leaves_are_free_after_an_error(fields: GradFields) -> None:
    with pytest.raises(ValueError, match="inside"), fields.used([A]):
        raise ValueError("inside")
    with ThreadPoolExecutor(1) as other:
        other.submit(_use, fields, [A]).result(timeout=20)


def test_who_is_interrupted_while_it_waits_takes_nothing(fields: GradFields) -> None:
    def interrupted(*_: object) -> bool:
        raise KeyboardInterrupt

    with fields.used([A]):
        fields._changed.wait = interrupted  # type: ignore[method-assign]
        with ThreadPoolExecutor(1) as other, pytest.raises(KeyboardInterrupt):
            other.submit(_use, fields, [A, B]).result(timeout=20)
    with ThreadPoolExecutor(1) as other:
        other.submit(_use, fields, [A, B]).result(timeout=20)


def _use(fields: GradFields, leaves: list[torch.Tensor], do=lambda: None) -> None:  # type: ignore[no-untyped-def]
    with fields.used(leaves):
        do()


def test_who_waits_does_so_no_longer_than_there_is_time() -> None:
    fields = GradFields(lambda: 0.001)
    with ThreadPoolExecutor(1) as other:
        with fields.used([A]), pytest.raises(rpc.RpcTimeoutError, match="another pass or step"):
            other.submit(_use, fields, [A, B]).result(timeout=20)
        other.submit(_use, fields, [A, B]).result(timeout=20)


def test_who_need_not_wait_needs_no_time() -> None:
    def over() -> float:
        raise rpc.RpcTimeoutError("RPC ran for more than the timeout of the call, and was not sent")

    fields = GradFields(over)
    with fields.used([A]), fields.used([A, B]), ThreadPoolExecutor(1) as other:
        waiting = other.submit(_use, fields, [A])
        assert isinstance(waiting.exception(timeout=20), rpc.RpcTimeoutError)
        assert "another pass or step" in str(waiting.exception())


class Trainers:
    """Alice, who calls, bob, on whom something uses the ``.grad`` of a leaf for long, and carol."""

    def __init__(self) -> None:
        self.hub = MemoryHub()
        options = AgentOptions(num_worker_threads=1, rpc_timeout=0)
        self.agents = connect("alice", "bob", "carol", hub=self.hub, options=options)
        self.alice, self.bob, self.carol = self.agents
        self.bob.leaf = torch.ones(2, requires_grad=True)  # type: ignore[attr-defined]
        self.bob.leaf.register_post_accumulate_grad_hook(lambda _: None)  # type: ignore[attr-defined]

    def used_for_long(self) -> AbstractContextManager[None]:
        return self.fields.used([self.bob.leaf])  # type: ignore[attr-defined]

    @property
    def fields(self) -> GradFields:
        with as_worker(self.bob):
            return autograd_dist.grad_fields()

    def somebody_waits(self) -> bool:
        return self.fields.waiting == 1

    def nobody_is_busy(self) -> bool:
        busy = self.bob.executor.busy() or self.bob.system_executor.busy()
        return not (busy or self.fields.waiting)


@pytest.fixture
def trainers() -> Iterator[Trainers]:
    made = Trainers()
    with as_worker(made.alice):
        yield made
    for agent in made.agents:
        agent.shutdown(graceful=False)


def leaf_of_bob() -> torch.Tensor:
    leaf: torch.Tensor = rpc.current.current_agent().leaf  # type: ignore[attr-defined]
    return leaf


def step() -> None:
    with autograd_dist.grad_fields().used([leaf_of_bob()]):
        pass


async def step_in_a_coroutine() -> None:
    step()


def double() -> torch.Tensor:
    return leaf_of_bob() * 2


def make_a_pass() -> None:
    with autograd_dist.context() as context_id:
        autograd_dist.backward(context_id, [double().sum()])


def make_a_pass_through_bob() -> None:
    with autograd_dist.context() as context_id:
        autograd_dist.backward(context_id, [rpc.rpc_sync("bob", double).sum()])


HANDLERS = pytest.mark.parametrize("handler", [step, step_in_a_coroutine, make_a_pass])


@HANDLERS
def test_a_handler_that_waits_ends_when_it_is_cancelled(
    trainers: Trainers, handler: Callable[[], None], capfd: pytest.CaptureFixture[str]
) -> None:
    with trainers.used_for_long():
        future = rpc.rpc_async("bob", handler)
        until(trainers.somebody_waits)
        assert future.cancel()
        until(trainers.nobody_is_busy)
    rpc.rpc_sync("bob", handler)
    assert capfd.readouterr().err == ""


@HANDLERS
def test_a_handler_that_waits_ends_when_its_caller_is_lost(
    trainers: Trainers, handler: Callable[[], None]
) -> None:
    with trainers.used_for_long():
        future = rpc.rpc_async("bob", handler)
        until(trainers.somebody_waits)
        trainers.hub.cut(0)
        until(trainers.nobody_is_busy)
    trainers.alice.caller.close("the test is over")
    with pytest.raises(rpc.AgentClosedError):
        future.wait()


class Call:
    """One that a handler serves, and whose end nobody tells it of."""

    cancelled = False

    def __init__(self, deadline: float) -> None:
        self.deadline = deadline

    def when_cancelled(self, wake: Callable[[], None]) -> Callable[[], None]:
        return lambda: None


def test_a_handler_waits_as_long_as_its_call_may_take(trainers: Trainers) -> None:
    def serve() -> None:
        deadlines.enter(Call(trainers.bob.clock.now() + 0.01))
        step()

    with trainers.used_for_long(), as_worker(trainers.bob), ThreadPoolExecutor(1) as other:
        served = other.submit(contextvars.copy_context().run, serve)
        assert isinstance(served.exception(timeout=20), rpc.RpcTimeoutError)
    assert trainers.nobody_is_busy()


@pytest.mark.parametrize("handler", [step, make_a_pass])
def test_a_handler_that_waits_lets_others_run(
    trainers: Trainers, handler: Callable[[], None]
) -> None:
    with trainers.used_for_long():
        future = rpc.rpc_async("bob", handler)
        until(trainers.somebody_waits)
        assert trainers.bob.executor.waiting == 1
    future.wait()


async def one() -> int:
    return 1


def test_a_coroutine_that_waits_lets_others_run(trainers: Trainers) -> None:
    with trainers.used_for_long():
        future = rpc.rpc_async("bob", step_in_a_coroutine)
        until(trainers.somebody_waits)
        assert rpc.rpc_sync("bob", one, timeout=20) == 1
    future.wait()


def backward(context_id: int, loss: torch.Tensor) -> BaseException | None:
    try:
        autograd_dist.backward(context_id, [loss])
    except Exception as error:
        return error
    return None


def test_a_pass_that_waits_ends_with_its_context(trainers: Trainers) -> None:
    context = autograd_dist.context()
    with trainers.used_for_long(), as_worker(trainers.bob), ThreadPoolExecutor(1) as other:
        context_id = context.__enter__()
        here = contextvars.copy_context()
        error = other.submit(here.run, backward, context_id, double().sum())
        until(trainers.somebody_waits)
        context.__exit__()
        told = error.result(timeout=20)
    assert isinstance(told, autograd_dist.BackwardError)
    assert str(told) == "Error on Node 1: its autograd context was released"
    assert told.__cause__ is None


def test_what_waits_for_a_pass_elsewhere_ends_with_its_context(trainers: Trainers) -> None:
    context = autograd_dist.context()
    with trainers.used_for_long(), ThreadPoolExecutor(1) as other:
        context_id = context.__enter__()
        loss = rpc.rpc_sync("bob", double).sum()
        here = contextvars.copy_context()
        error = other.submit(here.run, backward, context_id, loss)
        until(trainers.somebody_waits)
        context.__exit__()
        assert isinstance(error.result(timeout=20), autograd_dist.BackwardError)
        until(trainers.nobody_is_busy)


def test_what_waits_for_a_pass_ends_when_the_root_of_that_is_lost(trainers: Trainers) -> None:
    with trainers.used_for_long(), ThreadPoolExecutor(1) as other:
        with autograd_dist.context() as context_id:
            loss = rpc.rpc_sync("bob", double).sum()
            here = contextvars.copy_context()
            error = other.submit(here.run, backward, context_id, loss)
            until(trainers.somebody_waits)
            trainers.hub.cut(0)
            until(trainers.nobody_is_busy)
        assert isinstance(error.result(timeout=20), autograd_dist.BackwardError)


def test_a_handler_that_waits_for_a_pass_elsewhere_ends_when_it_is_cancelled(
    trainers: Trainers, capfd: pytest.CaptureFixture[str]
) -> None:
    with trainers.used_for_long():
        future = rpc.rpc_async("carol", make_a_pass_through_bob)
        until(trainers.somebody_waits)
        assert future.cancel()
        until(lambda: not trainers.carol.callee.serving())
        until(trainers.nobody_is_busy)
    assert capfd.readouterr().err == ""


def test_a_handler_that_waits_for_a_pass_elsewhere_ends_when_its_caller_is_lost(
    trainers: Trainers,
) -> None:
    with trainers.used_for_long():
        future = rpc.rpc_async("carol", make_a_pass_through_bob)
        until(trainers.somebody_waits)
        trainers.hub.cut(0)
        until(lambda: not trainers.carol.executor.busy())
        until(trainers.nobody_is_busy)
    trainers.alice.caller.close("the test is over")
    with pytest.raises(rpc.AgentClosedError):
        future.wait()
