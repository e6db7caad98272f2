"""Bounds how many connections the page keeps open, whoever opens them.

There is no time within which a connection must say something: many may be open and silent, or
take their answer slowly, and only when there are too many one of them goes. Those that have shown
the token go last, so that nobody without it can keep others out.
"""

from __future__ import annotations

import contextlib
import socket
from typing import Any, Final

MOST: Final = 64
"""Connections that are open at once; a browser opens six at most."""

Address = tuple[Any, ...]


class Connections:
    """The open connections, each by its peer's address.

    Args:
        most: how many may be open at once.
    """

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._strangers: dict[Address, socket.socket] = {}
        self._known: dict[Address, socket.socket] = {}

    def opened(self, address: Address, connection: socket.socket) -> None:
        """A connection was accepted; if there are too many, the oldest stranger's is ended.

        Without strangers it is that whose last answer is the longest ago.
        """
        for kept in (self._strangers, self._known):
            for peer in [peer for peer, each in kept.items() if each.fileno() < 0]:
                del kept[peer]
        if len(self._strangers) + len(self._known) >= self._most:
            kept = self._strangers or self._known
            oldest = kept.pop(next(iter(kept)))
            with contextlib.suppress(OSError):  # it has gone meanwhile
                oldest.shutdown(socket.SHUT_RDWR)
        self._strangers[address[:2]] = connection

    def showed_token(self, address: Address) -> None:
        """A request over this connection was let in."""
        for kept in (self._strangers, self._known):
            connection = kept.pop(address[:2], None)
            if connection is not None:
                self._known[address[:2]] = connection


class Listener(socket.socket):
    """A listening socket that has its connections counted.

    Args:
        family: of addresses.
        connections: those that are open.
    """

    def __init__(self, family: socket.AddressFamily, connections: Connections) -> None:
        super().__init__(family, socket.SOCK_STREAM)
        self._connections = connections

    def accept(self) -> tuple[socket.socket, Address]:
        """The next connection, and the address of its peer."""
        connection, address = super().accept()
        self._connections.opened(address, connection)
        return connection, address
