"""A TCP socket whose bytes are encrypted, for readers and writers that know nothing of it.

Non-blocking, like all sockets here. It keeps two promises that the rest relies on:

- **Readiness.** epoll says that there is something to read as long as there is. So bytes stay
  in the system's buffer until all that they say was handed out: they are looked at
  (``MSG_PEEK``), decrypted, and discarded when nothing is left of them.
- **Partial sends.** What was encrypted must leave as it is. If the system takes it only in
  part, nothing was sent, as far as the caller knows. It offers the same bytes again when the
  socket takes more, and only what is left is sent then.

One thread may read while another one sends; OpenSSL does not allow both at once, so a lock is
held while bytes are encrypted or decrypted, and never while a system call is made.
"""

from __future__ import annotations

import errno
import os
import socket
import ssl
import threading
from collections.abc import Iterable
from typing import Any

from rpc.transports.tensorwire.tls import names_in

_CHUNK = 1 << 18
_MOST_AT_ONCE = 1 << 18
_JOINED_BELOW = 1 << 14
_NOTHING = memoryview(b"")
_scratch = bytearray(_CHUNK)
"""Memory for what is discarded; the system, told to discard, writes nothing to it."""


class _TlsSession:
    """The TLS connection of one TCP connection."""

    __slots__ = ("incoming", "is_over", "left", "lock", "names", "outgoing", "seen", "taken", "tls")

    def __init__(self, context: ssl.SSLContext, server_side: bool) -> None:
        self.incoming, self.outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.tls = context.wrap_bio(self.incoming, self.outgoing, server_side=server_side)
        self.lock = threading.Lock()
        self.names: tuple[str, ...] | None = None
        """The names in the other end's certificate; None until hands are shaken."""
        self.left = _NOTHING
        """Encrypted bytes that the system has not taken."""
        self.taken = 0
        """The number of the caller's bytes that these stand for."""
        self.seen = 0
        """Bytes that were looked at and are to be discarded."""
        self.is_over = False


class TlsSocket(socket.socket):
    """One end of a connection. Until :meth:`start` it is an ordinary socket."""

    _session: _TlsSession

    @classmethod
    def over(cls, plain: socket.socket, context: ssl.SSLContext) -> TlsSocket:
        """Takes over a connection that was accepted; the hands are shaken by reading."""
        made = cls(plain.family, plain.type, plain.proto, plain.detach())
        made.setblocking(False)
        made.start(context, server_side=True)
        return made

    def start(self, context: ssl.SSLContext, *, server_side: bool = False) -> None:
        """Speaks TLS from now on."""
        self._session = _TlsSession(context, server_side)

    @property
    def names(self) -> tuple[str, ...]:
        """The worker names in the other end's certificate; none until hands are shaken."""
        return self._session.names or ()

    def shake_hands(self) -> bool:
        """Goes on with the handshake as far as bytes have arrived; True when it is done.

        Raises:
            ssl.SSLError: the other end is not trusted, or does not speak TLS 1.3.
            OSError: the connection broke.
        """
        session = self._session
        while session.names is None:
            try:
                with session.lock:
                    session.tls.do_handshake()
                    session.names = names_in(session.tls.getpeercert() or {})
            except ssl.SSLWantReadError:
                self._send_outgoing()
                if not self._take_in():
                    return False
            except ssl.SSLEOFError:
                raise ConnectionResetError(
                    errno.ECONNRESET, "the connection was closed during the TLS handshake"
                ) from None
            except ssl.SSLError:
                self._send_outgoing()  # says why
                raise
        self._send_outgoing()
        if not self._holds_bytes():
            self._discard()
        return True

    def _send_outgoing(self) -> None:
        """Sends what TLS has to say of its own: little, which a new connection has room for."""
        data = self._session.outgoing.read()
        if data:
            super().send(data)

    # Sending.

    def send(self, data: Any, flags: int = 0) -> int:
        """See ``socket.send``."""
        return self.sendmsg((data,))

    def sendmsg(self, buffers: Iterable[Any], *_: Any) -> int:
        """See ``socket.sendmsg``, and the module about partial sends."""
        session = self._session
        if not session.left:
            data = _first_bytes(buffers)
            with session.lock:
                session.tls.write(data)
                session.left = memoryview(session.outgoing.read())
            session.taken = len(data)
        while session.left:
            sent = super().send(session.left)
            session.left = session.left[sent:]
        return session.taken

    # Receiving.

    def recv(self, size: int, flags: int = 0) -> bytes:
        """See ``socket.recv``."""
        self._require_hands_shaken()
        parts: list[bytes] = []
        missing = size
        while missing and (part := self._next(missing, None)):
            parts.append(part)
            missing -= len(part)
            if self._is_drained():
                break
        self._received(bool(parts), missing)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def recv_into(self, buffer: Any, nbytes: int = 0, flags: int = 0) -> int:
        """See ``socket.recv_into``."""
        self._require_hands_shaken()
        view = memoryview(buffer)
        filled = 0
        while filled < len(view) and (count := self._next(len(view) - filled, view[filled:])):
            filled += count
            if self._is_drained():
                break
        self._received(filled > 0, len(view) - filled)
        return filled

    def _require_hands_shaken(self) -> None:
        if self._session.names is None and not self.shake_hands():
            raise BlockingIOError(errno.EAGAIN, "the handshake goes on")

    def _next(self, size: int, buffer: memoryview | None) -> Any:
        """Decrypts up to ``size`` bytes; nothing if no more have arrived, or ever will."""
        session = self._session
        while self._holds_bytes() or self._take_in():
            try:
                with session.lock:
                    data = session.tls.read(size, buffer)
            except ssl.SSLWantReadError:
                if not self._take_in():
                    return b""
            except ssl.SSLEOFError:  # the end without a word, as when a process dies
                session.is_over = True
                return b""
            else:
                session.is_over = not data
                return data
        return b""

    def _holds_bytes(self) -> bool:
        """True while there is something to decrypt that was taken out of the system's buffer."""
        return bool(self._session.incoming.pending or self._session.tls.pending())

    def _is_drained(self) -> bool:
        """True if all that had arrived at the last look was decrypted and handed out."""
        return self._session.seen < _CHUNK and not self._holds_bytes()

    def _received(self, anything: bool, missing: int) -> None:
        """Hands out what was decrypted. If that is less than the caller takes, all is read."""
        if missing:
            self._discard()
        if not anything and not self._session.is_over:
            raise BlockingIOError(errno.EAGAIN, "nothing has arrived")

    def _take_in(self) -> bool:
        """Passes on to TLS what has arrived; False if that is nothing."""
        session = self._session
        self._discard()
        try:
            data = super().recv(_CHUNK, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        with session.lock:
            if data:
                session.incoming.write(data)
            else:
                session.incoming.write_eof()
        session.seen = len(data)
        return True

    def _discard(self) -> None:
        """Takes what was decrypted out of the system's buffer."""
        session = self._session
        if session.seen:
            super().recv_into(_scratch, session.seen, socket.MSG_TRUNC)
            session.seen = 0


def _first_bytes(buffers: Iterable[Any]) -> Any:
    """The bytes to encrypt at once: a part of the first buffer, or several small ones joined."""
    joined: list[Any] = []
    size = 0
    for buffer in buffers:
        size += len(buffer)
        if size > _JOINED_BELOW:
            return b"".join(joined) if joined else memoryview(buffer)[:_MOST_AT_ONCE]
        joined.append(buffer)
    return b"".join(joined)


def take_the_place(sock: socket.socket, newer: socket.socket) -> None:
    """Puts a connection behind the descriptor of one that broke; the caller closes ``newer``.

    To be called while nobody reads or sends.
    """
    os.dup2(newer.fileno(), sock.fileno(), inheritable=False)
    if isinstance(sock, TlsSocket) and isinstance(newer, TlsSocket):
        sock._session = newer._session


def certified_names(sock: socket.socket) -> tuple[str, ...] | None:
    """Returns the worker names in the other end's certificate; None for a socket without TLS."""
    return sock.names if isinstance(sock, TlsSocket) else None
