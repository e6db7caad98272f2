"""A call that is made where the stack is all but used up."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import FrameType

import pytest

from rpc.agent import Agent
from rpc.runtime import stack_room
from tests.waiting import until

SECONDS = 20.0
MOST_ROOM = 70


def deeper(levels: int, act: Callable[[], object]) -> object:
    return act() if levels <= 0 else deeper(levels - 1, act)


def depth() -> int:
    frames, frame = 0, sys._getframe()
    while isinstance(frame, FrameType):
        frames, frame = frames + 1, frame.f_back  # type: ignore[assignment]
    return frames


def outcome_with(room: int, act: Callable[[], object]) -> object:
    """The value of ``act``, or the type of what it raises, where about ``room`` frames are left."""
    outcomes: list[object] = []

    def run() -> None:
        try:
            outcomes.append(deeper(sys.getrecursionlimit() - depth() - room, act))
        except Exception as error:
            outcomes.append(type(error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(SECONDS)
    return outcomes[0] if outcomes else "it hangs"


def outcomes_of(act: Callable[[], object]) -> set[object]:
    return {outcome_with(room, act) for room in range(MOST_ROOM, 1, -1)}


def test_there_is_room_until_the_stack_is_all_but_used_up() -> None:
    assert outcome_with(stack_room._FRAMES * 2, stack_room.require) in (None, False)
    assert outcome_with(stack_room._FRAMES // 2, stack_room.require) is RecursionError


@pytest.mark.parametrize("to", ["alice", "bob"])
def test_a_call_whose_stack_runs_out_leaves_nothing_half_done(pair: list[Agent], to: str) -> None:
    alice, bob = pair
    assert outcomes_of(lambda: alice.rpc_sync(to, abs, (-1,))) == {1, RecursionError}
    assert alice.rpc_sync(to, abs, (-2,)) == 2
    until(lambda: alice.caller.quiet() and bob.callee.quiet())


def test_a_value_whose_call_had_no_stack_is_not_made(pair: list[Agent]) -> None:
    alice, bob = pair
    assert outcomes_of(lambda: alice.remote("bob", abs, (-1,)).to_here()) == {1, RecursionError}
    until(lambda: alice.caller.quiet() and alice.references.quiet())
    until(lambda: bob.references.counts().num_owner_rrefs == 0)


def test_no_reply_is_waited_for_where_it_could_not_be_taken(pair: list[Agent]) -> None:
    alice, _ = pair

    def wait() -> int:
        future = alice.rpc_async("bob", abs, (-1,))
        return int(deeper(stack_room._FRAMES - 8, future.wait))  # type: ignore[call-overload]

    assert outcomes_of(wait) == {1, RecursionError}
    assert alice.rpc_sync("bob", abs, (-2,)) == 2
    until(alice.caller.quiet)
