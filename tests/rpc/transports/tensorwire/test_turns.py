"""Callers that crowd the cores of their host are served by turns, and all alike."""

from __future__ import annotations

from collections import Counter

import pytest

from rpc.transports.tensorwire.turns import TURN_SECONDS, Turns

SERVICE_SECONDS = 1e-4


def serve(callers: int, most: int, seconds: float) -> list[tuple[float, int]]:
    """The time at which each call was served, and its caller, who sends again at once."""
    turns: Turns[int] = Turns(most)
    ready, log, now = list(range(callers)), [], 0.0
    while now < seconds:
        backlog = turns.looked(len(ready), now)
        for caller in ready:
            if not turns.on or turns.may_serve(caller):
                backlog.append(caller)
            else:
                turns.keep(caller, [caller])
        ready = backlog
        for caller in backlog:
            now += SERVICE_SECONDS
            log.append((now, caller))
        now += 0.0 if backlog else 1e-3
    return log


def test_every_caller_is_served_as_often() -> None:
    counted = Counter(caller for _, caller in serve(callers=16, most=6, seconds=4.0))
    assert len(counted) == 16
    assert max(counted.values()) < 1.2 * min(counted.values())


def test_few_callers_are_served_within_a_turn() -> None:
    log = serve(callers=16, most=6, seconds=1.0)
    for start in range(0, 100, 5):
        began = start * TURN_SECONDS
        served = {caller for at, caller in log if began <= at < began + TURN_SECONDS}
        assert len(served) <= 12  # of this turn, and of the one before or after


def test_nobody_waits_for_longer_than_the_turns_of_all_others() -> None:
    last = dict.fromkeys(range(16), 0.0)
    for at, caller in serve(callers=16, most=6, seconds=2.0):
        assert at - last[caller] <= 3 * (TURN_SECONDS + 7 * SERVICE_SECONDS)
        last[caller] = at


@pytest.mark.parametrize("callers", [1, 6])
def test_nobody_waits_where_no_more_are_ready_than_have_a_turn(callers: int) -> None:
    turns: Turns[int] = Turns(6)
    turns.looked(callers, 0.0)
    assert not turns.on


def test_turns_end_when_nobody_waits() -> None:
    turns: Turns[str] = Turns(2)
    turns.looked(3, 0.0)
    assert [turns.may_serve(caller) for caller in (1, 2, 3)] == [True, True, False]
    turns.keep(3, ["first", "second"])
    assert not turns.may_serve(3)
    turns.keep(3, ["third"])
    assert turns.looked(1, TURN_SECONDS / 2) == []
    assert turns.looked(1, TURN_SECONDS) == ["first", "second", "third"]
    assert turns.may_serve(3)
    assert turns.looked(1, 2 * TURN_SECONDS) == []
    assert not turns.on


def test_a_turn_in_which_nobody_sends_ends_at_once() -> None:
    turns: Turns[str] = Turns(1)
    turns.looked(2, 0.0)
    assert turns.may_serve(1)
    assert not turns.may_serve(2)
    turns.keep(2, ["work"])
    assert turns.looked(0, 0.001) == ["work"]
