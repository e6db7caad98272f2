"""Makes the connections of links to one peer: each with its writing and its reading half."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from rpc.protocol.resumption import MOST_MESSAGES
from rpc.transports.base import Frame
from rpc.transports.tensorwire.bulk import BulkChannel, BulkEvents
from rpc.transports.tensorwire.channel import Sender
from rpc.transports.tensorwire.connection import Connection
from rpc.transports.tensorwire.connector import Endpoint
from rpc.transports.tensorwire.link import Link
from rpc.transports.tensorwire.main_reader import MainReader
from rpc.transports.tensorwire.peer_parts import PeerParts
from rpc.transports.tensorwire.replies import ChannelEvents, ReplySide
from rpc.transports.tensorwire.requests import RequestSide

_MAX_FRAME_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class ConnectionMaker:
    """Makes connections.

    Args:
        shared: what all peers share.
        complete: takes a frame that became complete on a bulk connection.
        ended: told of a connection that was read to its end, by its writing half, and why.
    """

    shared: PeerParts
    complete: Callable[[Frame], None]
    ended: Callable[[Sender, str], None]

    def opened(
        self,
        link: Link,
        sock: socket.socket,
        token: bytes,
        endpoint: Endpoint,
        deliver: Callable[[Frame], None],
    ) -> Connection:
        """Makes the main connection of a link that this worker opened: replies come on it."""
        return self._main(link, sock, token, endpoint, deliver, self.shared.replies)

    def accepted(
        self, link: Link, sock: socket.socket, token: bytes, deliver: Callable[[Frame], None]
    ) -> Connection:
        """Makes the main connection of a link that the peer opened: requests come on it."""
        return self._main(link, sock, token, None, deliver, self.shared.requests)

    def _main(
        self,
        link: Link,
        sock: socket.socket,
        token: bytes,
        endpoint: Endpoint | None,
        deliver: Callable[[Frame], None],
        side: ReplySide | RequestSide,
    ) -> Connection:
        main = link.main = self._sender(link, sock, side.watch_writable)
        buffers, late = self.shared.resources.buffers, self.shared.receipts.add
        reader = MainReader(sock, link, _MAX_FRAME_BYTES, buffers, main, late)
        link.announce = reader.acknowledge
        events = ChannelEvents(deliver, main.writable, partial(self.ended, main))
        listen = partial(side.add_main, sock, reader, events)
        return Connection(token, 0, endpoint, main, reader, listen, side.remove)

    def bulk(
        self, link: Link, sock: socket.socket, token: bytes, number: int, endpoint: Endpoint | None
    ) -> Connection:
        """Makes a bulk connection; ``endpoint`` is None if the peer opened the link."""
        mover = self.shared.bulk
        sender = self._sender(link, sock, mover.watch_writable)
        events = BulkEvents(self.complete, partial(self.ended, sender))
        channel = BulkChannel(sender, link, events, self.shared.receipts.add)
        listen = partial(mover.add, sock, channel)
        return Connection(token, number, endpoint, sender, channel, listen, mover.remove)

    def _sender(
        self, link: Link, sock: socket.socket, watch: Callable[[socket.socket, bool], None]
    ) -> Sender:
        remember = MOST_MESSAGES if self.shared.resume_seconds else 0
        return Sender(sock, link.unsent, partial(watch, sock), remember)
