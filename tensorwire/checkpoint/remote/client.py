"""A chain at a publisher: asks over one connection, and opens another one if it breaks."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import threading
from collections.abc import Iterator
from typing import Final
from urllib.parse import urlsplit

from rpc import BringUpError, TlsOptions
from rpc.extend import Certificates
from tensorwire.checkpoint.chain import Version
from tensorwire.checkpoint.errors import (
    CheckpointError,
    DamagedCheckpointError,
    MismatchError,
    NoCheckpointError,
    NoPublisherError,
    WrongKeyError,
)
from tensorwire.checkpoint.remote import messages
from tensorwire.checkpoint.remote.handshake import (
    HELLO_BYTES,
    NONCE_BYTES,
    VERDICT_BYTES,
    HandshakeError,
    NotProvenError,
    ReaderSide,
)
from tensorwire.checkpoint.remote.messages import MessageError, Problem, Reply
from tensorwire.checkpoint.remote.mirror import RemovedError
from tensorwire.checkpoint.remote.server import PUBLISHER_NAME

SCHEME: Final = "tensorwire"
READER_NAME: Final = "reader"
"""The name that a reader's certificate is for."""
_SECONDS_TO_CONNECT: Final = 5.0
_SECONDS_OF_SILENCE: Final = 30.0
_PIECE: Final = 1 << 18
_ERRORS: Final = {
    Problem.DAMAGED: DamagedCheckpointError,
    Problem.MISMATCH: MismatchError,
    Problem.NOTHING: NoCheckpointError,
    Problem.GONE: RemovedError,
    Problem.OTHER: CheckpointError,
}


class _ToldError(Exception):
    """The publisher answers that it cannot give what was asked for; never leaves this module."""

    def __init__(self, problem: Problem, text: str) -> None:
        super().__init__(text)
        self.problem = problem


def parse_address(url: str) -> tuple[str, int]:
    """The host and the port of ``tensorwire://host:port``.

    Raises:
        ValueError: ``url`` has another form.
    """
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if not host or not port or parts.path.strip("/") or parts.query or parts.username:
        raise ValueError(f"{url!r} is no address of a publisher, such as tensorwire://host:7000")
    return host, port


class PublishedChain:
    """The chain of one publisher. For one thread, but for :meth:`interrupt`.

    Connects when something is asked, again if the connection broke.

    Args:
        url: ``tensorwire://host:port``.
        key: the reader key.
        tls: certificates; this end's must be for the name ``reader``. None for no TLS.

    Raises:
        BringUpError: a certificate cannot be used.
        ValueError: ``url`` is no such address.
    """

    def __init__(self, url: str, key: bytes, tls: TlsOptions | None = None) -> None:
        self._url = url
        self._place = parse_address(url)
        self._key = key
        self._certificates = None if tls is None else Certificates(tls, READER_NAME)
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._is_closed = False

    def __str__(self) -> str:
        return self._url

    def way(self, after: Version | None) -> list[bytes]:
        """The texts of ``version.json`` of the versions to apply after one, or from nothing.

        Raises:
            CheckpointError: there is no way, or nobody answers as a publisher does.
        """
        versions: list[bytes] = []
        with self._talking() as connected:
            _send(connected, messages.Way(None if after is None else after.place))
            while (reply := _reply(connected))[0] is Reply.VERSION:
                versions.append(_exactly(connected, reply[1]))
            _require(connected, reply, Reply.END)
        return versions

    def read(self, version: Version, name: str, offset: int) -> Iterator[bytes]:
        """The bytes of a file of a version from an offset on, in pieces.

        Raises:
            CheckpointError: the connection broke, or the version is not there any more.
        """
        with self._talking() as connected:
            asked = messages.Read(version.number, version.checksum, name, offset)
            _send(connected, asked)
            reply = _reply(connected)
            _require(connected, reply, Reply.FILE)
            left = reply[1]
            while left:
                piece = connected.recv(min(left, _PIECE))
                if not piece:
                    raise ConnectionError("the connection ended within a file")
                left -= len(piece)
                yield piece

    @contextlib.contextmanager
    def _talking(self) -> Iterator[socket.socket]:
        """A connection on which nothing is under way; closed if what is said there breaks off."""
        connected = self._connected()
        is_whole = False
        try:
            yield connected
            is_whole = True
        except _ToldError as told:
            is_whole = True
            raise _ERRORS[told.problem](f"{self._url} says: {told}") from None
        except (OSError, MessageError) as error:
            raise NoPublisherError(f"the connection to {self._url} broke: {error}") from None
        finally:
            if not is_whole:
                self._drop()

    def _connected(self) -> socket.socket:
        if self._socket is not None and _has_ended(self._socket):
            self._drop()
        if self._socket is None:
            made = self._connect()
            with self._lock:
                self._socket = made
                is_closed = self._is_closed
            if is_closed:
                self._drop()
                raise NoPublisherError(f"{self._url} is not followed any more")
        return self._socket

    def _connect(self) -> socket.socket:
        try:
            made = socket.create_connection(self._place, _SECONDS_TO_CONNECT)
        except OSError as error:
            raise NoPublisherError(f"nobody answers at {self._url}: {error}") from None
        try:
            if self._certificates is not None:
                made = _secured(made, self._certificates)
            self._prove(made)
            made.settimeout(_SECONDS_OF_SILENCE)
            return made
        except NotProvenError as error:
            made.close()
            raise WrongKeyError(
                f"{self._url}: {error}: give key_file= the file that "
                "`python -m tensorwire.checkpoint.publisher --write-key FILE` writes"
            ) from None
        except (HandshakeError, ssl.SSLError, BringUpError) as error:
            made.close()
            raise CheckpointError(
                f"what answers at {self._url} is no publisher of versions: {error}"
            ) from None
        except OSError as error:
            made.close()
            raise NoPublisherError(
                f"what answers at {self._url} does not shake hands, or wants tls=: {error}"
            ) from None
        except BaseException:
            made.close()
            raise

    def _prove(self, made: socket.socket) -> None:
        side = ReaderSide(self._key, os.urandom(NONCE_BYTES))
        made.sendall(side.hello())
        made.sendall(side.prove(_exactly(made, HELLO_BYTES)))
        side.check(_exactly(made, VERDICT_BYTES))

    def _drop(self) -> None:
        with self._lock:
            connected, self._socket = self._socket, None
        if connected is not None:
            connected.close()

    def interrupt(self) -> None:
        """Has what is under way fail, and all that is asked later; from any thread."""
        with self._lock:
            self._is_closed = True
            if self._socket is not None:
                with contextlib.suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Closes the connection."""
        self.interrupt()
        self._drop()


def _secured(made: socket.socket, certificates: Certificates) -> socket.socket:
    secured: ssl.SSLSocket = certificates.connecting().wrap_socket(made)
    try:
        certificates.require(secured.getpeercert() or {}, PUBLISHER_NAME)
    except BaseException:
        secured.close()
        raise
    return secured


def _has_ended(connected: socket.socket) -> bool:
    """True if the other end has closed a connection on which nothing is under way."""
    connected.settimeout(0)
    try:
        connected.recv(1)  # nothing may come unasked
        return True
    except (BlockingIOError, ssl.SSLWantReadError):
        return False
    except OSError:
        return True
    finally:
        connected.settimeout(_SECONDS_OF_SILENCE)


def _send(connected: socket.socket, request: messages.Way | messages.Read) -> None:
    connected.sendall(messages.encoded(request))


def _reply(connected: socket.socket) -> tuple[Reply, int]:
    return messages.parsed_head(_exactly(connected, messages.REPLY_HEAD.size))


def _require(connected: socket.socket, reply: tuple[Reply, int], kind: Reply) -> None:
    if reply[0] is Reply.ERROR:
        problem, text = messages.parsed_error(_exactly(connected, reply[1]))
        raise _ToldError(problem, text)
    if reply[0] is not kind:
        raise MessageError(f"{reply[0].name} comes in the place of {kind.name}")


def _exactly(connected: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        piece = connected.recv(min(count - len(data), _PIECE))
        if not piece:
            raise ConnectionError("the other end closed it")
        data += piece
    return bytes(data)
