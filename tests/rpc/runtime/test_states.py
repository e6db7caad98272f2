"""States that packages above keep with a worker hear that it leaves, and are closed at the end."""

from __future__ import annotations

import pytest

from rpc.errors import AgentClosedError
from rpc.runtime.states import States


def test_states_leave_and_then_close_the_latest_first() -> None:
    states, told = States(), []
    for name in ("one", "two"):
        states.get(
            name,
            lambda name=name: name,
            lambda state: told.append(f"{state} closes"),
            lambda state: told.append(f"{state} leaves"),
        )
    states.get("neither", object)
    states.leave()
    assert states.get("one", object) == "one"
    states.close()
    assert told == ["two leaves", "one leaves", "two closes", "one closes"]
    with pytest.raises(AgentClosedError, match="keeps nothing for 'one'"):
        states.get("one", object)


def test_a_state_that_fails_keeps_no_other_from_leaving() -> None:
    states, told = States(), []
    states.get("one", object, leave=lambda _: told.append("one"))
    states.get("two", object, leave=lambda _: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        states.leave()
    assert told == ["one"]
