"""Accepts connections and authenticates them, never waiting for anyone.

A connection that is not authenticated yet gets a bounded time and a few hundred bytes, and
there may be only so many of them (``unauthenticated`` chooses which is closed). Those that
named the worker that they look for, which an outsider does not know, are counted apart.
The owner decides about an authenticated connection, perhaps later.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Protocol

from rpc.transports.tensorwire.connector import OWN_LIMITS, configure
from rpc.transports.tensorwire.handshake import (
    NONCE_BYTES,
    Acceptor,
    HandshakeError,
    Hello,
    Identity,
)
from rpc.transports.tensorwire.tls import Certificates, is_for, wrong_name
from rpc.transports.tensorwire.tls_socket import TlsSocket, certified_names
from rpc.transports.tensorwire.unauthenticated import UnauthenticatedConnections

_MOST_SILENT = 128
_MOST_IDENTIFIED = 256
_PATIENCE_SECONDS = 1.0
"""A connection that named this worker, but proved nothing for so long, may be evicted."""
_SILENCE_SECONDS = 5.0
"""Seconds that a connection may take to name the worker that it looks for."""
_CREDENTIALS = struct.Struct("3i")


class SocketWatch(Protocol):
    """The threads that read sockets; ``requests.RequestSide`` has them.

    Attributes:
        sweeping: the acceptor is to be swept now and then, which it ends by itself.
    """

    sweeping: bool

    def add(self, sock: socket.socket, handler: Callable[[int], None]) -> None:
        """Calls ``handler`` with epoll's events whenever ``sock`` has something to read."""

    def remove(self, sock: socket.socket) -> None:
        """Forgets a socket; to be called before it is closed."""


@dataclass(frozen=True, slots=True)
class AuthenticatedConnection:
    """A connection that showed who it is; the holder owns the socket."""

    sock: socket.socket
    hello: Hello

    def problem(self, worker: str) -> str:
        """Says why this cannot be that worker's, as far as certificates go; empty if it can."""
        names = certified_names(self.sock)
        return "" if names is None or is_for(names, worker) else wrong_name(names, worker)

    def accept(self) -> None:
        """Lets the other end begin."""
        with contextlib.suppress(OSError):
            self.sock.send(Acceptor.accept())

    def dismiss(self) -> None:
        """Answers and closes: the other end only wanted to know that it was heard."""
        self.accept()
        self.sock.close()

    def hang_up(self) -> None:
        """Ends the connection as if it broke: the other end may try again."""
        self.sock.close()

    def reject(self, reason: str) -> None:
        """Sends the other end away."""
        _send_away(self.sock, reason)


@dataclass(slots=True, eq=False)
class _Unauthenticated:
    queues: _Queues
    sock: socket.socket
    origin: Hashable
    side: Acceptor
    arrived: float
    deadline: float
    silent: bool = True


@dataclass(frozen=True, slots=True)
class _Queues:
    """The unauthenticated connections of one listener."""

    silent: UnauthenticatedConnections[_Unauthenticated]
    identified: UnauthenticatedConnections[_Unauthenticated]


def origin_of(sock: socket.socket, address: tuple[str, int]) -> Hashable:
    """Returns where a connection comes from: a host, or a process of this one."""
    if sock.family != socket.AF_UNIX:
        return address[0]
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(credentials)[0])


def _send_away(sock: socket.socket, reason: str) -> None:
    with contextlib.suppress(OSError):
        sock.send(Acceptor.reject(reason))
    sock.close()


class ConnectionAcceptor:
    """The listening sockets of one worker.

    Args:
        listeners: non-blocking, listening.
        key: of this worker's handshakes.
        identity: this worker.
        seconds: how long a handshake may take.
        authenticated: takes connections that have shown who they are.
        most_silent: how many connections of each listener may not have named this worker yet;
            of each, so that those from the network keep nobody on this host out.
        most_identified: how many may have named it, and not have proven anything yet.
        origin: returns where a connection comes from; see :func:`origin_of`.
        clock: tells the time in seconds.
        certificates: for TCP connections; None for those without TLS.
    """

    def __init__(
        self,
        listeners: list[socket.socket],
        key: bytes,
        identity: Identity,
        seconds: float,
        authenticated: Callable[[AuthenticatedConnection], None],
        *,
        most_silent: int = _MOST_SILENT,
        most_identified: int = _MOST_IDENTIFIED,
        origin: Callable[[socket.socket, tuple[str, int]], Hashable] = origin_of,
        clock: Callable[[], float] = time.monotonic,
        certificates: Certificates | None = None,
    ) -> None:
        self._listeners = listeners
        self._key = key
        self._identity = identity
        self._seconds = seconds
        self._authenticated = authenticated
        self._certificates = certificates
        self._connections: dict[int, _Unauthenticated] = {}
        self._origin_of = origin
        self._clock = clock
        self._queues = {
            listener: _Queues(
                UnauthenticatedConnections(most_silent, 0.0),
                UnauthenticatedConnections(most_identified, _PATIENCE_SECONDS),
            )
            for listener in listeners
        }
        self._kept: list[tuple[AuthenticatedConnection, float]] = []
        self._paused: list[socket.socket] = []
        self._lock = threading.Lock()
        self._closed = False
        self._requests: SocketWatch | None = None

    def open(self, requests: SocketWatch) -> None:
        """Begins to accept, on the threads of ``requests``."""
        self._requests = requests
        for listener in self._listeners:
            self._listen(listener)

    def _listen(self, listener: socket.socket) -> None:
        with self._lock:  # whoever closes it sets ``_closed`` first
            if self._requests is not None and not self._closed:
                self._requests.add(listener, lambda _: self._accept(listener))

    def _accept(self, listener: socket.socket) -> None:
        try:
            sock, address = listener.accept()
        except OSError as error:
            if error.errno in OWN_LIMITS:
                self._pause(listener)
            return
        sock.setblocking(False)
        try:
            configure(sock)
            origin = self._origin_of(sock, address)
            if self._certificates is not None and sock.family != socket.AF_UNIX:
                sock = TlsSocket.over(sock, self._certificates.accepting())
        except OSError:  # it is gone already
            sock.close()
            return
        side = Acceptor(self._key, self._identity, os.urandom(NONCE_BYTES))
        now, queues = self._clock(), self._queues[listener]
        connection = _Unauthenticated(queues, sock, origin, side, now, now + self._seconds)
        evicted: _Unauthenticated | None = None
        with self._lock:
            wanted = not self._closed and self._requests is not None
            if wanted and self._requests is not None:
                evicted = queues.silent.add(connection, origin, now)
                self._connections[sock.fileno()] = connection
                # With the lock held: whoever dismisses it, and closes it, takes it out first.
                self._requests.add(sock, lambda _: self._receive(connection))
                self._requests.sweeping = True
        if not wanted:
            sock.close()
            return
        if evicted is not None:
            self._dismiss(evicted, None)
        self._receive(connection)  # what it said is there, mostly, and who spoke is not pushed out

    def _pause(self, listener: socket.socket) -> None:
        """Stops accepting until the next sweep: there are no descriptors left, or no memory."""
        if self._requests is not None:
            self._requests.remove(listener)
            self._paused.append(listener)
            self._requests.sweeping = True

    def _receive(self, connection: _Unauthenticated) -> None:
        try:
            while connection.side.authenticated is None:
                data = connection.sock.recv(connection.side.wanted)
                if not data:
                    self._dismiss(connection, None)
                    return
                answer = connection.side.receive(data)
                if answer:
                    connection.sock.send(answer)
                    self._identified(connection)
        except BlockingIOError:
            return
        except HandshakeError as error:
            self._dismiss(connection, str(error))
            return
        except (OSError, MemoryError):
            self._dismiss(connection, None)
            return
        if self._forget(connection):
            self._authenticated(
                AuthenticatedConnection(connection.sock, connection.side.authenticated)
            )

    def _identified(self, connection: _Unauthenticated) -> None:
        """Notes that a connection named this worker: it is counted apart from now on."""
        evicted: _Unauthenticated | None = None
        with self._lock:
            connection.silent = False
            connection.queues.silent.discard(connection)
            if self._connections.get(connection.sock.fileno()) is connection:
                evicted = connection.queues.identified.add(
                    connection, connection.origin, self._clock()
                )
        if evicted is not None:
            self._dismiss(evicted, None)

    def _forget(self, connection: _Unauthenticated) -> bool:
        """Stops reading a connection; False if that has been done before."""
        with self._lock:
            known = self._connections.pop(connection.sock.fileno(), None)
            connection.queues.silent.discard(connection)
            connection.queues.identified.discard(connection)
        if known is None or self._requests is None:
            return False
        self._requests.remove(connection.sock)
        return True

    def _dismiss(self, connection: _Unauthenticated, reason: str | None) -> None:
        if not self._forget(connection):
            return
        if reason is None:
            connection.sock.close()
        else:
            _send_away(connection.sock, reason)

    def keep(self, authenticated: AuthenticatedConnection) -> None:
        """Keeps a connection until its worker is known, for as long as a handshake may take."""
        with self._lock:
            closed = self._closed
            if not closed:
                self._kept.append((authenticated, self._clock() + self._seconds))
        if closed:
            authenticated.reject("this worker is shutting down")
        elif self._requests is not None:
            self._requests.sweeping = True

    def kept(self, worker_id: int) -> list[AuthenticatedConnection]:
        """Removes and returns the connections that wait for a worker."""
        with self._lock:
            theirs = [p for p, _ in self._kept if p.hello.initiator.worker_id == worker_id]
            self._kept = [entry for entry in self._kept if entry[0] not in theirs]
        return theirs

    def sweep(self) -> None:
        """Closes connections that took too long, and accepts again after a pause."""
        now = self._clock()
        with self._lock:
            connections = list(self._connections.values())
            late = [connection for connection in connections if connection.deadline < now]
            silent = [g for g in connections if g.silent and g.arrived + _SILENCE_SECONDS < now]
            forgotten = [authenticated for authenticated, deadline in self._kept if deadline < now]
            self._kept = [entry for entry in self._kept if entry[0] not in forgotten]
        for connection in late:
            self._dismiss(connection, "the handshake took too long")
        for connection in silent:  # without a word: one that was stopped until now tries again
            self._dismiss(connection, None)
        for authenticated in forgotten:
            authenticated.reject("this worker has not heard of the initiator")
        if self._requests is not None:
            paused, self._paused = self._paused, []
            for listener in paused:
                try:
                    self._listen(listener)
                except OSError:  # epoll, too, takes memory
                    self._paused.append(listener)
            with self._lock:
                self._requests.sweeping = bool(self._connections or self._kept or self._paused)

    def close(self) -> None:
        """Stops listening and closes all connections."""
        with self._lock:
            self._closed = True
            connections = list(self._connections.values())
            kept, self._kept = self._kept, []
        for listener in self._listeners:
            if self._requests is not None:
                self._requests.remove(listener)
            listener.close()
        for connection in connections:
            self._dismiss(connection, None)
        for authenticated, _ in kept:
            authenticated.reject("this worker is shutting down")
