"""A channel whose connection is replaced: what is sent again, and what is kept for that."""

from __future__ import annotations

import os
import select
import socket
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import pytest

from rpc.errors import FrameError
from rpc.protocol.resumption import CannotResumeError
from rpc.transports.tensorwire import channel
from rpc.transports.tensorwire.channel import QueuedFrame, Sender
from tests.rpc.transports.tensorwire.descriptors import to_be_closed
from tests.rpc.transports.tensorwire.wires import (
    SECONDS,
    Wire,
)


class Replaceable(Wire):
    """A sender that remembers, and the other end of the connection that it has at the moment."""

    def __init__(self) -> None:
        super().__init__(1 << 10)

    def replace(self) -> None:
        """The connection breaks, and another takes its place."""
        self.sender.resume(self.begin_to_replace())

    def begin_to_replace(self) -> int:
        """The same, up to what is to be sent again."""
        self.sender.stop()
        self.other.close()
        new, self.other = socket.socketpair()
        new.setblocking(False)
        self.other.settimeout(10)
        self.decoder.restart()
        return self.sender.replace(new, self.decoder.received)


@pytest.fixture
def replaceable() -> Iterator[Replaceable]:
    made = Replaceable()
    yield made
    made.close()


def test_what_got_lost_is_sent_again_and_nothing_else(replaceable: Replaceable) -> None:
    wire = replaceable
    big = bytes(range(256)) * 200
    for number in range(10):
        wire.sender.send_small(1, number, b"h", b"", b"p")
        wire.sender.send(QueuedFrame(1, number, b"big", b"", (big, b"tail"), len(big) + 4))
    wire.receive(7)
    wire.replace()
    wire.sender.send_small(1, 10, b"after", b"", b"p")
    wire.receive(21)
    numbers = [number for number, _, _ in wire.found]
    assert numbers == sorted([*range(10), *range(10), 10])
    assert wire.unsent.count == 0


def test_frames_that_were_held_when_the_connection_broke_are_sent(
    replaceable: Replaceable,
) -> None:
    wire = replaceable
    for number in range(3):
        wire.sender.hold_small(1, number, b"h", b"", b"p")
    wire.sender.stop()
    wire.sender.hold_small(1, 3, b"h", b"", b"p")
    wire.sender.flush()
    wire.replace()
    wire.receive(4)
    assert [number for number, _, _ in wire.found] == list(range(4))
    assert wire.unsent.count == 0


def test_frames_wait_while_there_is_no_connection(replaceable: Replaceable) -> None:
    wire = replaceable
    wire.sender.stop()
    for number in range(300):
        wire.sender.send_small(1, number, b"h", b"", b"p" * number)
    assert wire.unsent.count > 300
    wire.sender.writable()
    wire.replace()
    wire.receive(300)
    assert [number for number, _, _ in wire.found] == list(range(300))
    assert wire.unsent.count == 0


def test_a_connection_that_breaks_while_it_is_written_to_loses_nothing(
    replaceable: Replaceable,
) -> None:
    wire = replaceable
    while not wire.watching:
        wire.sender.send_small(1, 0, b"h", b"", b"x" * 60_000)
    wire.other.close()
    wire.sender.writable()
    for _ in range(5):
        wire.sender.send_small(1, 1, b"h", b"", b"")
    wire.replace()
    wire.receive(6)
    assert [number for number, _, _ in wire.found if number] == [1] * 5


def test_who_is_late_to_go_on_with_a_connection_takes_nothing_from_a_newer_one(
    replaceable: Replaceable,
) -> None:
    wire = replaceable
    big = bytes(range(256)) * 4000
    wire.sender.send(QueuedFrame(1, 0, b"h", b"", (big,), len(big)))
    late = wire.begin_to_replace()
    wire.replace()  # by another thread, as the connection broke as soon as it was read
    assert wire.unsent.count  # in the middle of a frame
    wire.sender.resume(late)
    wire.sender.send_small(1, 1, b"h", b"", b"p")
    wire.receive(2)
    assert [(number, payload) for number, _, payload in wire.found] == [(0, big), (1, b"p")]
    assert wire.unsent.count == 0


def test_what_is_acknowledged_is_forgotten(replaceable: Replaceable) -> None:
    wire = replaceable
    for number in range(4):
        wire.sender.send_small(1, number, b"h", b"", b"p")
    wire.sender.acknowledged(3)
    wire.sender.stop()
    spare, end = socket.socketpair()
    with spare, end, pytest.raises(CannotResumeError):
        wire.sender.replace(spare, 2)
    with pytest.raises(FrameError):
        wire.sender.acknowledged(5)


def test_a_descriptor_that_got_lost_is_passed_again(replaceable: Replaceable) -> None:
    wire = replaceable
    with to_be_closed() as descriptor:
        wire.sender.send(QueuedFrame(17, 0, b"about it", descriptor=descriptor))
        wire.replace()
        data, descriptors, _, _ = socket.recv_fds(wire.other, 1000, 4)
        assert data.endswith(b"about it")
        (passed,) = descriptors
        os.close(passed)
        wire.sender.acknowledged(1)


def test_a_descriptor_that_is_remembered_is_closed_with_the_sender(
    replaceable: Replaceable,
) -> None:
    with to_be_closed() as descriptor:
        replaceable.sender.send(QueuedFrame(17, 0, b"about it", descriptor=descriptor))
        replaceable.sender.close()
        _, descriptors, _, _ = socket.recv_fds(replaceable.other, 1000, 4)
        os.close(descriptors[0])


def test_a_sender_that_was_closed_before_it_could_resume_takes_nothing_more() -> None:
    wire = Wire(remember=100)
    wire.sender.stop()
    spare, other = socket.socketpair()
    generation = wire.sender.replace(spare, 0)
    wire.sender.close()
    wire.sender.resume(generation)
    with wire.other, other, to_be_closed() as descriptor:
        wire.sender.send(QueuedFrame(17, 0, b"about it", descriptor=descriptor))
        assert wire.sender.queued() == wire.unsent.count == 0


def test_what_is_given_to_a_sender_that_was_closed_while_broken_is_dropped() -> None:
    wire = Wire(remember=100)
    wire.sender.stop()
    wire.sender.close()
    with wire.other, to_be_closed() as descriptor:
        wire.sender.send(QueuedFrame(17, 0, b"about it", descriptor=descriptor))
        wire.sender.send_small(1, 0, b"h", b"", b"p")
        assert wire.sender.queued() == wire.unsent.count == 0


def fail_once(
    monkeypatch: pytest.MonkeyPatch, owner: object, name: str, error: type[Exception]
) -> None:
    """Has a step of sending find no memory, or no stack, for once."""
    step, errors = getattr(owner, name), [error]

    def scarce(*arguments: Any) -> Any:
        if errors:
            raise errors.pop()
        return step(*arguments)

    monkeypatch.setattr(owner, name, scarce)


def connection_is_over(wire: Wire) -> bool:
    """True if the reading half finds the end of the connection."""
    readable, _, _ = select.select([wire.sender.sock], [], [], SECONDS)
    return bool(readable) and wire.sender.sock.recv(1) == b""


@pytest.mark.interpreted
def test_a_frame_for_which_there_is_no_memory_is_refused_and_the_next_leaves(
    wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_once(monkeypatch, channel, "pack_small", MemoryError)
    with pytest.raises(MemoryError):
        wire.sender.send_small(1, 0, b"h", b"", b"p")
    wire.sender.send_small(1, 1, b"h", b"", b"p")
    wire.receive(1)
    assert [number for number, _, _ in wire.found] == [1]


@pytest.mark.interpreted
@pytest.mark.parametrize(
    ("owner", "name"), [(channel, "pack_fixed"), (Sender, "_advance"), (Sender, "_load_batch")]
)
@pytest.mark.parametrize("error", [MemoryError, RecursionError])
def test_what_cannot_be_sent_at_the_moment_is_sent_on_another_connection(
    replaceable: Replaceable,
    monkeypatch: pytest.MonkeyPatch,
    owner: object,
    name: str,
    error: type[Exception],
) -> None:
    wire = replaceable
    big = bytes(range(256)) * 200
    wire.sender.send_small(1, 0, b"h", b"", b"p")
    wire.receive(1)
    fail_once(monkeypatch, owner, name, error)
    wire.sender.send(
        QueuedFrame(1, 1, b"h", b"", (big,), len(big))
    )  # or another's, which this sends
    assert connection_is_over(wire)
    wire.sender.send_small(1, 2, b"h", b"", b"p")
    wire.replace()
    wire.receive(3)
    assert [(n, len(p)) for n, _, p in wire.found] == [(0, 1), (1, len(big)), (2, 1)]
    assert wire.unsent.count == 0


class Scarce(deque[Any]):
    """A queue for which there is no memory, for once."""

    is_full = True

    def _take(self) -> None:
        if self.is_full:
            self.is_full = False
            raise MemoryError

    def append(self, item: Any) -> None:
        self._take()
        super().append(item)

    def extend(self, items: Iterable[Any]) -> None:
        self._take()
        super().extend(items)


def test_a_frame_that_was_remembered_when_memory_ran_out_is_sent_once(
    replaceable: Replaceable,
) -> None:
    wire = replaceable
    wire.sender._unsent = Scarce()
    wire.sender.send(QueuedFrame(1, 0, b"h", b"", (b"p",), 1))
    assert connection_is_over(wire)
    wire.sender.send_small(1, 1, b"h", b"", b"p")
    wire.replace()
    wire.receive(2)
    assert [number for number, _, _ in wire.found] == [0, 1]
    assert wire.unsent.count == 0


def test_a_frame_for_which_the_queue_has_no_memory_is_not_sent(wire: Wire) -> None:
    wire.sender._queue = Scarce()
    with pytest.raises(MemoryError):
        wire.sender.send(QueuedFrame(1, 0, b"h", b"", (b"p",), 1))
    assert wire.unsent.count == 0
    wire.sender.send(QueuedFrame(1, 1, b"h", b"", (b"p",), 1))
    wire.receive(1)
    assert [number for number, _, _ in wire.found] == [1]


def test_what_cannot_be_sent_again_at_the_moment_is_on_another_connection(
    replaceable: Replaceable,
) -> None:
    wire = replaceable
    wire.sender.send_small(1, 0, b"h", b"", b"p")
    late = wire.begin_to_replace()
    wire.sender._unsent = Scarce()
    wire.sender.resume(late)
    assert connection_is_over(wire)
    wire.replace()
    wire.receive(1)
    assert wire.unsent.count == 0


def test_who_is_late_to_go_on_with_one_that_broke_sends_nothing_on_the_next(
    replaceable: Replaceable,
) -> None:
    wire = replaceable
    wire.sender.send_small(1, 0, b"h", b"", b"p")
    late = wire.begin_to_replace()
    wire.sender.stop()
    watch, next_one = wire.sender._watch_writable, list[int]()

    def replace_now(wanted: bool) -> None:
        if not wanted and not next_one:
            next_one.append(wire.begin_to_replace())
        watch(wanted)

    wire.sender._watch_writable = replace_now
    wire.sender.resume(late)
    wire.sender._watch_writable = watch
    wire.sender.resume(next_one[0] if next_one else wire.begin_to_replace())
    wire.sender.send_small(1, 1, b"h", b"", b"p")
    wire.receive(2)
    assert [number for number, _, _ in wire.found] == [0, 1]


@pytest.mark.interpreted
@pytest.mark.parametrize("name", ["_keep", "_wait_writable"])
def test_a_small_frame_that_leaves_in_part_is_sent_on_another_connection(
    replaceable: Replaceable, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    wire = replaceable
    fail_once(monkeypatch, Sender, name, RecursionError)
    count = 0
    while not wire.sender._broken:
        wire.sender.send_small(1, count, b"h", b"", b"x" * 60_000)
        count += 1
    assert connection_is_over(wire)
    wire.replace()
    wire.receive(count)
    assert [number for number, _, _ in wire.found] == list(range(count))
    assert wire.unsent.count == 0


@pytest.mark.interpreted
def test_a_held_frame_for_which_there_is_no_memory_is_sent_on_another_connection(
    replaceable: Replaceable, monkeypatch: pytest.MonkeyPatch
) -> None:
    wire = replaceable
    fail_once(monkeypatch, wire.unsent, "add", MemoryError)
    wire.sender.hold_small(1, 0, b"h", b"", b"p")
    assert connection_is_over(wire)
    wire.replace()
    wire.receive(1)
    assert wire.unsent.count == 0


@pytest.mark.interpreted
def test_without_another_connection_it_is_said_why_nothing_can_be_sent(
    wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_once(monkeypatch, Sender, "_advance", MemoryError)
    wire.sender.send(QueuedFrame(1, 1, b"h", b"", (bytes(100_000),), 100_000))
    assert connection_is_over(wire)
    assert wire.sender.fault == "what was to be sent to it could not be sent: MemoryError"
    wire.sender.flush()
    assert wire.sender.queued() == wire.unsent.count == 0


def test_a_descriptor_that_is_remembered_no_more_is_closed() -> None:
    wire = Wire(remember=2)
    with to_be_closed() as descriptor:
        wire.sender.send(QueuedFrame(17, 0, b"about it", descriptor=descriptor))
        for number in range(2):
            wire.sender.send(QueuedFrame(16, number, b"h"))
        _, descriptors, _, _ = socket.recv_fds(wire.other, 1000, 4)
        os.close(descriptors[0])
    wire.close()
