"""The bound on requests under way: who fits, who waits, who is woken."""

from __future__ import annotations

import threading

from hypothesis import given
from hypothesis import strategies as st

from rpc.transports.tensorwire.flow import FlowWindow


@given(st.lists(st.tuples(st.integers(0, 150_000), st.booleans()), max_size=60))
def test_small_and_large_are_each_held_to_the_bound(steps: list[tuple[int, bool]]) -> None:
    window = FlowWindow(300_000)
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
    window = FlowWindow(1000)
    assert window.try_charge(1, 5_000_000)
    assert not window.try_charge(2, 70_000)
    assert window.try_charge(3, 1)
    window.release(1)
    assert window.try_charge(2, 70_000)


def test_a_forced_charge_is_held_like_any_other() -> None:
    window = FlowWindow(8192)
    window.force_charge(1, 8192)
    window.force_charge(2, 8192)
    assert window.held == 16384
    window.release(1)
    window.release(1)
    assert window.held == 8192


def test_a_waiter_is_woken_when_there_is_room_or_never_will_be() -> None:
    for wake in (lambda w: w.release(1), lambda w: w.close()):
        window = FlowWindow(8192)
        window.force_charge(1, 8192)
        waiter = threading.Thread(target=window.wait_for_room, args=(5000,))
        waiter.start()
        wake(window)
        waiter.join(10)
        assert not waiter.is_alive()
