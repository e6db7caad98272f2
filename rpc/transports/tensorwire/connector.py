"""Opens connections to a peer, on the caller's thread, within a bounded time.

Tries the Unix socket of a peer on this host, then its TCP addresses. Knows
sockets and the handshake; what becomes of the connections is the caller's.

Tells a peer that is gone from one that cannot be reached at the moment: where it
listened nobody does any more, somebody else does, or it says that it does not
want us. Everything else may pass.
"""

from __future__ import annotations

import errno
import itertools
import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from rpc.errors import ANOTHER_ANSWERS, NOBODY_LISTENS
from rpc.runtime.text import says
from rpc.transports.tensorwire.address import TensorWireAddress, unix_path
from rpc.transports.tensorwire.handshake import (
    NONCE_BYTES,
    TOKEN_BYTES,
    ChannelKind,
    HandshakeError,
    Hello,
    Identity,
    Initiator,
    RefusedError,
    derive_key,
)
from rpc.transports.tensorwire.tls import Certificates, is_for, wrong_name
from rpc.transports.tensorwire.tls_socket import TlsSocket

T = TypeVar("T")

_log = logging.getLogger("rpc.transports.tensorwire")

_UNIX_BULK_CONNECTIONS = 1
_LOOK_SECONDS = 0.1
_PAUSE_SECONDS = 0.001
_LIMIT_PAUSE_SECONDS = 0.05
_BACKLOG_PAUSE_SECONDS = 0.01
_links = itertools.count(1)
"""Numbers the links that this process opens: an acceptor may hear of a later one first."""
_ONE_SIDED = "{} uses TLS and {} does not; give all workers tls=TlsOptions(...), or none"
PASSING = (OSError, MemoryError)
"""Errors that may be temporary, such as running out of epoll watches."""
OWN_LIMITS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
"""Errors for want of descriptors or memory, which may be there again in a moment."""


@dataclass(frozen=True, slots=True)
class Target:
    """The peer to connect to, and this worker's identity.

    Args:
        name: the peer's, for messages.
        address: the peer's.
        use_unix: the peer seems to be on this host.
        initiator: this worker.
        acceptor: the peer.
        group_key: see :class:`Settings`.
        bulk_connections: over TCP.
        seconds: for everything.
        resume_seconds: to open again what breaks.
        certificates: for TCP connections; None for those without TLS.
    """

    name: str
    address: TensorWireAddress
    use_unix: bool
    initiator: Identity
    acceptor: Identity
    group_key: bytes
    bulk_connections: int
    seconds: float
    resume_seconds: float
    certificates: Certificates | None = None


Where = str | tuple[str, int]
"""The address that a socket is to be connected to."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One address of the peer."""

    family: socket.AddressFamily
    where: Where


@dataclass(frozen=True, slots=True)
class LinkSockets:
    """An open link's sockets, proven to lead to the peer, non-blocking."""

    main: socket.socket
    bulk: list[socket.socket]
    endpoint: Endpoint
    token: bytes

    def close(self) -> None:
        """Closes them all; again, if need be."""
        for sock in (self.main, *self.bulk):
            sock.close()


class ConnectError(Exception):
    """No connection came about; the text says what was tried."""


class GoneError(Exception):
    """The peer's life is over, or over for us; the text says how we know."""


class Connector:
    """Connects to one peer, for one thread at a time.

    Args:
        target: whom to connect to.

    Attributes:
        target: whom it connects to.
        token: of the link that was opened last, or is being opened.
    """

    def __init__(self, target: Target) -> None:
        self.target = target
        self._open: list[socket.socket] = []
        self._cancelled = threading.Event()
        self._seconds = 0.0
        self._deadline = 0.0
        self._told = False
        self.token = b""

    def cancel(self) -> None:
        """Makes :meth:`connect` fail soon, from another thread."""
        self._cancelled.set()

    def _rest(self, error: Exception) -> bool:
        """Waits while this worker lacks something for a connection; True if it is cancelled.

        Args:
            error: what it lacks, which is logged once.
        """
        if self._cancelled.wait(_LIMIT_PAUSE_SECONDS):
            return True
        if not self._told:
            self._told = True
            _log.warning("no connection to worker %s yet: %s", self.target.name, says(error))
        return False

    def connect_for(self, make: Callable[[LinkSockets], T]) -> T:
        """Opens all connections of the link for ``make``, which takes them; returns what it made.

        What this worker lacks to do so says nothing of the peer: it tries again, for a while.

        Raises:
            ConnectError: they could not be opened, or not be taken, in time.
        """
        end = time.monotonic() + self.target.seconds
        while True:
            try:
                return self._connect_once(make)
            except PASSING as error:
                if time.monotonic() > end or self._rest(error):
                    raise ConnectError(says(error)) from error

    def _connect_once(self, make: Callable[[LinkSockets], T]) -> T:
        sockets = self.connect()
        try:
            return make(sockets)
        except BaseException:
            sockets.close()
            raise

    def connect(self) -> LinkSockets:
        """Opens all connections of the link.

        Raises:
            ConnectError: it could not be done in time.
        """
        target = self.target
        left = target.seconds
        problems: list[str] = []
        if target.use_unix:  # has all the time: no packet is swallowed on the way, only a peer slow
            began = self._allow(left)
            try:
                return self._open_link(self._endpoints(local=True)[0], _UNIX_BULK_CONNECTIONS)
            except (OSError, HandshakeError) as error:
                problems.append(f"Unix socket: {error}")
            left -= min(left, time.monotonic() - began)
        endpoints = self._endpoints(local=False)
        if target.address.tls != (target.certificates is not None):
            problems.append(_ONE_SIDED.format(*_names_of_sides(target)))
            endpoints = []
        for others, endpoint in zip(reversed(range(len(endpoints))), endpoints, strict=True):
            share = left / (others + 1)
            began = self._allow(share)
            try:
                sockets = self._open_link(endpoint, target.bulk_connections)
            except (OSError, HandshakeError) as error:
                problems.append(f"{endpoint.where[0]} port {endpoint.where[1]}: {error}")
                left -= min(share, time.monotonic() - began)
                continue
            if target.use_unix:
                _log.warning(
                    "worker %s is reached over TCP, although it seems to be on this host (%s)",
                    target.name,
                    "; ".join(problems),
                )
            return sockets
        raise ConnectError("; ".join(problems) or "it published no address")

    def _allow(self, seconds: float) -> float:
        """Allows so many seconds from now on; returns the time."""
        now = time.monotonic()
        self._seconds, self._deadline = seconds, now + seconds
        return now

    def replace(
        self,
        endpoint: Endpoint,
        token: bytes,
        channel: int,
        attempt: int,
        received: int,
        seconds: float,
    ) -> tuple[socket.socket, int]:
        """Opens a connection in place of one that broke.

        Args:
            endpoint: how the link was opened.
            token: the link's.
            channel: which one of it.
            attempt: see :class:`rpc.protocol.resumption.ReconnectEpoch`.
            received: how many frames have arrived here.
            seconds: to try.

        Returns:
            The connection, and how many frames have arrived at the peer.

        Raises:
            GoneError: the peer's life is over, or over for us.
            OSError: it did not work this time.
        """
        hello = self._hello(ChannelKind.RESUME, token, channel, attempt, received)
        return self._try(endpoint, hello, seconds)

    def request_reconnect(
        self, *, local: bool, token: bytes, channel: int, attempt: int, seconds: float
    ) -> None:
        """Asks the peer for a sign of life, and for a connection in place of one that broke.

        Args:
            local: the link leads over a Unix socket.
            token: the link's.
            channel: which one of it.
            attempt: which connection of it broke.
            seconds: to try each address.

        Raises:
            GoneError: the peer's life is over, or over for us; no address says otherwise.
            OSError: it did not work this time.
        """
        gone: GoneError | None = None
        failed: OSError | None = None
        for endpoint in self._endpoints(local=local):
            try:
                hello = self._hello(ChannelKind.RECONNECT_REQUEST, token, channel, attempt)
                sock, _ = self._try(endpoint, hello, seconds)
            except GoneError as error:
                gone = error
            except OSError as error:
                failed = error
            else:
                sock.close()
                return
        raise failed or gone or OSError(errno.EDESTADDRREQ, "it published no address")

    def _try(self, endpoint: Endpoint, hello: Hello, seconds: float) -> tuple[socket.socket, int]:
        self._allow(seconds)
        try:
            return self._open_one(endpoint, hello)
        except ConnectionRefusedError:
            raise GoneError(NOBODY_LISTENS) from None
        except RefusedError as error:
            raise GoneError(f"it answers: {error}") from None
        except HandshakeError as error:
            raise GoneError(f"{ANOTHER_ANSWERS}{error}") from None
        finally:
            self._open.clear()

    def _endpoints(self, *, local: bool) -> list[Endpoint]:
        address = self.target.address
        if local:
            return [Endpoint(socket.AF_UNIX, unix_path(address.unix_name))]
        return [Endpoint(_family(host), (host, port)) for host, port in address.tcp]

    def _open_link(self, endpoint: Endpoint, bulk: int) -> LinkSockets:
        """Opens a link; again, for a while, if it breaks while hands are shaken.

        While this worker lacks what a socket takes, that says nothing of the peer: it waits.
        """
        patience = time.monotonic() + self.target.resume_seconds
        while True:
            try:
                return self._open_all(endpoint, bulk)
            except ConnectionRefusedError:
                raise
            except ConnectionError:
                if time.monotonic() > patience or self._cancelled.wait(_PAUSE_SECONDS):
                    raise
            except OSError as error:
                if error.errno not in OWN_LIMITS or self._rest(error):
                    raise
                self._allow(self._seconds)

    def _open_all(self, endpoint: Endpoint, bulk: int) -> LinkSockets:
        token = self.token = os.urandom(TOKEN_BYTES)
        try:
            hello = self._hello(ChannelKind.MAIN, token, attempt=next(_links))
            main = self._open_one(endpoint, hello)
            others = [
                self._open_one(endpoint, self._hello(ChannelKind.BULK, token, channel))[0]
                for channel in range(1, bulk + 1)
            ]
        except BaseException:
            for sock in self._open:
                sock.close()
            raise
        finally:
            self._open.clear()
        return LinkSockets(main[0], others, endpoint, token)

    def _hello(
        self, kind: ChannelKind, token: bytes, channel: int = 0, attempt: int = 0, received: int = 0
    ) -> Hello:
        target, nonce = self.target, os.urandom(NONCE_BYTES)
        return Hello(
            kind, target.initiator, target.acceptor, token, nonce, channel, attempt, received
        )

    def _open_one(self, endpoint: Endpoint, hello: Hello) -> tuple[socket.socket, int]:
        certificates = self.target.certificates
        is_tls = certificates is not None and endpoint.family != socket.AF_UNIX
        sock = (TlsSocket if is_tls else socket.socket)(endpoint.family, socket.SOCK_STREAM)
        self._open.append(sock)
        try:
            self._connect(sock, endpoint.where)
            configure(sock)
            if certificates is not None and isinstance(sock, TlsSocket):
                self._begin_tls(sock, certificates)
            return sock, self._shake_hands(sock, hello)
        except BaseException:
            sock.close()
            raise

    def _connect(self, sock: socket.socket, where: Where) -> None:
        sock.setblocking(False)
        while (problem := sock.connect_ex(where)) not in (0, errno.EISCONN):
            if problem == errno.EAGAIN:  # a Unix listener whose backlog is full
                self._pause()
            elif problem in (errno.EINPROGRESS, errno.EALREADY):
                self._await(sock, select.POLLOUT)
            else:
                raise OSError(problem, os.strerror(problem))

    def _begin_tls(self, sock: TlsSocket, certificates: Certificates) -> None:
        sock.start(certificates.connecting())
        while not sock.shake_hands():
            self._await(sock, select.POLLIN)
        if not is_for(sock.names, self.target.name):
            raise HandshakeError(wrong_name(sock.names, self.target.name))

    def _shake_hands(self, sock: socket.socket, hello: Hello) -> int:
        target = self.target
        side = Initiator(derive_key(target.group_key, target.address.secret), hello)
        sock.send(side.begin())
        while not side.accepted:
            self._await(sock, select.POLLIN)
            try:
                data = sock.recv(side.wanted)
            except BlockingIOError:  # what arrived is a part of what TLS needs
                continue
            if not data:
                raise ConnectionResetError("the connection was closed during the handshake")
            answer = side.receive(data)
            if answer:
                sock.send(answer)
        return side.received

    def _await(self, sock: socket.socket, events: int) -> None:
        """Waits until a socket is ready, the attempt is cancelled or time is up."""
        poll = select.poll()
        poll.register(sock, events)
        while not poll.poll(1000 * min(self._left(), _LOOK_SECONDS)):
            pass

    def _pause(self) -> None:
        """Waits a moment for what nobody tells: such a socket always counts as ready."""
        self._cancelled.wait(min(self._left(), _BACKLOG_PAUSE_SECONDS))

    def _left(self) -> float:
        """Seconds that are left; raises if there are none, or the attempt is cancelled."""
        left = self._deadline - time.monotonic()
        if self._cancelled.is_set():
            raise OSError(errno.ECANCELED, "the transport gave up on it")
        if left <= 0:
            raise TimeoutError(f"no answer within {self._seconds:.3g} s")
        return left


def _names_of_sides(target: Target) -> tuple[str, str]:
    with_tls, without = "this worker", f"worker {target.name}"
    return (without, with_tls) if target.address.tls else (with_tls, without)


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def configure(sock: socket.socket) -> None:
    """Sets what every TCP connection of ours has set."""
    if sock.family != socket.AF_UNIX:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
