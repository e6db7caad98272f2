"""One connection of a link, with all that outlives it when another takes its place."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from rpc.protocol.resumption import Seam
from rpc.transports.tensorwire.acceptor import Proven
from rpc.transports.tensorwire.channel import Sender
from rpc.transports.tensorwire.connector import Road
from rpc.transports.tensorwire.handshake import Acceptor

PASSING = (OSError, MemoryError)
"""What reading a connection may fail for, epoll's watches among it, that may soon be there."""


class Reader(Protocol):
    """The reading half; nobody reads between the end of a connection and ``restart``."""

    garbled: bool
    silent: bool

    @property
    def received(self) -> int:
        """How many frames have arrived whole."""

    def restart(self) -> None:
        """Goes on with another connection."""


@dataclass(slots=True, eq=False)
class Strand:
    """A channel of a link.

    Args:
        token: the link's.
        number: which channel of it; 0 is the main one.
        road: how this worker opened the link; None if the peer did.
        sender: the writing half.
        reader: the reading half.
        listen: has the socket read from now on.
        ignore: has it not read any more; to be called before it is closed.
        seam: which connection it has.
        guest: a connection of the peer's that waits for the present one to end.
        knock_at: when the peer is to be asked for another connection, in monotonic seconds.
        problem: what came of the last attempt to replace the connection.
    """

    token: bytes
    number: int
    road: Road | None
    sender: Sender
    reader: Reader
    listen: Callable[[], None]
    ignore: Callable[[socket.socket], None]
    seam: Seam = field(default_factory=Seam)
    guest: Proven | None = None
    knock_at: float = 0.0
    problem: str = ""

    def replace(self, sock: socket.socket, received: int, attempt: int) -> None:
        """Puts a connection in the place of the one that broke.

        Args:
            sock: the connection, which the strand closes.
            received: how many frames have arrived at the peer.
            attempt: the connection's number.

        Raises:
            CannotResumeError: the peer lacks what is not remembered; ``sock`` stays open.
            OSError: it cannot be read at the moment, for want of memory: the strand is broken
                still.
            MemoryError: likewise.
        """
        greeting = b"" if self.road is not None else Acceptor.accept(self.reader.received)
        generation = self.sender.replace(sock, received, greeting)
        self.reader.restart()
        since, reason = self.seam.since, self.seam.reason
        self.seam.joined(attempt)
        self.knock_at = 0.0
        try:
            self.listen()
        except (OSError, ValueError, MemoryError):
            if self.sender.sock.fileno() >= 0:  # it was not closed meanwhile
                self.ignore(self.sender.sock)
                self.seam.since, self.seam.reason = since, reason
                raise
        self.sender.resume(generation)

    def close(self) -> None:
        """Closes the connection, and what waits for its place."""
        self.ignore(self.sender.sock)
        self.sender.close()
        guest, self.guest = self.guest, None
        if guest is not None:
            guest.reject("this worker gave up the link")
