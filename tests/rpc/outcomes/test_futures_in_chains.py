"""Long chains of futures, and what callbacks in them may do."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable

import pytest
import torch

from rpc.outcomes import collecting
from rpc.outcomes.futures import Future
from tests.rpc.outcomes.futures import (
    SECONDS,
)

LONG = 1000


@pytest.mark.parametrize("links", [10, 100, 2000])
def test_a_chain_of_any_length_is_followed_in_the_order_of_torchs(links: int) -> None:
    def follow(make: type[torch.futures.Future]) -> list[str]:
        seen: list[str] = []
        first = future = make()
        for number in range(links):
            future.then(lambda f, n=number: seen.append(f"before {n} {f.value()}"))
            future = future.then(lambda f: f.value() + 1)
            future.then(lambda f, n=number: seen.append(f"then {n} {f.value()}")).then(
                lambda f, n=number: seen.append(f"and {n}")
            )
        last = future
        first.set_result(0)
        assert last.value() == links
        return seen

    assert follow(Future) == follow(torch.futures.Future)


def bridged_in_then(future: Future[int]) -> Future[int]:
    after: Future[int] = Future()
    future.then(lambda f: after.set_result(f.value() + 1))
    return after


def bridged_in_a_callback(future: Future[int]) -> Future[int]:
    after: Future[int] = Future()
    future.add_done_callback(lambda f: after.set_result(f.value() + 1))
    return after


def bridged_by_turns(future: Future[int]) -> Future[int]:
    after: Future[int] = Future()
    future.then(lambda f: f.value() + 1).add_done_callback(lambda f: after.set_result(f.value()))
    return after


def bridged_after_a_wait_for_others(future: Future[int]) -> Future[int]:
    after: Future[int] = Future()

    def complete(done: Future[int]) -> None:
        other: Future[int] = Future()
        child = other.then(lambda f: f.value() + 1)
        other.set_result(done.value())
        after.set_result(child.wait())

    future.add_done_callback(complete)
    return after


@pytest.mark.parametrize(
    "bridge",
    [
        bridged_in_then,
        bridged_in_a_callback,
        bridged_by_turns,
        bridged_after_a_wait_for_others,
    ],
)
def test_a_long_chain_may_pass_through_futures_that_users_complete(
    bridge: Callable[[Future[int]], Future[int]],
) -> None:
    first: Future[int] = Future()
    last = first
    for _ in range(LONG):
        last = bridge(last)
    first.set_result(0)
    assert last.done()
    assert last.value() == LONG


def test_the_last_future_of_a_long_chain_says_in_few_words_what_it_is_of() -> None:
    future = first = Future(description="the call of f on w1")
    for _ in range(100):
        future = future.then(lambda f: f.value())
    with pytest.raises(RuntimeError, match=r"^a callback on the call of f on w1 is not done"):
        future.value()
    first.set_result(0)


def test_a_callback_deep_in_a_chain_may_complete_a_future_and_wait_for_what_hangs_on_it() -> None:
    def complete_another(f: Future[int]) -> int:
        other: Future[int] = Future()
        child = other.then(lambda o: o.value() + f.value())
        other.set_result(1)
        assert child.done()
        return child.value()

    first: Future[int] = Future()
    future = first
    for _ in range(100):
        future = future.then(complete_another)
    first.set_result(0)
    assert future.value() == 100


def wait_for_another_future(done: Future[int]) -> int:
    other: Future[int] = Future()
    child = other.then(lambda o: o.value() + done.value())
    other.set_result(1)
    return child.wait()


def wait_for_another_long_chain(done: Future[int]) -> int:
    first: Future[int] = Future()
    last = first
    for _ in range(100):
        last = last.then(lambda f: f.value())
    first.set_result(1 + done.value())
    return last.wait()


def wait_for_one_more_link(done: Future[int]) -> int:
    return done.then(lambda f: f.value() + 1).wait()


def wait_for_several(done: Future[int]) -> int:
    mine: Future[int] = Future()
    both = collecting.collect_all([done, mine]).then(lambda all_done: len(all_done.value()))
    mine.set_result(0)
    return both.wait() + done.value() - 1


@pytest.mark.parametrize(
    "wait",
    [
        wait_for_another_future,
        wait_for_another_long_chain,
        wait_for_one_more_link,
        wait_for_several,
    ],
)
def test_a_callback_at_the_end_of_a_long_chain_may_wait_for_what_it_hangs_on_futures(
    wait: Callable[[Future[int]], int],
) -> None:
    first: Future[int] = Future()
    future = first
    for _ in range(100):
        future = future.then(lambda f: f.value() + 1)
    found: list[int] = []
    future.add_done_callback(lambda done: found.append(wait(done)))
    after = future.then(lambda f: f.value())
    following = threading.Thread(target=first.set_result, args=(0,), daemon=True)
    following.start()
    following.join(SECONDS)
    assert found == [101]
    assert after.value() == 100


def test_a_long_chain_may_pass_through_futures_of_several() -> None:
    first: Future[int] = Future()
    future = first
    for _ in range(500):
        together = collecting.collect_all([future.then(lambda f: f.value())])
        future = together.then(lambda f: f.value()[0].value() + 1)
    first.set_result(0)
    assert future.value() == 500


def test_a_link_that_was_completed_by_hand_does_not_hold_up_the_rest_of_a_chain(
    caplog: pytest.LogCaptureFixture,
) -> None:
    first: Future[int] = Future()
    chain = [first]
    for _ in range(100):
        chain.append(chain[-1].then(lambda f: f.value() + 1))
    side = chain[80].then(lambda f: f.value())
    side.set_result(-1)
    after = chain[80].then(lambda f: f.value())
    first.set_result(0)
    assert (chain[-1].value(), after.value(), side.value()) == (100, 80, -1)
    assert "the completion of its own, failed" in caplog.text


def test_then_runs_in_the_context_of_the_call_to_then():
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="unset")
    future: Future[int] = Future()

    def register() -> list[Future[str]]:
        variable.set("registered")
        return [future.then(lambda _: variable.get()) for _ in range(2)]

    def complete() -> None:
        variable.set("completed")
        future.set_result(0)

    children = contextvars.copy_context().run(register)
    contextvars.copy_context().run(complete)
    assert [child.wait() for child in children] == ["registered", "registered"]
    assert variable.get() == "unset"
