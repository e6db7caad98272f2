"""Ctrl-C does not get into half-done work."""

from __future__ import annotations

import operator
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import pytest
import torch

import rpc
from rpc.agent import Agent
from rpc.outcomes import collecting
from rpc.outcomes.futures import Future
from rpc.runtime import signals as interrupts
from rpc.testing import local_group
from tests.signals import heeding_interrupts
from tests.waiting import until

pytestmark = pytest.mark.skipif(
    threading.current_thread() is not threading.main_thread(),
    reason="signals are the main thread's",
)

SECONDS = 30.0


@pytest.fixture(autouse=True)
def interrupts_come_by_alarm() -> Iterator[None]:
    """A timer interrupts, as Ctrl-C does; this process may run in the background."""
    before = signal.signal(signal.SIGALRM, interrupt)
    with heeding_interrupts():
        interrupts.use()
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)


def interrupt(*_: object) -> None:
    signal.raise_signal(signal.SIGINT)


@contextmanager
def shut() -> Iterator[None]:
    before = interrupts.shut_out()
    try:
        yield
    finally:
        interrupts.restore(before)


def let_in() -> None:
    interrupts.restore(interrupts.let_in())


def test_an_interrupt_comes_when_the_work_is_done() -> None:
    done: list[int] = []

    def work() -> None:
        with shut():
            with shut():
                interrupt()
                done.append(1)
            done.append(2)

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == [1, 2]


def test_an_interrupt_comes_when_the_thread_begins_to_wait() -> None:
    with shut():
        interrupt()
        with pytest.raises(KeyboardInterrupt):
            let_in()
        interrupt()  # it is held back again
        with pytest.raises(KeyboardInterrupt):
            let_in()


def test_an_interrupt_comes_at_once_while_the_thread_waits() -> None:
    with shut():
        before = interrupts.let_in()
        with pytest.raises(KeyboardInterrupt):
            interrupt()
        interrupts.restore(before)


def test_handlers_of_the_program_are_left_alone() -> None:
    seen: list[int] = []

    def note(number: int, _: FrameType | None) -> None:
        seen.append(number)

    signal.signal(signal.SIGINT, note)
    interrupts.use()
    assert signal.getsignal(signal.SIGINT) is note
    with shut():
        interrupt()
        assert seen == [signal.SIGINT]
    interrupts.stop()
    assert signal.getsignal(signal.SIGINT) is note


def test_the_default_handler_is_put_back() -> None:
    assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    interrupts.stop()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_other_threads_hold_back_nothing() -> None:
    other = threading.Thread(target=interrupts.shut_out)
    other.start()
    other.join()
    with pytest.raises(KeyboardInterrupt):
        interrupt()


def wait_for(event_number: int) -> None:
    events[event_number].wait(SECONDS)


events = [threading.Event()]


def test_a_call_that_is_interrupted_is_given_up(pair: list[Agent]) -> None:
    alice, bob = pair
    events[0].clear()
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    with pytest.raises(KeyboardInterrupt):
        alice.rpc_sync("bob", wait_for, (0,))
    assert alice.debug_info()["calls"] == []
    events[0].set()
    until(lambda: alice.caller.quiet() and bob.callee.quiet())


@rpc.functions.idempotent
def wait_for_retried(event_number: int) -> None:
    started.append(event_number)
    wait_for(event_number)


started: list[int] = []


@pytest.mark.parametrize("seconds", [SECONDS, 0.02], ids=["in an attempt", "between two"])
def test_a_call_that_may_be_tried_again_is_not_after_it_was_interrupted(
    pair: list[Agent], seconds: float
) -> None:
    alice, bob = pair
    started.clear()
    events[0].clear()
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    retry = rpc.Retry(attempt_timeout=seconds, backoff=SECONDS)
    with pytest.raises(KeyboardInterrupt):
        alice.rpc_sync("bob", wait_for_retried, (0,), timeout=0, retry=retry)
    assert alice.retries.oldest() == 0
    assert alice.retries.paused() == alice.debug_info()["calls"] == []
    events[0].set()
    until(lambda: alice.caller.quiet() and bob.callee.quiet())
    assert started == [0]


@rpc.functions.idempotent
def make_value(event_number: int) -> rpc.RRef[list[int]]:
    wait_for(event_number)
    return rpc.RRef([1])


@pytest.mark.parametrize("retry", [None, rpc.Retry()])
def test_a_reference_that_comes_while_an_interrupt_ends_the_wait_is_let_go_of(
    retry: rpc.Retry | None,
) -> None:
    def interrupt_late(*_: object) -> None:
        events[0].set()
        until(alice.caller.quiet)
        interrupt()

    with local_group("alice", "bob") as (alice, bob):
        events[0].clear()
        signal.signal(signal.SIGALRM, interrupt_late)
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(KeyboardInterrupt):
            alice.rpc_sync("bob", make_value, (0,), retry=retry)
        until(lambda: bob.references.counts().num_forks == 0)


def test_a_handler_may_make_a_call_while_the_thread_waits_for_another(pair: list[Agent]) -> None:
    alice, _ = pair
    events[0].clear()
    found: list[int] = []

    def call(*_: object) -> None:
        found.append(alice.rpc_sync("bob", operator.neg, (1,), timeout=SECONDS))
        events[0].set()

    signal.signal(signal.SIGALRM, call)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    alice.rpc_sync("bob", wait_for, (0,))
    assert found == [-1]


def wait_for_a_call(alice: Agent) -> None:
    alice.rpc_async("bob", wait_for, (0,)).wait()


def wait_for_what_hangs_on_a_call(alice: Agent) -> None:
    alice.rpc_async("bob", wait_for, (0,)).then(lambda _: None).wait()


def wait_for_all(alice: Agent) -> None:
    collecting.collect_all([alice.rpc_async("bob", wait_for, (0,))]).wait()


def wait_for_what_events_complete(alice: Agent) -> None:
    future: Future[int] = Future()
    alice.rpc_async("bob", wait_for, (0,)).add_done_callback(lambda _: future.set_result(1))
    future.wait()


@pytest.mark.parametrize(
    "wait",
    [wait_for_a_call, wait_for_what_hangs_on_a_call, wait_for_all, wait_for_what_events_complete],
)
def test_a_thread_that_waits_for_a_future_is_interrupted(
    wait: Callable[[Agent], None], pair: list[Agent]
) -> None:
    alice, bob = pair
    events[0].clear()
    late = threading.Timer(5.0, events[0].set)
    late.start()
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(KeyboardInterrupt):
            wait(alice)
        assert not events[0].is_set(), "it ran only when the call was over"
    finally:
        late.cancel()
        late.join()
        events[0].set()
    until(lambda: alice.caller.quiet() and bob.callee.quiet())


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_interrupts_at_any_moment_cost_only_the_calls_that_they_end(pair: list[Agent]) -> None:
    alice, bob = pair
    ended = 0
    large = torch.ones(20_000)
    for number in range(600):
        try:
            signal.setitimer(signal.ITIMER_REAL, 20e-6 + (number * 37 % 400) * 1e-6)
            for _ in range(1000):  # Python drops what is raised in a destructor
                assert alice.rpc_sync("bob", operator.neg, (number,)) == -number
                alice.rpc_async("bob", torch.neg, (large,))
        except KeyboardInterrupt:
            ended += 1
    assert ended > 500
    assert alice.rpc_sync("bob", operator.neg, (1,)) == -1
    assert bob.rpc_sync("alice", operator.neg, (1,)) == -1
    until(lambda: alice.caller.quiet() and bob.callee.quiet())
