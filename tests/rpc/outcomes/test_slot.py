"""A slot wakes all who wait for it, and forgets those that gave up."""

from __future__ import annotations

import threading

import pytest

from rpc.errors import RpcTimeoutError
from rpc.outcomes.slot import Slot
from tests.waiting import until


def waiters(slot: Slot, count: int) -> tuple[list[threading.Thread], list[object]]:
    """Threads that wait for the slot, and what they get."""
    got: list[object] = []
    threads = [
        threading.Thread(target=lambda limit=limit: got.append(slot.wait(limit)))
        for limit in [0.0, 60.0] * (count // 2)
    ]
    for thread in threads:
        thread.start()
    until(lambda: len(slot._waiting) == count)
    return threads, got


def test_everyone_who_waits_gets_the_value() -> None:
    slot = Slot()
    threads, got = waiters(slot, 4)
    slot.fill("value")
    for thread in threads:
        thread.join()
    assert got == ["value"] * 4
    assert slot.wait() == "value"


def test_only_the_first_outcome_counts() -> None:
    slot = Slot()
    slot.fail(ValueError("first"))
    slot.fill("second")
    with pytest.raises(ValueError, match="first"):
        slot.wait()


def test_a_wait_that_is_over_leaves_nothing() -> None:
    slot = Slot()
    for _ in range(3):
        with pytest.raises(RpcTimeoutError, match=r"set timeout \(1 ms\)"):
            slot.wait(0.001)
    assert slot._waiting == []
    slot.fill(5)
    assert slot.wait(0.001) == 5


def test_a_transport_waits_in_its_own_way() -> None:
    slot = Slot()
    seen: list[bool] = []

    def wait(done: object, block: object) -> None:
        assert callable(done)
        assert callable(block)
        seen.append(done())
        slot.fill(None)
        block()
        seen.append(done())

    slot.wait_with(wait)
    assert seen == [False, True]


def test_callbacks_run_once_whenever_they_come() -> None:
    slot = Slot()
    seen: list[object] = []
    slot.when_done(lambda done: seen.append(done.value()))
    slot.fill(1)
    slot.when_done(lambda done: seen.append(done.value()))
    slot.fill(2)
    assert seen == [1, 1]
