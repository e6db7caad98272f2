"""Calls with ``retry=``, over a network that loses what it is told to lose."""

from __future__ import annotations

import asyncio
import gc
import operator
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import ClassVar

import pytest
import torch

import autograd_dist
import rpc
from rpc import Retry, RpcTimeoutError, WorkerLostError
from rpc.agent import Agent, AgentOptions
from rpc.observe.debug_dump import describe
from rpc.testing import MemoryHub, as_worker, connect
from rpc.transports.base import Frame, FrameKind, Peer
from tests import waiting
from tests.virtual_time import SteadyClock

SECONDS = 20.0


class Lossy:
    """Drops the first frames of each kind, as many as it is told."""

    def __init__(self) -> None:
        self.requests = self.replies = 0
        self.seen = 0

    def delay(self, source: int, destination: int, frame: Frame) -> float | None:
        if frame.kind is FrameKind.REQUEST:
            self.seen += 1
            self.requests -= 1
            return None if self.requests >= 0 else 0.0
        if frame.kind is FrameKind.REPLY:
            self.replies -= 1
            return None if self.replies >= 0 else 0.0
        return 0.0


class Pair:
    def __init__(self) -> None:
        self.clock = SteadyClock()
        self.script = Lossy()
        self.hub = MemoryHub(self.clock, self.script)
        self.alice, self.bob = connect(
            "alice", "bob", hub=self.hub, clock=self.clock, options=AgentOptions(rpc_timeout=0)
        )

    def until(self, condition: Callable[[], bool]) -> None:
        """Lets time pass until something holds."""
        waiting.until(condition, SECONDS, 0, self.step)

    def step(self) -> None:
        """Moves time by less than anything takes here."""
        self.clock.step(0.25, (self.alice, self.bob), lambda: len(held))


@pytest.fixture
def pair() -> Iterator[Pair]:
    runs.clear()
    gate.clear()
    made = Pair()
    with as_worker(made.alice):
        yield made
    gate.set()
    for agent in (made.alice, made.bob):
        agent.shutdown(graceful=False)


runs: list[int] = []
gate = threading.Event()
held: list[str] = []


def wait_for_the_gate() -> None:
    held.append("here")
    gate.wait(SECONDS)
    held.pop()


def open_the_gate() -> None:
    """No time may pass before those who wait at it have gone on."""
    gate.set()
    waiting.until(lambda: not held)


@rpc.functions.idempotent
def double(number: int) -> int:
    runs.append(number)
    return 2 * number


@rpc.functions.idempotent
def wait_at_the_gate() -> str:
    runs.append(0)
    wait_for_the_gate()
    return "through"


@rpc.functions.idempotent
def fail(number: int) -> None:
    runs.append(number)
    raise KeyError(number)


THREE = Retry(attempts=3, backoff=0.5, attempt_timeout=2)


def test_a_call_that_succeeds_is_made_once(pair: Pair) -> None:
    assert rpc.rpc_sync("bob", double, (4,), retry=THREE) == 8
    assert pair.script.seen == 1


def test_a_request_that_was_lost_is_sent_again(pair: Pair) -> None:
    pair.script.requests = 2
    future = rpc.rpc_async("bob", double, (4,), retry=THREE)
    pair.until(future.done)
    assert future.wait() == 8
    assert (runs, pair.script.seen) == ([4], 3)


@rpc.functions.idempotent
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def test_one_that_was_made_without_gradients_is_sent_again_without(pair: Pair) -> None:
    x = torch.ones(2, requires_grad=True)
    with autograd_dist.context():
        pair.script.requests = 1
        with torch.no_grad():
            future = rpc.rpc_async("bob", twice, (x,), retry=THREE)
        pair.until(future.done)
        assert not future.wait().requires_grad
        assert pair.script.seen == 2


def test_one_whose_reply_was_lost_is_answered_again_without_running_again(pair: Pair) -> None:
    pair.script.replies = 2
    future = rpc.rpc_async("bob", double, (4,), retry=THREE)
    pair.until(future.done)
    assert future.wait() == 8
    assert (runs, pair.script.seen) == ([4], 3)


def test_one_that_still_runs_does_not_run_twice(pair: Pair) -> None:
    future = rpc.rpc_async("bob", wait_at_the_gate, retry=THREE)
    pair.until(lambda: pair.script.seen == 3)
    open_the_gate()
    pair.until(future.done)
    assert future.wait() == "through"
    assert runs == [0]


def test_an_error_of_the_function_is_no_reason_to_try_again(pair: Pair) -> None:
    with pytest.raises(KeyError, match="7"):
        rpc.rpc_sync("bob", fail, (7,), retry=THREE)
    assert runs == [7]


def test_the_last_failure_is_told(pair: Pair) -> None:
    pair.script.requests = 99
    future = rpc.rpc_async("bob", double, (4,), retry=THREE)
    pair.until(future.done)
    with pytest.raises(RpcTimeoutError):
        future.wait()
    assert pair.script.seen == 3


def test_a_lost_worker_is_tried_while_there_is_time(pair: Pair) -> None:
    pair.hub.cut(1)
    future = rpc.rpc_async("bob", double, (4,), timeout=30, retry=THREE)
    start = pair.clock.now()
    pair.until(future.done)
    assert pair.clock.now() - start > 10
    with pytest.raises(WorkerLostError):
        future.wait()


def test_what_waits_between_two_attempts_is_told_with_its_reason(pair: Pair) -> None:
    assert pair.alice.debug_info()["retrying"] == []
    pair.hub.cut(1)
    future = rpc.rpc_async("bob", double, (4,), timeout=30, retry=THREE)
    pair.until(lambda: bool(pair.alice.debug_info()["retrying"]))
    (waiting,) = pair.alice.debug_info()["retrying"]
    assert (waiting["call"], waiting["to"]) == ("double", "bob")
    assert 0 <= waiting["again_in"] <= 30
    assert waiting["after"].startswith("WorkerLostError: worker 'bob'")
    assert "double -> bob, after WorkerLostError: worker 'bob'" in describe(pair.alice)
    future.cancel()
    pair.until(future.done)
    assert pair.alice.debug_info()["retrying"] == []


def test_shutting_down_ends_what_waits_between_two_attempts(pair: Pair) -> None:
    pair.hub.cut(1)
    before = rpc.rpc_async("bob", double, (4,), retry=THREE)
    pair.until(lambda: bool(pair.alice.debug_info()["retrying"]))
    pair.alice.shutdown(graceful=False)
    with pytest.raises(rpc.AgentClosedError, match="double: this worker shut down"):
        before.wait()
    with pytest.raises((rpc.AgentClosedError, WorkerLostError)):
        rpc.rpc_async("bob", double, (4,), retry=THREE).wait()


def test_it_can_be_cancelled_between_two_attempts(pair: Pair) -> None:
    pair.hub.cut(1)
    future = rpc.rpc_async("bob", double, (4,), timeout=30, retry=THREE)
    assert future.cancel()
    pair.until(future.done)
    with pytest.raises(rpc.CallCancelledError):
        future.wait()


class CancelsWhenSentAgain:
    """An argument during whose second encoding the call is cancelled."""

    times = 0
    future: ClassVar[rpc.Future[None]]

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        CancelsWhenSentAgain.times += 1
        if self.times == 2:
            assert self.future.cancel()
        return int, (4,)


@rpc.functions.idempotent
def wait_until_cancelled(number: int) -> None:
    if not waiting.eventually(rpc.cancelled, 5):
        runs.append(number)


def test_one_that_is_cancelled_while_it_is_encoded_again_is_not_wanted(pair: Pair) -> None:
    CancelsWhenSentAgain.times = 0
    pair.script.requests = 1
    argument = CancelsWhenSentAgain()
    future = rpc.rpc_async("bob", wait_until_cancelled, (argument,), retry=THREE)
    CancelsWhenSentAgain.future = future
    pair.until(future.done)
    with pytest.raises(rpc.CallCancelledError):
        future.wait()
    waiting.until(lambda: pair.script.seen == 2 and not pair.bob.callee.serving())
    assert (runs, CancelsWhenSentAgain.times) == ([], 2)
    del CancelsWhenSentAgain.future


def test_one_that_is_over_cannot_be_cancelled_any_more(pair: Pair) -> None:
    future = rpc.rpc_async("bob", double, (4,), retry=THREE)
    canceller = future.canceller
    pair.until(future.done)
    assert canceller is not None
    assert not canceller(future)
    assert future.wait() == 8


def test_only_idempotent_functions_can_be_retried(pair: Pair) -> None:
    with pytest.raises(ValueError, match=r"functions\.idempotent"):
        rpc.rpc_sync("bob", operator.add, (1, 2), retry=THREE)
    with pytest.raises(TypeError, match=r"rpc\.Retry"):
        rpc.rpc_sync("bob", double, (1,), retry=3)  # type: ignore[arg-type]


class Shelf:
    @rpc.functions.idempotent
    @staticmethod
    def static(number: int) -> int:
        return number + 1

    @rpc.functions.idempotent
    @classmethod
    def of_class(cls, number: int) -> int:
        return number + 2

    @staticmethod
    @rpc.functions.idempotent
    def inner(number: int) -> int:
        return number + 3


def test_the_mark_may_be_outside_of_what_makes_a_static_method(pair: Pair) -> None:
    functions = (Shelf.static, Shelf.of_class, Shelf.inner)
    assert [rpc.rpc_sync("bob", each, (1,), retry=THREE) for each in functions] == [2, 3, 4]


def test_builtins_cannot_be_declared_idempotent() -> None:
    with pytest.raises(TypeError, match="wrap it"):
        rpc.functions.idempotent(operator.add)


def test_outcomes_are_not_kept_for_ever(pair: Pair) -> None:
    for number in range(50):
        rpc.rpc_sync("bob", double, (number,), retry=THREE)
    assert pair.bob.callee.kept_outcomes() == 1


def test_outcomes_are_not_kept_longer_than_anybody_can_ask_for_them(pair: Pair) -> None:
    rpc.rpc_sync("bob", double, (1,), timeout=60, retry=THREE)
    rpc.rpc_sync("bob", double, (2,), timeout=3, retry=THREE)
    assert pair.bob.callee.kept_outcomes() == 1
    pair.until(lambda: pair.bob.callee.kept_outcomes() == 0)
    assert 3 <= pair.clock.now() < 20


# --- remote() -----------------------------------------------------------------------


class Thing:
    """A value that is no constant, so that it does not come along with the reply."""

    made: ClassVar[list[weakref.ref[Thing]]] = []

    def __init__(self, number: int) -> None:
        self.number = number
        Thing.made.append(weakref.ref(self))


@rpc.functions.idempotent
def make_thing(number: int) -> Thing:
    return Thing(number)


@rpc.functions.idempotent
def make_slowly() -> Thing:
    runs.append(0)
    wait_for_the_gate()
    return Thing(1)


def number_of(thing: rpc.RRef[Thing]) -> int:
    return thing.local_value().number


@pytest.fixture
def things() -> Iterator[list[weakref.ref[Thing]]]:
    Thing.made.clear()
    yield Thing.made
    Thing.made.clear()


@rpc.functions.idempotent
def refer_slowly() -> rpc.RRef[Thing]:
    wait_for_the_gate()
    return rpc.RRef(Thing(1))


def test_a_reference_that_comes_when_the_call_was_over_is_let_go_of(pair: Pair) -> None:
    future = rpc.rpc_async("bob", refer_slowly, retry=THREE)
    pair.until(lambda: bool(held))
    pair.alice.retries.close("it is enough")
    with pytest.raises(rpc.RpcError, match="it is enough"):
        future.wait()
    open_the_gate()
    pair.until(pair.alice.caller.quiet)
    pair.until(lambda: pair.bob.references.counts().num_forks == 0)


class TestCreations:
    def test_one_that_succeeds_is_asked_for_once(self, pair: Pair) -> None:
        rref = rpc.remote("bob", double, (4,), retry=THREE)
        rref._get_future().wait()
        assert (runs, pair.script.seen) == ([4], 1)
        assert rref.to_here() == 8

    def test_a_request_that_was_lost_is_sent_again(self, pair: Pair) -> None:
        pair.script.requests = 2
        rref = rpc.remote("bob", double, (4,), retry=THREE)
        pair.until(rref._get_future().done)
        assert rref.to_here() == 8
        assert (runs, pair.script.seen) == ([4], 3)

    def test_one_whose_reply_was_lost_makes_no_second_value(
        self, pair: Pair, things: list[weakref.ref[Thing]]
    ) -> None:
        pair.script.replies = 2
        rref = rpc.remote("bob", make_thing, (4,), retry=THREE)
        pair.until(rref._get_future().done)
        assert rref.confirmed_by_owner()
        assert pair.script.seen == 3
        assert rpc.rpc_sync("bob", number_of, (rref,)) == 4
        assert len(things) == 1
        assert pair.bob.references.counts().num_owner_rrefs == 1

    def test_its_value_goes_with_the_last_reference(
        self, pair: Pair, things: list[weakref.ref[Thing]]
    ) -> None:
        pair.script.replies = 1
        rref = rpc.remote("bob", make_thing, (4,), retry=THREE)
        pair.until(rref._get_future().done)
        del rref
        pair.until(lambda: pair.bob.references.counts().num_owner_rrefs == 0)
        waiting.until(lambda: gc.collect() >= 0 and things[0]() is None)

    def test_one_that_is_still_under_way_is_not_run_twice(
        self, pair: Pair, things: list[weakref.ref[Thing]]
    ) -> None:
        rref = rpc.remote("bob", make_slowly, retry=THREE)
        pair.until(lambda: pair.script.seen == 3)
        open_the_gate()
        pair.until(rref._get_future().done)
        assert rpc.rpc_sync("bob", number_of, (rref,)) == 1
        assert (runs, len(things)) == ([0], 1)

    def test_an_error_of_the_function_is_kept_and_no_reason_to_try_again(self, pair: Pair) -> None:
        pair.script.replies = 1
        rref = rpc.remote("bob", fail, (7,), retry=THREE)
        pair.until(rref._get_future().done)
        with pytest.raises(KeyError, match="7"):
            rref.to_here()
        assert runs == [7]

    def test_the_last_failure_is_told_and_nothing_stays_at_the_owner(self, pair: Pair) -> None:
        pair.script.replies = 99
        rref = rpc.remote("bob", double, (4,), retry=THREE)
        pair.until(rref._get_future().done)
        with pytest.raises(rpc.RRefCreationError):
            rref.to_here()
        assert (runs, pair.script.seen) == ([4], 3)
        pair.until(lambda: pair.bob.references.counts().num_owner_rrefs == 0)
        assert pair.alice.references.creations.under_way() == 0

    def test_nothing_is_tried_after_its_owner_was_lost(self, pair: Pair) -> None:
        pair.script.requests = 1
        rref = rpc.remote("bob", double, (4,), timeout=30, retry=THREE)
        pair.hub.cut(1)
        start = pair.clock.now()
        pair.until(rref._get_future().done)
        assert pair.clock.now() - start < 10
        with pytest.raises((rpc.RRefCreationError, WorkerLostError), match="was lost"):
            rref.to_here()

    def test_a_value_is_not_made_in_a_later_life_of_its_owner(self, pair: Pair) -> None:
        pair.script.requests = 1
        slow = Retry(attempts=2, backoff=8, attempt_timeout=2)
        rref = rpc.remote("bob", double, (4,), retry=slow)
        pair.until(lambda: not pair.alice.caller.outstanding())  # between the two attempts
        options = AgentOptions(rpc_timeout=0)
        again = Agent(pair.bob.info, 1, pair.hub.transport(), options, pair.clock)
        peers = [Peer(again.info, 1, again.start()), pair.alice.group.peer(0)]
        again.join(peers)
        pair.alice.add_peer(peers[0])
        pair.until(rref._get_future().done)
        with pytest.raises((rpc.RRefCreationError, WorkerLostError)):
            rref.to_here()
        assert rpc.rpc_sync("bob", double, (5,)) == 10
        assert runs == [5]
        again.shutdown(graceful=False)

    def test_on_this_worker_itself(self, pair: Pair) -> None:
        pair.script.replies = 1
        rref = rpc.remote("alice", double, (4,), retry=THREE)
        pair.until(rref._get_future().done)
        assert (rref.to_here(), runs) == (8, [4])

    def test_only_idempotent_functions_can_be_retried(self, pair: Pair) -> None:
        with pytest.raises(ValueError, match=r"functions\.idempotent"):
            rpc.remote("bob", operator.add, (1, 2), retry=THREE)
        with pytest.raises(TypeError, match=r"rpc\.Retry"):
            rpc.remote("bob", double, (1,), retry=3)  # type: ignore[arg-type]
        assert pair.alice.references.creations.under_way() == 0

    def test_an_argument_that_cannot_be_sent_is_told_at_once(self, pair: Pair) -> None:
        with pytest.raises(rpc.EncodeError):
            rpc.remote("bob", double, (threading.Lock(),), retry=THREE)
        assert pair.alice.references.creations.under_way() == 0
        assert pair.alice.retries.oldest() == 0

    def test_outcomes_are_not_kept_for_ever(self, pair: Pair) -> None:
        for number in range(50):
            rpc.remote("bob", double, (number,), retry=THREE)._get_future().wait()
        assert pair.bob.callee.kept_outcomes() == 1


# --- Attempts that end before the function does ---------------------------------------


@rpc.functions.idempotent
async def wait_in_a_coroutine() -> str:
    runs.append(0)
    while not gate.is_set():
        await asyncio.sleep(0.001)
    return "through"


@rpc.functions.idempotent
def look_whether_cancelled() -> bool:
    runs.append(0)
    wait_for_the_gate()
    return rpc.cancelled()


class TestAttemptsThatEnd:
    def test_a_coroutine_goes_on_for_the_next(self, pair: Pair) -> None:
        future = rpc.rpc_async("bob", wait_in_a_coroutine, retry=THREE)
        pair.until(lambda: pair.script.seen == 2)
        open_the_gate()
        pair.until(future.done)
        assert (future.wait(), runs) == ("through", [0])

    def test_the_function_is_not_cancelled_while_another_may_come(self, pair: Pair) -> None:
        future = rpc.rpc_async("bob", look_whether_cancelled, timeout=60, retry=THREE)
        pair.until(lambda: pair.script.seen == 2)
        open_the_gate()
        pair.until(future.done)
        assert future.wait() is False

    def test_a_call_that_is_given_up_cancels_the_attempt_that_runs(self, pair: Pair) -> None:
        future = rpc.rpc_async("bob", wait_in_a_coroutine, retry=THREE)
        pair.until(lambda: pair.script.seen == 2 and len(pair.bob.callee.serving()) == 2)
        assert future.cancel()
        pair.until(lambda: not pair.bob.callee.serving())
        assert not gate.is_set()

    def test_giving_up_between_two_attempts_cancels_what_runs(self, pair: Pair) -> None:
        patient = Retry(attempts=3, attempt_timeout=1, backoff=1000)
        future = rpc.rpc_async("bob", wait_in_a_coroutine, timeout=5000, retry=patient)
        pair.until(lambda: runs == [0] and not pair.alice.caller.outstanding())
        assert future.cancel()
        pair.until(lambda: not pair.bob.callee.serving())
        assert not gate.is_set()
        assert pair.script.seen == 1

    def test_the_last_attempt_that_ends_cancels_it(self, pair: Pair) -> None:
        future = rpc.rpc_async("bob", wait_in_a_coroutine, retry=THREE)
        pair.until(lambda: future.done() and not pair.bob.callee.serving())
        with pytest.raises(RpcTimeoutError):
            future.wait()
