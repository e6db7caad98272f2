"""Opens the connections of a link, on a thread of its own, within a bounded time.

Tries the Unix socket of a peer on this host, then its TCP addresses. Knows
sockets and the handshake; what becomes of the connections is the caller's.
"""

from __future__ import annotations

import errno
import logging
import os
import select
import socket
import threading
import time
from dataclasses import dataclass

from rpc.transports.tensorwire.address import Address, unix_path
from rpc.transports.tensorwire.handshake import (
    NONCE_BYTES,
    TOKEN_BYTES,
    ChannelKind,
    HandshakeError,
    Hello,
    Identity,
    Initiator,
    derive_key,
)

_log = logging.getLogger("rpc.transports.tensorwire")

_UNIX_BULK_CONNECTIONS = 1
_LOOK_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class Target:
    """Whom to connect to, as whom.

    Args:
        name: the peer's, for messages.
        address: the peer's.
        use_unix: the peer seems to be on this host.
        initiator: this worker.
        acceptor: the peer.
        group_key: see :class:`Settings`.
        bulk_connections: over TCP.
        seconds: for everything.
    """

    name: str
    address: Address
    use_unix: bool
    initiator: Identity
    acceptor: Identity
    group_key: bytes
    bulk_connections: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Connections:
    """An open link's sockets, proven to lead to the peer, non-blocking."""

    main: socket.socket
    bulk: list[socket.socket]
    shared: bool


class ConnectError(Exception):
    """No connection came about; the text says what was tried."""


class Connector:
    """One attempt to open a link.

    Args:
        target: whom to connect to.
    """

    def __init__(self, target: Target) -> None:
        self._target = target
        self._open: list[socket.socket] = []
        self._cancelled = threading.Event()
        self._deadline = 0.0

    def cancel(self) -> None:
        """Makes :meth:`connect` fail soon, from another thread."""
        self._cancelled.set()

    def connect(self) -> Connections:
        """Opens all connections of the link.

        Raises:
            ConnectError: it could not be done in time.
        """
        target = self._target
        self._deadline = time.monotonic() + target.seconds
        problems: list[str] = []
        if target.use_unix:
            path = unix_path(target.address.unix_name)
            try:
                return self._open_all(socket.AF_UNIX, path, _UNIX_BULK_CONNECTIONS)
            except (OSError, HandshakeError) as error:
                problems.append(f"Unix socket: {error}")
                _log.warning(
                    "worker %s seems to be on this host, but its Unix socket does not lead to "
                    "it (%s); using TCP",
                    target.name,
                    error,
                )
        for host, port in target.address.tcp:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            try:
                return self._open_all(family, (host, port), target.bulk_connections)
            except (OSError, HandshakeError) as error:
                problems.append(f"{host} port {port}: {error}")
        raise ConnectError("; ".join(problems) or "it published no address")

    def _open_all(
        self, family: socket.AddressFamily, where: str | tuple[str, int], bulk: int
    ) -> Connections:
        token = os.urandom(TOKEN_BYTES)
        try:
            main = self._open_one(family, where, ChannelKind.MAIN, token)
            others = [self._open_one(family, where, ChannelKind.BULK, token) for _ in range(bulk)]
        except BaseException:
            for sock in self._open:
                sock.close()
            raise
        finally:
            self._open.clear()
        return Connections(main, others, shared=family == socket.AF_UNIX)

    def _open_one(
        self,
        family: socket.AddressFamily,
        where: str | tuple[str, int],
        kind: ChannelKind,
        token: bytes,
    ) -> socket.socket:
        sock = socket.socket(family, socket.SOCK_STREAM)
        self._open.append(sock)
        sock.setblocking(False)
        while (problem := sock.connect_ex(where)) not in (0, errno.EISCONN):
            if problem == errno.EAGAIN:  # a Unix listener whose backlog is full
                self._await(sock, 0)
            elif problem in (errno.EINPROGRESS, errno.EALREADY):
                self._await(sock, select.POLLOUT)
            else:
                raise OSError(problem, os.strerror(problem))
        configure(sock)
        self._shake_hands(sock, kind, token)
        return sock

    def _shake_hands(self, sock: socket.socket, kind: ChannelKind, token: bytes) -> None:
        target = self._target
        key = derive_key(target.group_key, target.address.secret)
        nonce = os.urandom(NONCE_BYTES)
        side = Initiator(key, Hello(kind, target.initiator, target.acceptor, token, nonce))
        sock.send(side.begin())
        while not side.accepted:
            self._await(sock, select.POLLIN)
            data = sock.recv(side.wanted)
            if not data:
                raise HandshakeError("the connection was closed during the handshake")
            answer = side.receive(data)
            if answer:
                sock.send(answer)

    def _await(self, sock: socket.socket, events: int) -> None:
        """Waits until a socket is ready, the attempt is cancelled or time is up."""
        poll = select.poll()
        poll.register(sock, events)
        while True:
            left = self._deadline - time.monotonic()
            if self._cancelled.is_set():
                raise OSError(errno.ECANCELED, "the transport gave up on it")
            if left <= 0:
                raise TimeoutError(f"no answer within {self._target.seconds:g} s")
            if poll.poll(1000 * min(left, _LOOK_SECONDS)) or not events:
                return


def configure(sock: socket.socket) -> None:
    """Sets what every TCP connection of ours has set."""
    if sock.family != socket.AF_UNIX:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
