"""The bound on requests under way: who fits, who waits, who is woken."""

from __future__ import annotations

import contextvars
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rpc.errors import QueueFullError
from rpc.executor import Executor, share_this_thread
from rpc.transports.flow import FlowWindow, WhenFull


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
        share_this_thread()
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


@pytest.mark.parametrize("gives_way", [True, False])
def test_another_handler_runs_while_one_waits_for_room_if_that_is_wanted(
    monkeypatch: pytest.MonkeyPatch, gives_way: bool
) -> None:
    monkeypatch.setattr("rpc.executor._STALL_SECONDS", 60.0)  # nobody else notices that it waits
    executor = Executor("test", 1, contextvars.copy_context())
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
