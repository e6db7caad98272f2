"""Sending on one socket: in one piece if possible, in order, never blocking."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator

import pytest

from rpc.transports.tensorwire.channel import Outgoing, Sender, Unsent
from rpc.transports.tensorwire.framing import FrameDecoder


class Wire:
    """A sender, and the other end of its socket."""

    def __init__(self) -> None:
        mine, self.other = socket.socketpair()
        mine.setblocking(False)
        self.other.settimeout(10)
        self.unsent = Unsent()
        self.watching: list[bool] = []
        self.sender = Sender(mine, self.unsent, self.watching.append)
        self.decoder = FrameDecoder(1 << 30)
        self.found: list[tuple[int, bytes, bytes]] = []

    def receive(self, count: int) -> None:
        """Reads until ``count`` frames have arrived, letting the sender go on meanwhile."""
        while len(self.found) < count:
            room = self.decoder.room()
            if room is not None:
                frames = self.decoder.filled(self.other.recv_into(room))
            else:
                frames = self.decoder.feed(self.other.recv(1 << 16))
            self.found += [(f.correlation, f.header, bytes(f.payload)) for f, _ in frames]
            if self.watching and self.watching[-1]:
                self.sender.writable()

    def close(self) -> None:
        self.sender.close()
        self.other.close()


@pytest.fixture
def wire() -> Iterator[Wire]:
    made = Wire()
    yield made
    made.close()


def test_a_small_frame_leaves_at_once(wire: Wire) -> None:
    wire.sender.send_small(1, 5, b"header", b"", b"payload")
    wire.receive(1)
    assert wire.found == [(5, b"header", b"payload")]
    assert wire.unsent.count == 0
    assert wire.watching == []


def test_what_does_not_fit_waits_for_the_socket_and_stays_in_order(wire: Wire) -> None:
    big = bytes(range(256)) * 4000
    for number in range(30):
        if number % 3:
            wire.sender.send_small(1, number, b"h", b"", b"p")
        else:
            wire.sender.send(Outgoing(1, number, b"h", b"", (big, b"tail"), len(big) + 4))
    assert wire.watching[-1] is True
    assert wire.unsent.count > 1 << 20
    wire.receive(30)
    assert [(n, len(p)) for n, _, p in wire.found] == [
        (n, 1 if n % 3 else len(big) + 4) for n in range(30)
    ]
    assert wire.unsent.count == 0
    assert wire.watching[-1] is False


def test_queued_frames_leave_with_a_flush(wire: Wire) -> None:
    for number in range(200):
        wire.sender.hold_small(2, number, b"h", b"", b"")
    wire.other.setblocking(False)
    with pytest.raises(BlockingIOError):
        wire.other.recv(1)
    wire.other.settimeout(10)
    wire.sender.flush()
    wire.receive(200)
    assert [number for number, _, _ in wire.found] == list(range(200))


def test_threads_share_a_socket_without_mixing_frames(wire: Wire) -> None:
    def send(thread: int) -> None:
        for step in range(300):
            payload = bytes([thread]) * (step * 7)
            wire.sender.send_small(1, thread * 1000 + step, b"h", b"", payload)

    threads = [threading.Thread(target=send, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    wire.receive(1200)
    for thread in threads:
        thread.join()
    assert sorted(wire.found) == sorted(
        (t * 1000 + s, b"h", bytes([t]) * (s * 7)) for t in range(4) for s in range(300)
    )


def test_a_descriptor_is_passed_once_and_closed_here(wire: Wire) -> None:
    reading, writing = os.pipe()
    before = os.fstat(writing)
    wire.sender.send(Outgoing(17, 0, b"about it", descriptor=writing))
    data, descriptors, _, _ = socket.recv_fds(wire.other, 1000, 4)
    assert data.endswith(b"about it")
    (passed,) = descriptors
    assert os.fstat(passed).st_ino == before.st_ino
    os.close(passed)
    assert os.read(reading, 1) == b"", "the last writing end is gone"
    os.close(reading)


def test_a_descriptor_that_never_leaves_is_closed(wire: Wire) -> None:
    while not wire.watching:
        wire.sender.send_small(1, 0, b"h", b"", b"x" * 60_000)
    reading, writing = os.pipe()
    wire.sender.send(Outgoing(17, 0, b"", descriptor=writing))
    wire.sender.close()
    assert os.read(reading, 1) == b""
    os.close(reading)


def test_a_broken_socket_drops_frames_and_counts_nothing(wire: Wire) -> None:
    while not wire.watching:
        wire.sender.send_small(1, 0, b"h", b"", b"x" * 60_000)
    wire.other.close()
    wire.sender.writable()
    wire.sender.send_small(1, 0, b"h", b"", b"")
    wire.sender.send(Outgoing(1, 0, b"h", b"", (b"x" * 100_000,), 100_000))
    assert wire.unsent.count == 0


def test_waiting_for_the_socket_ends_when_the_bytes_have_left(wire: Wire) -> None:
    while not wire.watching:
        wire.sender.send_small(1, 0, b"h", b"", b"x" * 60_000)
    assert not wire.unsent.wait(0, 0.0)
    done = threading.Event()

    def wait() -> None:
        wire.unsent.wait(0, 10)
        done.set()

    waiter = threading.Thread(target=wait)
    waiter.start()
    wire.other.close()
    wire.sender.writable()
    waiter.join(10)
    assert done.is_set()
