"""A connection replaces another, whatever happens meanwhile, at every step."""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable, Iterator

import pytest

from rpc.transports.tensorwire.channel import QueuedFrame, Sender, Unsent
from rpc.transports.tensorwire.connection import Connection
from rpc.transports.tensorwire.connector import Endpoint
from rpc.transports.tensorwire.main_reader import FrameDecoder

BIG = bytes(range(256)) * 4000


class Reading:
    """The reading half, which reads nothing."""

    garbled = False
    silent = False
    received = 0

    def restart(self) -> None:
        pass


class Ends:
    """A connection that this worker opened, and the other end of the connection it has."""

    def __init__(self) -> None:
        mine, self.other = socket.socketpair()
        mine.setblocking(False)
        self.unsent = Unsent()
        self.sender = Sender(mine, self.unsent, lambda _: None, 100)
        self.decoder = FrameDecoder(1 << 30)
        self.listen: Callable[[], None] = lambda: None
        self.ignored = 0
        self.connection = Connection(
            b"token",
            0,
            Endpoint(socket.AF_UNIX, "nowhere"),
            self.sender,
            Reading(),
            lambda: self.listen(),
            self.ignore,
        )

    def ignore(self, _: socket.socket) -> None:
        self.ignored += 1

    def replace(self, attempt: int) -> None:
        """The connection breaks, and another takes its place."""
        self.sender.stop()
        self.other.close()
        new, self.other = socket.socketpair()
        new.setblocking(False)
        self.other.settimeout(10)
        self.decoder.restart()
        self.connection.replace(new, self.decoder.received, attempt)

    def receive(self) -> bytes:
        """The payload of the next frame."""
        while True:
            room = self.decoder.room()
            if room is not None:
                frames = self.decoder.filled(self.other.recv_into(room))
            else:
                frames = self.decoder.feed(self.other.recv(1 << 12))
            self.sender.writable()
            if frames:
                return bytes(frames[0][0].payload)

    def close(self) -> None:
        self.connection.close()
        self.other.close()


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = Ends()
    yield made
    made.close()


def test_a_connection_that_breaks_as_soon_as_it_is_read_takes_nothing_from_the_next(
    ends: Ends,
) -> None:
    ends.sender.send(QueuedFrame(1, 0, b"h", b"", (BIG,), len(BIG)))

    def next_one() -> None:
        ends.listen = lambda: None
        ends.replace(2)

    ends.listen = next_one
    ends.replace(1)
    assert ends.receive() == BIG
    ends.sender.send_small(1, 1, b"h", b"", b"p")
    assert ends.receive() == b"p"
    assert ends.unsent.count == 0


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "no watch is left"), MemoryError()])
def test_a_connection_that_cannot_be_read_leaves_the_strand_as_broken_as_it_was(
    ends: Ends, error: Exception
) -> None:
    def full() -> None:
        raise error

    ends.connection.epoch.broke(5.0, "the cable was pulled")
    ends.listen = full
    with pytest.raises(type(error)) as raised:
        ends.replace(1)
    assert raised.value is error
    assert (ends.connection.epoch.since, ends.connection.epoch.reason) == (
        5.0,
        "the cable was pulled",
    )
    assert ends.ignored == 1
    ends.listen = lambda: None
    ends.replace(2)
    assert ends.connection.epoch.since is None
    ends.sender.send_small(1, 0, b"h", b"", b"p")
    assert ends.receive() == b"p"


def test_a_strand_that_is_closed_before_it_is_read_is_no_failure(ends: Ends) -> None:
    def closed() -> None:
        ends.connection.close()
        raise ValueError("file descriptor cannot be a negative integer (-1)")

    ends.listen = closed
    ends.replace(1)
    assert ends.sender.queued() == ends.unsent.count == 0
