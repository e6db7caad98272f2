"""Calls with ``retry=``, over a network that loses what it is told to lose."""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Iterator

import pytest

import rpc
from rpc import Retry, RpcTimeoutError, WorkerLostError
from rpc.agent import AgentOptions
from rpc.testing import MemoryHub, VirtualClock, as_worker, connect
from rpc.transports.base import Frame, FrameKind
from tests import waiting

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
        self.clock = VirtualClock()
        self.script = Lossy()
        self.hub = MemoryHub(self.clock, self.script)
        self.alice, self.bob = connect(
            "alice", "bob", hub=self.hub, clock=self.clock, options=AgentOptions(rpc_timeout=0)
        )

    def until(self, condition: Callable[[], bool]) -> None:
        """Lets time pass until something holds."""
        waiting.until(condition, SECONDS, 0.005, lambda: self.clock.advance(0.25))


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


@rpc.functions.idempotent
def double(number: int) -> int:
    runs.append(number)
    return 2 * number


@rpc.functions.idempotent
def wait_at_the_gate() -> str:
    runs.append(0)
    gate.wait(SECONDS)
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


def test_one_whose_reply_was_lost_is_answered_again_without_running_again(pair: Pair) -> None:
    pair.script.replies = 2
    future = rpc.rpc_async("bob", double, (4,), retry=THREE)
    pair.until(future.done)
    assert future.wait() == 8
    assert (runs, pair.script.seen) == ([4], 3)


def test_one_that_still_runs_does_not_run_twice(pair: Pair) -> None:
    future = rpc.rpc_async("bob", wait_at_the_gate, retry=THREE)
    pair.until(lambda: pair.script.seen == 3)
    gate.set()
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


def test_it_can_be_cancelled_between_two_attempts(pair: Pair) -> None:
    pair.hub.cut(1)
    future = rpc.rpc_async("bob", double, (4,), timeout=30, retry=THREE)
    assert future.cancel()
    pair.until(future.done)
    with pytest.raises(rpc.CallCancelledError):
        future.wait()


def test_only_idempotent_functions_can_be_retried(pair: Pair) -> None:
    with pytest.raises(ValueError, match=r"functions\.idempotent"):
        rpc.rpc_sync("bob", operator.add, (1, 2), retry=THREE)
    with pytest.raises(TypeError, match=r"rpc\.Retry"):
        rpc.rpc_sync("bob", double, (1,), retry=3)  # type: ignore[arg-type]


def test_builtins_cannot_be_declared_idempotent() -> None:
    with pytest.raises(TypeError, match="wrap it"):
        rpc.functions.idempotent(operator.add)


def test_outcomes_are_not_kept_for_ever(pair: Pair) -> None:
    for number in range(50):
        rpc.rpc_sync("bob", double, (number,), retry=THREE)
    assert len(pair.bob.callee._once) == 1
