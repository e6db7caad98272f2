"""One TCP or Unix connection to a peer, and the state that survives a reconnect."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from rpc.protocol.resumption import ReconnectEpoch
from rpc.transports.tensorwire.acceptor import AuthenticatedConnection
from rpc.transports.tensorwire.channel import Sender
from rpc.transports.tensorwire.connector import PASSING, Endpoint
from rpc.transports.tensorwire.handshake import Acceptor


class Reader(Protocol):
    """The reading half; nobody reads between the end of a connection and ``restart``."""

    garbled: bool
    silent: bool

    @property
    def received(self) -> int:
        """The number of frames that have arrived whole."""

    def restart(self) -> None:
        """Goes on with another connection."""


@dataclass(slots=True, eq=False)
class Connection:
    """A connection, as one channel of a link.

    Args:
        token: the link's.
        number: which channel of it; 0 is the main one.
        endpoint: the address at which this worker opened the link; None if the peer opened it.
        sender: the writing half.
        reader: the reading half.
        listen: has the socket read from now on.
        ignore: has it not read any more; to be called before it is closed.
        epoch: numbers the connections that replace each other.
        successor: the peer's next connection, which waits for the present one to end.
        request_at: when the peer is to be asked for another connection, in monotonic seconds.
        problem: what came of the last attempt to replace the connection.
    """

    token: bytes
    number: int
    endpoint: Endpoint | None
    sender: Sender
    reader: Reader
    listen: Callable[[], None]
    ignore: Callable[[socket.socket], None]
    epoch: ReconnectEpoch = field(default_factory=ReconnectEpoch)
    successor: AuthenticatedConnection | None = None
    request_at: float = 0.0
    problem: str = ""

    def replace(self, sock: socket.socket, received: int, attempt: int) -> None:
        """Replaces the connection that broke.

        Args:
            sock: the connection, which the connection closes.
            received: how many frames have arrived at the peer.
            attempt: the connection's number.

        Raises:
            CannotResumeError: the peer lacks what is not remembered; ``sock`` stays open.
            OSError: it cannot be read at the moment, for want of memory: the connection is broken
                still.
            MemoryError: likewise.
        """
        greeting = b"" if self.endpoint is not None else Acceptor.accept(self.reader.received)
        generation = self.sender.replace(sock, received, greeting)
        self.reader.restart()
        since, reason = self.epoch.since, self.epoch.reason
        self.epoch.joined(attempt)
        self.request_at = 0.0
        try:
            self.listen()
        except (*PASSING, ValueError):
            if self.sender.sock.fileno() >= 0:  # it was not closed meanwhile
                self.ignore(self.sender.sock)
                self.epoch.since, self.epoch.reason = since, reason
                raise
        self.sender.resume(generation)

    def close(self) -> None:
        """Closes the connection, and the one that waits to replace it."""
        self.ignore(self.sender.sock)
        self.sender.close()
        successor, self.successor = self.successor, None
        if successor is not None:
            successor.reject("this worker gave up the link")
