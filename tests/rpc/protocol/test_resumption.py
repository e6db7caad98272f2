"""Going on with another connection: what is sent again, which connection counts, when to tell."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rpc.errors import FrameError
from rpc.protocol.resumption import (
    MOST_IN_VAIN,
    CannotResumeError,
    Receipts,
    ReconnectEpoch,
    Replacement,
    SentMessages,
)


@dataclass
class Wire:
    """One direction of one connection: what is on its way, and what of it was read."""

    messages: deque[int] = field(default_factory=deque)
    broken: bool = False


class End:
    """One end of a link: the bookkeeping of a sender and a receiver."""

    def __init__(self) -> None:
        self.sent = 0
        self.memory: SentMessages[int] = SentMessages()
        self.arrived: list[int] = []

    def send(self, wire: Wire) -> None:
        self.memory.messages.append(self.sent)
        self.sent += 1
        if not wire.broken:
            wire.messages.append(self.memory.messages[-1])

    def read(self, wire: Wire, count: int) -> None:
        for _ in range(min(count, len(wire.messages))):
            self.arrived.append(wire.messages.popleft())

    def acknowledge(self, other: End) -> None:
        other.memory.acknowledged(other.sent, len(self.arrived))

    def resume(self, received: int) -> Wire:
        return Wire(deque(self.memory.missing(self.sent, received)))


_ENDS = st.integers(0, 1)
_STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("send"), _ENDS, st.just(0)),
        st.tuples(st.just("read"), _ENDS, st.integers(1, 5)),
        st.tuples(st.just("acknowledge"), _ENDS, st.just(0)),
        st.tuples(st.just("break"), _ENDS, st.integers(0, 3)),
        st.tuples(st.just("resume"), _ENDS, st.just(0)),
    ),
    max_size=80,
)


@given(_STEPS)
def test_whatever_breaks_everything_arrives_once_and_in_order(
    steps: list[tuple[str, int, int]],
) -> None:
    ends = [End(), End()]
    wires = [Wire(), Wire()]  # what each end sends on
    for step, who, count in steps:
        me, other = ends[who], ends[1 - who]
        if step == "send":
            me.send(wires[who])
        elif step == "read":
            me.read(wires[1 - who], count)
        elif step == "acknowledge":
            me.acknowledge(other)
        elif step == "break":
            for wire in wires:  # only part of what was on its way arrives
                wire.broken = True
                wire.messages = deque(list(wire.messages)[:count])
        elif all(wire.broken for wire in wires):
            _resume(ends, wires)
    _resume(ends, wires)
    for who in (0, 1):
        ends[1 - who].read(wires[who], len(wires[who].messages))
        assert ends[1 - who].arrived == list(range(ends[who].sent))


def _resume(ends: list[End], wires: list[Wire]) -> None:
    for who in (0, 1):  # what is there is read to its end first
        ends[1 - who].read(wires[who], len(wires[who].messages))
    wires[:] = [ends[who].resume(len(ends[1 - who].arrived)) for who in (0, 1)]


@given(st.integers(0, 20), st.integers(0, 20), st.integers(0, 20))
def test_only_what_is_not_acknowledged_is_remembered(sent: int, first: int, second: int) -> None:
    memory: SentMessages[int] = SentMessages()
    memory.messages.extend(range(sent))
    received = sorted((min(first, sent), min(second, sent)))
    forgotten = [n for count in received for n in memory.acknowledged(sent, count)]
    assert forgotten == list(range(received[1]))
    assert memory.acknowledged(sent, received[0]) == []
    assert list(memory.messages) == list(range(received[1], sent))
    assert memory.missing(sent, received[1]) == list(range(received[1], sent))


def test_what_was_never_sent_cannot_be_acknowledged() -> None:
    memory: SentMessages[int] = SentMessages()
    memory.messages.append(0)
    with pytest.raises(FrameError, match="2 messages are acknowledged, but 1 were sent"):
        memory.acknowledged(1, 2)
    with pytest.raises(CannotResumeError):
        memory.missing(1, 2)


def test_what_is_beyond_the_bound_cannot_be_sent_again() -> None:
    memory: SentMessages[int] = SentMessages(3)
    memory.messages.extend(range(5))
    assert memory.missing(5, 2) == [2, 3, 4]
    with pytest.raises(CannotResumeError, match="has 1 messages of 5, and the last 3 are"):
        memory.missing(5, 1)
    assert memory.acknowledged(5, 4) == [2, 3]
    assert memory.forget() == [4]
    assert memory.forget() == []


def resumptions(memory: SentMessages[int], sent: int, received: int) -> int:
    """Counts how often in a row a connection may take another's place, a thousand times at most."""
    for count in range(1000):
        try:
            memory.missing(sent, received)
        except CannotResumeError:
            return count
        memory.sent_again()
    return 1000


def test_what_arrives_on_no_connection_is_not_sent_for_ever() -> None:
    memory: SentMessages[int] = SentMessages()
    memory.messages.extend(range(5))
    for received in (2, 3):
        assert resumptions(memory, 5, received) == MOST_IN_VAIN
    memory.missing(5, 4)
    memory.sent_again()
    assert resumptions(memory, 5, 4) == MOST_IN_VAIN - 1


def test_connections_on_which_nothing_was_sent_are_not_counted() -> None:
    memory: SentMessages[int] = SentMessages()
    memory.messages.extend(range(5))
    for _ in range(2 * MOST_IN_VAIN):
        memory.missing(5, 2)
    assert resumptions(memory, 5, 2) == MOST_IN_VAIN


def test_who_gives_up_says_which_message_did_not_arrive_and_on_how_many_connections() -> None:
    memory: SentMessages[int] = SentMessages()
    memory.messages.extend(range(5))
    count = resumptions(memory, 5, 2)
    memory.missing(5, 1)  # forgets how many were in vain
    for _ in range(count):
        memory.missing(5, 2)
        memory.sent_again()
    with pytest.raises(CannotResumeError, match=f"message 2 did not arrive on any of {count} con"):
        memory.missing(5, 2)


def test_connections_that_take_something_further_may_break_without_end() -> None:
    memory: SentMessages[int] = SentMessages()
    memory.messages.extend(range(1000))
    for received in range(1000):
        for _ in range(10):
            memory.missing(1000, received)
    assert resumptions(memory, 1000, 1000) == 1000, "nothing is missing"


def test_a_connection_that_is_not_to_be_resumed_costs_no_memory() -> None:
    memory: SentMessages[int] = SentMessages(0)
    memory.messages.append(0)
    assert memory.acknowledged(1, 1) == []
    assert memory.forget() == []
    assert memory.missing(1, 1) == []


def test_little_is_acknowledged_late_and_once_and_much_at_once() -> None:
    told: list[str] = []
    receipts = Receipts(10, 100, lambda: told.append("late"))
    receipts.owed += 10
    assert receipts.owed >= receipts.limit
    assert not receipts.due()
    assert told == ["late"]
    receipts.owed += 50
    assert receipts.owed < receipts.limit
    receipts.owed += 40
    assert receipts.owed >= receipts.limit
    assert receipts.due()
    receipts.paid()
    assert (receipts.owed, receipts.limit, told) == (0, 10, ["late"])


def test_a_connection_takes_the_place_of_a_broken_one() -> None:
    epoch = ReconnectEpoch()
    epoch.broke(5.0, "reset")
    epoch.broke(6.0, "seen again")
    assert (epoch.since, epoch.reason) == (5.0, "reset")
    assert epoch.left(6.0, 3.0) == 2.0
    assert epoch.left(9.0, 3.0) == 0.0
    assert epoch.offered(1) is Replacement.TAKE
    epoch.joined(1)
    assert (epoch.attempt, epoch.since, epoch.reason) == (1, None, "")
    assert epoch.left(100.0, 3.0) == 3.0


def test_a_whole_connection_breaks_before_another_takes_its_place() -> None:
    epoch = ReconnectEpoch()
    assert epoch.offered(1) is Replacement.BREAK_FIRST
    assert epoch.offered(1) is Replacement.STALE
    assert epoch.offered(2) is Replacement.BREAK_FIRST
    epoch.broke(1.0, "given up")
    assert epoch.offered(1) is Replacement.STALE
    assert epoch.offered(3) is Replacement.TAKE


def test_attempts_are_numbered_from_one() -> None:
    epoch = ReconnectEpoch()
    assert [epoch.next_attempt() for _ in range(3)] == [1, 2, 3]


@pytest.mark.parametrize(
    ("broken", "attempt", "breaks"),
    [(False, 2, True), (False, 1, False), (False, 0, False), (True, 2, False)],
)
def test_a_knock_breaks_the_connection_that_the_other_end_lost_and_no_other(
    broken: bool, attempt: int, breaks: bool
) -> None:
    epoch = ReconnectEpoch(attempt=2)
    if broken:
        epoch.broke(1.0, "reset")
    assert epoch.reconnect_requested(attempt) is breaks
