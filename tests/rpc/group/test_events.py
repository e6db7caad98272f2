"""Callbacks are told of events, in order."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest

from rpc.group.events import MembershipChange, MembershipEvent, MembershipEvents
from rpc.worker_info import WorkerInfo


def event(number: int) -> MembershipEvent:
    return MembershipEvent(MembershipChange.JOINED, WorkerInfo("w", number), 1)


class Later:
    """Runs tasks when told to."""

    def __init__(self) -> None:
        self.tasks: list[Callable[[], None]] = []
        self.events = MembershipEvents(self.tasks.append)

    def run(self) -> None:
        while self.tasks:
            self.tasks.pop()()


def test_a_callback_gets_what_happens_after_it_came_in_order() -> None:
    later, seen = Later(), []
    later.events.announce(event(0))
    later.events.subscribe(seen.append)
    for number in (1, 2, 3):
        later.events.announce(event(number))
    assert len(later.tasks) == 1  # one at a time
    later.run()
    assert seen == [event(1), event(2), event(3)]


def test_a_callback_that_was_removed_gets_nothing_more() -> None:
    later, seen = Later(), []
    remove = later.events.subscribe(seen.append)
    later.events.announce(event(1))
    later.run()
    remove()
    later.events.announce(event(2))
    later.run()
    assert seen == [event(1)]


def test_one_that_raises_is_logged_and_the_others_are_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    later, seen = Later(), []

    def fail(_: MembershipEvent) -> None:
        raise ValueError("the callback failed")

    later.events.subscribe(fail)
    later.events.subscribe(seen.append)
    with caplog.at_level(logging.ERROR, "rpc"):
        later.events.announce(event(1))
        later.run()
    assert seen == [event(1)]
    assert "the callback failed" in caplog.text


def test_what_is_not_callable_is_refused() -> None:
    with pytest.raises(TypeError, match="callback='x' cannot be called"):
        Later().events.subscribe("x")  # type: ignore[arg-type]


def test_an_exit_in_a_callback_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    later, seen = Later(), []

    def leave(_: MembershipEvent) -> None:
        raise SystemExit(1)

    later.events.subscribe(leave)
    later.events.subscribe(seen.append)
    for number in (1, 2):
        later.events.announce(event(number))
        later.run()
    assert seen == [event(1), event(2)]
    assert len(caplog.records) == 2


def test_a_callback_that_was_added_twice_is_removed_once_at_a_time() -> None:
    later, seen = Later(), []
    tell = seen.append
    later.events.subscribe(tell)
    remove = later.events.subscribe(tell)
    remove()
    remove()
    later.events.announce(event(1))
    later.run()
    assert seen == [event(1)]
