"""Calls that are given up: handlers that do not start, are told, or are cancelled."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import rpc
from rpc import CallCancelledError, RpcTimeoutError
from rpc.agent import Agent, AgentOptions
from rpc.calls.service import Service
from rpc.observe import spans as observation
from rpc.outcomes.sinks import Sink
from rpc.protocol.cancellation import EarlyCancellations
from rpc.testing import MemoryHub, VirtualClock, as_worker, connect, local_group
from tests.waiting import eventually, until

SECONDS = 20.0


class TestEarlyCancellations:
    def test_one_that_overtakes_its_request_is_remembered_once(self) -> None:
        early = EarlyCancellations()
        early.note(1, [7, 8])
        assert early.take(1, 7)
        assert not early.take(1, 7)
        assert not early.take(2, 8)
        assert early.noted
        assert early.take(1, 8)
        assert not early.noted

    def test_only_the_latest_are_kept(self) -> None:
        early = EarlyCancellations(kept=2)
        early.note(1, [1, 2, 3])
        assert [early.take(1, number) for number in (1, 2, 3)] == [False, True, True]

    def test_those_of_a_lost_worker_are_not_for_its_next_life(self) -> None:
        early = EarlyCancellations()
        early.note(1, [7])
        early.note(2, [7])
        early.worker_lost(1)
        assert early.noted
        assert not early.take(1, 7)
        assert early.take(2, 7)


class Seen:
    """The deeds of handlers, in this process."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.started: list[str] = []
        self.told = threading.Event()
        self.stopped = threading.Event()
        self.promises: list[torch.futures.Future[int]] = []


seen = Seen()


def hold(name: str) -> None:
    seen.started.append(name)
    seen.gate.wait(SECONDS)


def look_until_told() -> bool:
    seen.started.append("looking")
    deadline = time.monotonic() + SECONDS
    while not rpc.cancelled() and time.monotonic() < deadline:
        time.sleep(0.002)
    if rpc.cancelled():
        seen.told.set()
        seen.gate.wait(SECONDS)  # an answer that came before the caller's clock would be taken
    return rpc.cancelled()


@rpc.functions.async_execution
def promise() -> torch.futures.Future[int]:
    seen.promises.append(torch.futures.Future())
    return seen.promises[-1]


@rpc.functions.async_execution
def promise_once_given_up() -> torch.futures.Future[int]:
    seen.started.append("looking")
    until(rpc.cancelled)
    return torch.futures.Future()


async def sleep_for_long() -> None:
    seen.started.append("sleeping")
    try:
        await asyncio.sleep(SECONDS)
    except asyncio.CancelledError:
        seen.stopped.set()
        seen.gate.wait(SECONDS)  # as above
        raise


class Pair:
    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.hub = MemoryHub(self.clock)
        options = AgentOptions(num_worker_threads=1, rpc_timeout=0)
        self.alice, self.bob = connect(
            "alice", "bob", hub=self.hub, clock=self.clock, options=options
        )


@pytest.fixture
def pair() -> Iterator[Pair]:
    global seen
    seen = Seen()
    made = Pair()
    with as_worker(made.alice):
        yield made
    seen.gate.set()
    for agent in (made.alice, made.bob):
        agent.shutdown(graceful=False)


def quiet(agent: Agent) -> bool:
    return agent.caller.quiet() and agent.callee.quiet()


class TestCancel:
    def test_a_future_that_is_cancelled_fails_and_the_call_leaves_nothing(self, pair: Pair) -> None:
        future = rpc.rpc_async("bob", hold, ("x",))
        assert future.cancel()
        with pytest.raises(CallCancelledError, match="hold was cancelled by its caller"):
            future.wait()
        seen.gate.set()
        until(lambda: quiet(pair.alice) and quiet(pair.bob))

    def test_the_oldest_of_many_is_found_without_looking_at_the_rest(self, pair: Pair) -> None:
        futures = [rpc.rpc_async("bob", hold, args=("",)) for _ in range(5)]
        looked: list[object] = []

        def wanted(sink: object) -> bool:
            looked.append(sink)
            return True

        assert pair.alice.caller.cancel_where(wanted)
        assert len(looked) == 1
        with pytest.raises(CallCancelledError):
            futures[0].wait()
        assert all(future.cancel() for future in futures[1:])

    def test_none_of_many_is_looked_for_among_the_rest(
        self, pair: Pair, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        futures = [rpc.rpc_async("bob", hold, args=("",)) for _ in range(5)]
        looked: list[object] = []

        def feeds(sink: Sink, future: rpc.Future[Any]) -> bool:
            looked.append(sink)
            return observation.feeds(sink, future)

        monkeypatch.setattr("rpc.calls.outstanding.feeds", feeds)
        assert all(future.cancel() for future in reversed(futures))
        assert len(looked) == 5

    def test_what_is_over_cannot_be_cancelled(self, pair: Pair) -> None:
        future = rpc.rpc_async("bob", abs, (-3,))
        assert future.wait() == 3
        assert not future.cancel()
        assert future.value() == 3
        assert not future.then(lambda f: f).cancel()

    def test_a_handler_that_waits_for_its_turn_does_not_start(self, pair: Pair) -> None:
        calls = [rpc.rpc_async("bob", hold, (str(i),)) for i in range(40)]
        until(lambda: bool(seen.started))
        for future in calls[1:]:
            future.cancel()
        # With the gate closed, only a request that was cancelled ends; all may have by now.
        callee = pair.bob.callee
        until(lambda: callee.handled() > 0 or any(row["cancelled"] for row in callee.serving()))
        seen.gate.set()
        until(lambda: quiet(pair.alice) and quiet(pair.bob))
        assert len(seen.started) < 40
        assert calls[0].wait() is None

    def test_a_running_handler_is_told(self, pair: Pair) -> None:
        future = rpc.rpc_async("bob", look_until_told)
        until(lambda: bool(seen.started))
        assert future.cancel()
        assert seen.told.wait(SECONDS)

    def test_a_coroutine_is_cancelled(self, pair: Pair) -> None:
        future = rpc.rpc_async("bob", sleep_for_long)
        until(lambda: bool(seen.started))
        assert future.cancel()
        assert seen.stopped.wait(SECONDS)
        seen.gate.set()
        until(lambda: quiet(pair.alice) and quiet(pair.bob))

    def test_outside_of_handlers_nothing_is_cancelled(self, pair: Pair) -> None:
        assert not rpc.cancelled()


class TestDeadlines:
    def test_a_handler_whose_time_is_over_before_its_turn_does_not_start(self, pair: Pair) -> None:
        early = [rpc.rpc_async("bob", hold, (str(i),)) for i in range(40)]
        late = rpc.rpc_async("bob", hold, ("late",), timeout=1)
        until(lambda: len(pair.bob.callee.serving()) == 41)
        pair.clock.advance(2)
        with pytest.raises(RpcTimeoutError):
            late.wait()
        seen.gate.set()
        until(lambda: quiet(pair.alice) and quiet(pair.bob))
        assert len(seen.started) == 40
        assert "late" not in seen.started
        assert [future.wait() for future in early] == [None] * 40

    def test_a_running_handler_sees_that_its_time_is_over(self, pair: Pair) -> None:
        future = rpc.rpc_async("bob", look_until_told, timeout=5)
        until(lambda: bool(seen.started))
        pair.clock.advance(6)
        assert seen.told.wait(SECONDS)
        with pytest.raises(RpcTimeoutError):
            future.wait()

    def test_a_coroutine_is_cancelled_when_its_time_is_over(self, pair: Pair) -> None:
        future = rpc.rpc_async("bob", sleep_for_long, timeout=5)
        until(lambda: bool(seen.started))
        pair.clock.advance(6)
        assert seen.stopped.wait(SECONDS)
        with pytest.raises(RpcTimeoutError):
            future.wait()


class TestWhatIsNeverDone:
    """A request that only waits for something ends when nobody waits for its reply."""

    def test_a_future_that_is_never_set(self, pair: Pair) -> None:
        future = rpc.rpc_async("bob", promise, timeout=5)
        until(lambda: bool(seen.promises))
        pair.clock.advance(6)
        with pytest.raises(RpcTimeoutError):
            future.wait()
        until(lambda: quiet(pair.alice) and quiet(pair.bob))
        handled = pair.bob.callee.handled()
        seen.promises[0].set_result(3)
        assert rpc.rpc_sync("bob", abs, (-4,)) == 4
        until(lambda: quiet(pair.bob))
        assert pair.bob.callee.handled() == handled + 1

    def test_one_that_is_set_before_the_call_is_given_up(self, pair: Pair) -> None:
        future = rpc.rpc_async("bob", promise)
        until(lambda: bool(seen.promises))
        seen.promises[0].set_result(3)
        assert future.wait() == 3
        assert not future.cancel()

    def test_one_that_is_cancelled_as_it_begins_to_wait(self, pair: Pair) -> None:
        future = rpc.rpc_async("bob", promise_once_given_up)
        until(lambda: bool(seen.started))
        assert future.cancel()
        until(lambda: quiet(pair.alice) and quiet(pair.bob))

    def test_a_value_that_is_never_made(self, pair: Pair) -> None:
        rref = rpc.remote("bob", promise)
        until(lambda: bool(seen.promises))
        with ThreadPoolExecutor() as pool:
            fetch = pool.submit(rref.to_here, timeout=5)
            method = rref.rpc_async(timeout=5).bit_length()
            until(lambda: len(pair.bob.callee.serving()) == 3)
            pair.clock.advance(6)
            with pytest.raises(RpcTimeoutError):
                fetch.result()
            with pytest.raises(RpcTimeoutError):
                method.wait()
        until(lambda: len(pair.bob.callee.serving()) == 1)
        seen.promises[0].set_result(3)
        assert rref.to_here() == 3

    def test_a_value_that_is_never_made_within_its_time(self, pair: Pair) -> None:
        rref = rpc.remote("bob", promise, timeout=5)
        waits = rref.rpc_async().bit_length()
        until(lambda: len(pair.bob.callee.serving()) == 2)
        pair.clock.advance(6)
        with pytest.raises(rpc.RRefCreationError):
            rref.to_here()
        with pytest.raises(rpc.RRefCreationError):
            waits.wait()
        until(lambda: quiet(pair.alice) and quiet(pair.bob))


def make_at_home() -> rpc.RRef[int]:
    """A value that is to come whoever else is lost."""
    return rpc.remote("bob", promise)


def bits_of(value: rpc.RRef[int]) -> int:
    return value.local_value().bit_length()


def bits_of_in_another_thread(value: rpc.RRef[int]) -> int:
    context = contextvars.copy_context()
    with ThreadPoolExecutor() as pool:
        return pool.submit(context.run, bits_of, value).result()


async def bits_of_in_a_coroutine(value: rpc.RRef[int]) -> int:
    return bits_of(value)


def to_bytes_by_name(value: rpc.RRef[int]) -> rpc.Future[bytes]:
    return value.rpc_async().to_bytes(length=2, byteorder="big")


def ask_for_the_type(value: rpc.RRef[int]) -> rpc.Future[type]:
    future: rpc.Future[type] = value._get_type(blocking=False)
    return future


def call_of(handler: Callable[[rpc.RRef[int]], int]) -> Callable[[rpc.RRef[int]], rpc.Future[int]]:
    return lambda value: rpc.rpc_async("bob", handler, (value,))


WAITS = {
    "a handler": call_of(bits_of),
    "a thread of a handler's": call_of(bits_of_in_another_thread),
    "a coroutine": call_of(bits_of_in_a_coroutine),
    "a method with keywords": to_bytes_by_name,
    "a look at the type": ask_for_the_type,
}


@pytest.mark.parametrize("ask", WAITS.values(), ids=WAITS)
class TestHandlersThatWaitForAValue:
    """They end with the call that they serve, and are not reported as errors of the user's."""

    def test_when_it_is_cancelled(
        self,
        pair: Pair,
        ask: Callable[[rpc.RRef[int]], rpc.Future[int]],
        capfd: pytest.CaptureFixture[str],
    ) -> None:
        value = rpc.remote("bob", promise)
        waits = ask(value)
        until(lambda: len(pair.bob.callee.serving()) == 2)
        assert waits.cancel()
        until(lambda: len(pair.bob.callee.serving()) == 1)
        seen.promises[0].set_result(3)
        assert value.to_here() == 3
        assert capfd.readouterr().err == ""

    def test_when_its_caller_is_lost(
        self, pair: Pair, ask: Callable[[rpc.RRef[int]], rpc.Future[int]]
    ) -> None:
        value = rpc.rpc_sync("bob", make_at_home)
        waits = ask(value)
        until(lambda: len(pair.bob.callee.serving()) == 2)
        pair.hub.cut(0)
        until(lambda: len(pair.bob.callee.serving()) == 1 and pair.bob.executor.busy() == 0)
        pair.alice.caller.close("the test is over")
        with pytest.raises(rpc.AgentClosedError):
            waits.wait()


def test_a_handler_waits_for_a_value_as_long_as_its_caller_does() -> None:
    with local_group("alice", "bob") as (alice, bob), as_worker(alice):
        seen.promises.clear()
        value = rpc.remote("bob", promise)
        # Nobody else tells it: a caller's own clock may be slow, or its message late.
        with pytest.raises(RpcTimeoutError, match="set timeout"):
            rpc.rpc_sync("bob", bits_of, (value,), timeout=0.05)
        until(lambda: bob.executor.busy() == 0)
        until(lambda: bool(seen.promises))
        seen.promises[0].set_result(3)
        assert rpc.rpc_sync("bob", bits_of, (value,), timeout=5) == 2


def test_a_method_with_keywords_ends_with_the_remote_call_that_makes_its_value(pair: Pair) -> None:
    value = rpc.remote("bob", promise, timeout=5)
    waits = to_bytes_by_name(value)
    until(lambda: len(pair.bob.callee.serving()) == 2)
    pair.clock.advance(6)
    with pytest.raises(rpc.RRefCreationError):
        waits.wait()
    until(lambda: quiet(pair.alice) and quiet(pair.bob))


def _services_of(agent: Agent) -> int:
    """The requests that anything here still refers to."""
    services = [each for each in gc.get_objects() if isinstance(each, Service)]
    return sum(any(r is agent.callee for r in gc.get_referents(each)) for each in services)


def test_fetches_that_were_given_up_leave_nothing_at_a_value_to_come(pair: Pair) -> None:
    value = rpc.remote("bob", promise)
    until(lambda: bool(seen.promises))
    for _ in range(5):
        fetch = value.rpc_async().bit_length()
        until(lambda: len(pair.bob.callee.serving()) == 2)
        assert fetch.cancel()
    until(lambda: len(pair.bob.callee.serving()) == 1)
    assert eventually(lambda: _services_of(pair.bob) == 1)
    seen.promises[0].set_result(3)


def test_methods_of_a_value_to_come_hold_no_thread(pair: Pair) -> None:
    rref = rpc.remote("bob", promise)
    threads = pair.bob.executor.thread_count()
    calls = [rref.rpc_async().bit_length() for _ in range(50)]
    until(lambda: len(pair.bob.callee.serving()) == 51)
    assert pair.bob.executor.thread_count() <= threads + 2
    seen.promises[0].set_result(7)
    assert [call.wait() for call in calls] == [3] * 50


def test_a_handler_is_told_that_its_caller_was_lost(pair: Pair) -> None:
    future = rpc.rpc_async("bob", look_until_told)
    until(lambda: bool(seen.started))
    pair.hub.cut(0)
    assert seen.told.wait(SECONDS)
    until(pair.bob.callee.quiet)
    pair.alice.caller.close("the test is over")
    with pytest.raises(rpc.AgentClosedError):
        future.wait()
