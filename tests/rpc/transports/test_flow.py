"""The bound on requests under way: who fits, who waits, who is woken."""

from __future__ import annotations

import contextvars
import operator
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import autograd_dist
import rpc
from rpc.agent import Agent
from rpc.errors import CallCancelledError, QueueFullError, RpcTimeoutError, RRefCreationError
from rpc.options import WhenFull
from rpc.outcomes.sinks import WaitingCaller
from rpc.protocol.references import Counts
from rpc.runtime.executor import Executor, share_this_thread
from rpc.testing import as_worker, local_group
from rpc.transports.base import Patience
from rpc.transports.flow import FlowWindow
from rpc.transports.tensorwire import Settings, TensorWireTransport
from tests.rpc.gates import gate, wait_at_the_gate
from tests.waiting import until


def always() -> bool:
    return True


def never() -> bool:
    return False


@given(st.lists(st.tuples(st.integers(0, 150_000), st.booleans()), max_size=60))
def test_small_and_large_are_each_held_to_the_bound(steps: list[tuple[int, bool]]) -> None:
    window = FlowWindow("w", 300_000)
    under_way: dict[int, int] = {}
    for number, (size, finish) in enumerate(steps):
        charge = max(size, 4096)
        rivals = [c for c in under_way.values() if (c < 65536) == (size < 65536)]
        fits = not rivals or sum(rivals) + charge <= 300_000
        assert window.try_charge(number, size) is fits
        if fits:
            under_way[number] = charge
        if finish and under_way:
            oldest = next(iter(under_way))
            window.release(oldest)
            del under_way[oldest]
        assert window.held == sum(under_way.values())


def test_something_larger_than_the_bound_may_travel_alone() -> None:
    window = FlowWindow("w", 1000)
    assert window.try_charge(1, 5_000_000)
    assert not window.try_charge(2, 70_000)
    assert window.try_charge(3, 1)
    window.release(1)
    assert window.try_charge(2, 70_000)


def test_who_may_not_wait_is_counted_at_once() -> None:
    window = FlowWindow("w", 8192)
    assert window.charge(1, 8192, never)
    assert window.charge(2, 8192, never)
    assert window.held == 16384
    window.release(1)
    window.release(1)
    assert window.held == 8192


def test_a_thread_that_runs_other_handlers_too_does_not_wait() -> None:
    window = FlowWindow("w", 8192)
    assert window.try_charge(1, 8192)
    outcome: list[bool] = []

    def ask() -> None:
        share_this_thread(Executor("place", 1, contextvars.Context()))
        outcome.append(window.charge(2, 8192, always))

    asking = threading.Thread(target=ask)
    asking.start()
    asking.join(10)
    assert outcome == [True]
    assert window.held == 16384


def test_nobody_waits_where_the_bound_raises() -> None:
    window = FlowWindow("w", 8192, WhenFull.RAISE)
    assert window.try_charge(1, 8000)
    with pytest.raises(QueueFullError, match=r"8000 bytes .* to worker 'w'; the bound is 8192"):
        window.charge(2, 8000, always)
    assert window.held == 8000


def test_a_waiter_goes_on_when_there_is_room_or_never_will_be() -> None:
    def end(window: FlowWindow) -> None:
        window.close()

    def answer(window: FlowWindow) -> None:
        window.release(1)

    for wake, counted in ((answer, True), (end, False)):
        window = FlowWindow("w", 8192)
        assert window.try_charge(1, 8192)
        outcome: list[bool] = []
        waiter = threading.Thread(target=lambda: outcome.append(window.charge(2, 5000, always)))  # noqa: B023
        waiter.start()
        wake(window)
        waiter.join(10)
        assert outcome == [counted]


@contextmanager
def waiting(window: FlowWindow, *requests: tuple[int, int]) -> Iterator[list[int]]:
    """Requests (correlation, size) that wait in this order; yields those that got room."""
    got: list[int] = []

    def charge(correlation: int, size: int) -> None:
        if window.charge(correlation, size, always):
            got.append(correlation)

    threads = [threading.Thread(target=charge, args=request) for request in requests]
    before = window.waiting
    for number, thread in enumerate(threads, before + 1):
        thread.start()
        until(lambda: window.waiting == number)  # noqa: B023
    yield got
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()


def test_who_waits_is_not_overtaken_by_smaller_requests() -> None:
    window = FlowWindow("w", 300_000)
    assert window.try_charge(1, 100_000)
    with waiting(window, (2, 300_000)) as got:
        assert not window.try_charge(3, 70_000)
        assert window.try_charge(4, 10)
        window.release(1)
        until(lambda: got == [2])
        assert window.held == 304_096
    window.release(2)
    assert window.try_charge(3, 70_000)


def test_room_is_given_in_the_order_of_coming() -> None:
    window = FlowWindow("w", 300_000)
    assert window.try_charge(1, 300_000)
    with waiting(window, (2, 300_000), (3, 100_000), (4, 100_000), (5, 300_000)) as got:
        window.release(1)
        until(lambda: got == [2])
        window.release(2)
        until(lambda: sorted(got) == [2, 3, 4])
        window.release(3)
        window.release(4)
    assert got[-1] == 5
    assert window.waiting == 0


def test_a_handler_does_not_queue_for_room_that_is_there() -> None:
    executor = Executor("test", 1, contextvars.copy_context())
    window = FlowWindow("w", 300_000)
    assert window.try_charge(1, 100_000)
    fits: list[bool] = []
    with waiting(window, (2, 300_000)):
        executor.submit(lambda: fits.append(window.try_charge(3, 70_000)))
        until(lambda: bool(fits))
        window.release(3)
        window.release(1)
    executor.close()
    assert fits == [True]


@pytest.mark.parametrize("gives_way", [True, False])
def test_another_handler_runs_while_one_waits_for_room_if_that_is_wanted(
    gives_way: bool,
) -> None:
    # Nobody else notices that it waits.
    executor = Executor("test", 1, contextvars.copy_context(), stall_seconds=60.0)
    window = FlowWindow("w", 8192, gives_way=gives_way)
    assert window.try_charge(1, 8192)
    over: list[str] = []
    begun, done = threading.Event(), threading.Event()

    def flood() -> None:
        begun.set()
        window.charge(2, 8192, always)
        over.append("flood")
        done.set()

    def other() -> None:
        over.append("other")
        window.release(1)

    executor.submit(flood)
    assert begun.wait(10)
    executor.submit(other)
    if not gives_way:
        window.release(1)
    assert done.wait(10)
    executor.close()
    assert over == (["other", "flood"] if gives_way else ["flood", "other"])


@pytest.mark.parametrize("when_full", WhenFull)
def test_who_hurries_is_counted_at_once_and_never_refused(when_full: WhenFull) -> None:
    window = FlowWindow("w", 8192, when_full)
    assert window.try_charge(1, 8192)
    assert window.charge(2, 8192, always, lambda _: Patience.HURRIES)
    assert window.held == 16384


def test_a_request_whose_call_ended_waits_no_more_and_takes_no_room() -> None:
    window = FlowWindow("w", 300_000)
    over: set[int] = set()
    errors: list[CallCancelledError] = []

    def charge() -> None:
        try:
            window.charge(2, 300_000, always, patience)
        except CallCancelledError as error:
            errors.append(error)

    def patience(correlation: int) -> Patience:
        return Patience.OVER if correlation in over else Patience.WAITS

    assert window.try_charge(1, 100_000)
    waiter = threading.Thread(target=charge)
    waiter.start()
    until(lambda: window.waiting == 1)
    with waiting(window, (3, 200_000)) as got:
        window.look_again()
        assert not got
        over.add(2)
        window.look_again()
        waiter.join(10)
        until(lambda: got == [3])
    assert window.held == 300_000
    assert "the call ended while it waited for room: 100000 bytes" in str(errors)
    charge()  # now it ended before it began to wait
    assert len(errors) == 2
    assert window.waiting == 0


def test_an_interrupted_wait_takes_no_room() -> None:
    window = FlowWindow("w", 8192)
    assert window.try_charge(1, 8192)
    answers = iter([Patience.WAITS])

    def patience(_: int) -> Patience:
        for answer in answers:
            return answer
        window.release(1)  # lets it in just now
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        window.charge(2, 8192, always, patience)
    assert window.held == window.waiting == 0


def test_of_handlers_that_wait_one_goes_on_whenever_nothing_moves() -> None:
    executor = Executor("test", 1, contextvars.copy_context())
    window = FlowWindow("w", 8192, stall_seconds=0.05)
    assert window.try_charge(1, 8192)
    held: list[int] = []

    def ask(correlation: int) -> None:
        window.charge(correlation, 8192, always)
        held.append(window.held)

    with waiting(window, (2, 8192)) as got:
        for correlation in (3, 4):
            executor.submit(partial(ask, correlation))
        until(lambda: len(held) == 2)
        assert not got, "it waits on, as no handler depends on it"
        for correlation in (1, 3, 4):
            window.release(correlation)
    executor.close()
    assert held == [16384, 24576]


# Agents whose window is full of one request that is not replied to.


@pytest.fixture
def pair() -> Iterator[list[Agent]]:
    narrow = Settings(max_bytes_in_flight=4096)
    with local_group("a", "b", transport=lambda: TensorWireTransport(narrow)) as agents:
        yield agents


def fill(agent: Agent) -> rpc.Future[None]:
    gate.clear()
    return agent.rpc_async("b", wait_at_the_gate, timeout=0)


@pytest.fixture
def full(pair: list[Agent]) -> Iterator[list[Agent]]:
    stuck = fill(pair[0])
    yield pair
    gate.set()
    stuck.wait()


@contextmanager
def in_thread(work: Callable[[], object]) -> Iterator[Future[object]]:
    with ThreadPoolExecutor(1) as pool:
        try:
            yield pool.submit(work)
        finally:
            gate.set()


def test_a_calls_timeout_holds_while_it_waits_for_room(full: list[Agent]) -> None:
    a, b = full
    with in_thread(lambda: a.rpc_sync("b", operator.neg, (1,), timeout=0.2)) as asking:
        assert isinstance(asking.exception(10), RpcTimeoutError)
    assert a.rpc_sync("b", operator.pos, (2,)) == 2
    assert {call.method for call in b.metrics().served} == {"wait_at_the_gate", "pos"}
    until(a.caller.quiet)


def test_a_call_that_is_cancelled_waits_for_room_no_more(full: list[Agent]) -> None:
    a, _ = full
    with in_thread(lambda: a.rpc_sync("b", operator.neg, (1,))) as asking:
        until(lambda: a.caller.cancel_where(lambda sink: isinstance(sink, WaitingCaller)))
        assert isinstance(asking.exception(10), CallCancelledError)


def test_the_owner_hears_of_a_creation_that_was_given_up_for_want_of_room(
    full: list[Agent],
) -> None:
    a, b = full
    with in_thread(lambda: a.remote("b", operator.neg, (1,), timeout=0.2)) as asking:
        rref = cast("rpc.RRef[int]", asking.result(10))
        with pytest.raises(RRefCreationError, match="timeout"):
            rref.to_here()
        del rref, asking
    until(lambda: a.control.totals()[0] == {1: 2} and b.control.totals()[1] == {0: 2})
    assert b.references.counts() == Counts(0, 0, 0, 0, 0, 0)


def test_gradients_do_not_wait_for_room(pair: list[Agent]) -> None:
    a, _ = pair
    x = torch.ones(3, requires_grad=True)
    with as_worker(a), autograd_dist.context() as context:
        loss = a.rpc_sync("b", operator.mul, (x, 2)).sum()
        stuck = fill(a)

        def backward() -> torch.Tensor:
            with as_worker(a):
                autograd_dist.backward(context, [loss])
                return autograd_dist.get_gradients(context)[x]

        with in_thread(backward) as passing:
            assert torch.equal(cast("torch.Tensor", passing.result(10)), torch.full((3,), 2.0))
        stuck.wait()


both = threading.Barrier(2)


def call_back(to: str, number: int) -> int:
    both.wait(10)
    return cast("int", rpc.rpc_sync(to, operator.neg, (number,)))


def test_calls_back_and_forth_do_not_wait_for_each_others_room(pair: list[Agent]) -> None:
    a, b = pair
    with ThreadPoolExecutor(2) as pool:
        there = pool.submit(a.rpc_sync, "b", call_back, ("a", 1))
        back = pool.submit(b.rpc_sync, "a", call_back, ("b", 2))
        assert (there.result(20), back.result(20)) == (-1, -2)
