"""Things to be done at a time are done then, in order."""

from __future__ import annotations

from collections.abc import Callable

from rpc.runtime.timers import Timers


class Agent:
    def __init__(self) -> None:
        self.woken = 0
        self.done: list[str] = []
        self.timers = Timers(self.wake, lambda task: task())

    def wake(self) -> None:
        self.woken += 1

    def do(self, what: str) -> Callable[[], None]:
        return lambda: self.done.append(what)


def test_tasks_are_done_in_the_order_of_their_times() -> None:
    agent = Agent()
    for when, what in [(3, "c"), (1, "a"), (2, "b")]:
        agent.timers.at(when, agent.do(what))
    assert agent.woken == 3
    assert agent.timers.beat(0) == 1
    assert agent.timers.beat(2) == 3
    assert agent.done == ["a", "b"]
    assert agent.timers.beat(9) is None
    assert agent.done == ["a", "b", "c"]


def test_those_of_one_time_are_done_in_the_order_they_came() -> None:
    agent = Agent()
    for what in "xyz":
        agent.timers.at(1, agent.do(what))
    agent.timers.beat(1)
    assert agent.done == ["x", "y", "z"]


def test_what_is_dropped_is_not_done() -> None:
    agent = Agent()
    agent.timers.at(1, agent.do("a"))
    agent.timers.drop()
    assert agent.timers.beat(2) is None
    assert agent.done == []
