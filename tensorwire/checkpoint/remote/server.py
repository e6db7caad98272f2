"""Gives the versions of a chain to readers on the network, and nothing else to anybody.

One thread runs an event loop for all connections; files are read by threads of its pool, a piece
at a time, and the next piece is read when the one before is on its way. So a connection takes the
memory of some pieces, and one whose reader is slow holds nobody up.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import ssl
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from rpc import TlsOptions
from rpc.extend import Certificates, UnauthenticatedConnections
from tensorwire.checkpoint.chain import ABOUT, Chain, Place, Version
from tensorwire.checkpoint.errors import CheckpointError, MismatchError, NoCheckpointError
from tensorwire.checkpoint.remote import messages
from tensorwire.checkpoint.remote.handshake import (
    HELLO_BYTES,
    NONCE_BYTES,
    PROOF_BYTES,
    REFUSED,
    HandshakeError,
    NotProvenError,
    PublisherSide,
)
from tensorwire.checkpoint.remote.messages import MessageError, Problem, Reply

if TYPE_CHECKING:
    from typing_extensions import Self

PUBLISHER_NAME: Final = "publisher"
"""The name that a publisher's certificate is for."""
_SECONDS_TO_PROVE: Final = 5.0
_SECONDS_TO_ASK: Final = 600.0
_SECONDS_TO_TAKE: Final = 60.0
"""Seconds after which a reader that takes not even one piece is let go; it may come again."""
_SECONDS_BETWEEN_LOOKS: Final = 0.02
_PIECE: Final = 1 << 17
_STRANGERS: Final = 64
_SECONDS_TO_RECOVER: Final = 1.0
_logger: Final = logging.getLogger("tensorwire")


class ChainServer:
    """Gives the versions of a chain to readers that have the reader key.

    It runs on a thread of its own until it is closed. Used as a context manager, it is closed at
    the end. Readers :func:`~tensorwire.checkpoint.follow` it under ``tensorwire://host:port``.

    Args:
        folder: of the chain; may be made later.
        key: the reader key, see :func:`reader_key`; 16 bytes or more.
        host: address or name of this host at which to listen. Default the loopback interface.
        port: default one that is free, see the attribute.
        tls: certificates, of which this end's must be for the name ``publisher``. Default no TLS.
        max_readers: connections of readers at the same time. Default 256.

    Attributes:
        port: at which it listens.

    Raises:
        BringUpError: a certificate cannot be used.
        OSError: the port is taken, or ``host`` is no address of this host.
        ValueError: the key is too short, or ``max_readers`` less than 1.
    """

    def __init__(
        self,
        folder: str | Path,
        key: bytes,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        tls: TlsOptions | None = None,
        max_readers: int = 256,
    ) -> None:
        if len(key) < 16:
            raise ValueError(f"key: {len(key)} bytes are too few; checkpoint.reader_key makes one")
        if max_readers < 1:
            raise ValueError(f"max_readers={max_readers!r} must be at least 1")
        self.folder = Path(folder).absolute()
        self._tls = None if tls is None else _accepting(Certificates(tls, PUBLISHER_NAME))
        self._listener = _listen(host, port)
        self.port: int = self._listener.getsockname()[1]
        self._connections = _Connections(_Versions(self.folder), key, max_readers, self._tls)
        self._is_ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="tensorwire-publisher", daemon=True)
        self._thread.start()
        self._is_ready.wait()

    def _run(self) -> None:
        with self._listener:
            asyncio.set_event_loop(self._loop)
            try:
                self._loop.run_until_complete(self._serve())
            finally:
                self._loop.run_until_complete(self._loop.shutdown_default_executor())
                self._loop.close()
                self._is_ready.set()

    async def _serve(self) -> None:
        self._closing = asyncio.Event()
        accepting = asyncio.create_task(self._connections.accept(self._listener))
        self._is_ready.set()
        await self._closing.wait()
        accepting.cancel()
        await asyncio.gather(accepting, return_exceptions=True)
        await self._connections.end()

    def close(self) -> None:
        """Ends it and all connections."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._closing.set)
            self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _listen(host: str, port: int) -> socket.socket:
    family, _, _, _, place = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listener = socket.create_server(place[:2], family=family, backlog=128)
    listener.setblocking(False)
    return listener


def _accepting(certificates: Certificates) -> ssl.SSLContext:
    """A context that has each connection use the certificates as they are then."""
    first = certificates.accepting()

    def choose(connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        connection.context = certificates.accepting()

    first.sni_callback = choose
    return first


class _Versions:
    """The chain as its folder holds it, looked at by the threads of a pool."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._chain: Chain | None = None
        self._read_at = 0.0

    def _now(self) -> Chain:
        with self._lock:
            now = time.monotonic()
            if self._chain is not None and now - self._read_at < _SECONDS_BETWEEN_LOOKS:
                return self._chain
            self._chain = self._chain.again() if self._chain else Chain.open(self._folder)
            self._read_at = now
            return self._chain

    def way(self, after: Place | None) -> tuple[Version, ...]:
        """See :meth:`Chain.way`."""
        return self._now().way(after)

    def file(self, asked: messages.Read) -> tuple[Path, int]:
        """The path of a file of a version, and its size.

        Raises:
            FileNotFoundError: the version was removed, or has no such file.
        """
        for version in self._now().versions():
            known = version.files.get(asked.name)
            is_it = (version.number, version.checksum) == (asked.number, asked.checksum)
            if is_it and known is not None:
                return version.folder / asked.name, known.bytes
        raise FileNotFoundError(f"version {asked.number} is not there any more")


class _OpenFile:
    """A file that threads of the pool read, and that this one may close at any time."""

    def __init__(self, path: Path) -> None:
        self._lock = threading.Lock()
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)

    def read(self, length: int, offset: int) -> bytes:
        """Some bytes; fewer at the end of the file, none if it is closed."""
        with self._lock:
            return os.pread(self._descriptor, length, offset) if self._descriptor >= 0 else b""

    def close(self) -> None:
        """Waits for the piece that is being read."""
        with self._lock:
            os.close(self._descriptor)
            self._descriptor = -1


class _Connections:
    """All connections, on the thread of the loop.

    Strangers are counted from the moment on at which their connection is accepted, before TLS.
    """

    def __init__(
        self, versions: _Versions, key: bytes, max_readers: int, tls: ssl.SSLContext | None
    ) -> None:
        self._versions = versions
        self._key = key
        self._max_readers = max_readers
        self._tls = tls
        self._strangers = UnauthenticatedConnections[socket.socket](_STRANGERS, _SECONDS_TO_PROVE)
        self._readers: set[asyncio.StreamWriter] = set()
        self._tasks: dict[socket.socket, asyncio.Task[None]] = {}

    async def accept(self, listener: socket.socket) -> None:
        """Takes connections until it is cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                connected, address = await loop.sock_accept(listener)
            except OSError as error:  # such as too many open files
                _logger.warning("the publisher cannot take a connection: %s", error)
                await asyncio.sleep(_SECONDS_TO_RECOVER)
                continue
            evicted = self._strangers.add(connected, address[0], time.monotonic())
            if evicted is connected:
                connected.close()
                continue
            if evicted is not None:
                self._tasks[evicted].cancel()
            self._tasks[connected] = loop.create_task(self._serve(connected))
            await asyncio.sleep(0)  # it begins, and owns the socket from then on

    async def end(self) -> None:
        """Ends all connections."""
        tasks = list(self._tasks.values())
        for each in tasks:
            each.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, connected: socket.socket) -> None:
        """One connection, from its first byte to its last."""
        writer: asyncio.StreamWriter | None = None
        try:
            reader, writer = await self._opened(connected)
            await self._answer(connected, reader, writer)
        except (asyncio.TimeoutError, asyncio.IncompleteReadError, OSError):
            pass  # the reader is gone or too slow; it comes again if it wants more
        except (HandshakeError, MessageError) as error:
            _logger.info("a connection to the publisher is refused: %s", error)
        except asyncio.CancelledError:
            pass  # this server ends, or there are too many strangers
        finally:
            del self._tasks[connected]
            self._strangers.discard(connected)
            if writer is not None:
                self._readers.discard(writer)
                writer.transport.abort()
            await asyncio.sleep(0)

    async def _opened(
        self, connected: socket.socket
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=HELLO_BYTES)
        protocol = asyncio.StreamReaderProtocol(reader)
        patience = None if self._tls is None else _SECONDS_TO_PROVE
        transport, _ = await loop.connect_accepted_socket(
            lambda: protocol, connected, ssl=self._tls, ssl_handshake_timeout=patience
        )
        return reader, asyncio.StreamWriter(transport, protocol, reader, loop)

    async def _answer(
        self,
        connected: socket.socket,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        await asyncio.wait_for(self._shake_hands(reader, writer), _SECONDS_TO_PROVE)
        self._strangers.discard(connected)
        if len(self._readers) >= self._max_readers:
            text = f"it has {self._max_readers} readers, as many as it may have"
            await _send(writer, messages.error_reply(Problem.OTHER, text))
            return
        self._readers.add(writer)
        connection = _Connection(self._versions, reader, writer)
        while await connection.answer():
            pass

    async def _shake_hands(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        side = PublisherSide(self._key, os.urandom(NONCE_BYTES))
        writer.write(side.answer(await reader.readexactly(HELLO_BYTES)))
        try:
            writer.write(side.verdict(await reader.readexactly(PROOF_BYTES)))
        except NotProvenError:
            await _send(writer, REFUSED)
            raise


class _Connection:
    """A reader that has proven the key."""

    def __init__(
        self, versions: _Versions, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._versions = versions
        self._reader = reader
        self._writer = writer

    async def answer(self) -> bool:
        """Takes one request, and answers it. False if the reader has gone."""
        size = messages.REQUEST_HEAD.size
        head = await asyncio.wait_for(self._reader.readexactly(size), _SECONDS_TO_ASK)
        length = messages.request_length(head)
        body = await asyncio.wait_for(self._reader.readexactly(length), _SECONDS_TO_TAKE)
        request = messages.decoded(head, body)
        if isinstance(request, messages.Way):
            return await self._tell_way(request)
        return await self._send_file(request)

    async def _tell_way(self, request: messages.Way) -> bool:
        try:
            way = await asyncio.to_thread(self._versions.way, request.after)
            for version in way:
                text = await asyncio.to_thread((version.folder / ABOUT).read_bytes)
                head = messages.reply_head(Reply.VERSION, len(text))
                await _send(self._writer, head + text)
        except FileNotFoundError as error:
            nothing = isinstance(error, NoCheckpointError)
            return await self._say(Problem.NOTHING if nothing else Problem.GONE, error)
        except MismatchError as error:
            return await self._say(Problem.MISMATCH, error)
        except CheckpointError as error:
            return await self._say(Problem.DAMAGED, error)
        except ConnectionError:
            raise
        except OSError as error:
            return await self._say(Problem.OTHER, error)
        await _send(self._writer, messages.reply_head(Reply.END, 0))
        return True

    async def _send_file(self, request: messages.Read) -> bool:
        try:
            path, size = await asyncio.to_thread(self._versions.file, request)
            file = _OpenFile(path)
        except FileNotFoundError as error:
            return await self._say(Problem.GONE, error)
        except (CheckpointError, OSError) as error:
            return await self._say(Problem.OTHER, error)
        try:
            offset = min(request.offset, size)
            await _send(self._writer, messages.reply_head(Reply.FILE, size - offset))
            while offset < size:
                want = min(_PIECE, size - offset)
                piece = await asyncio.to_thread(file.read, want, offset)
                if not piece:
                    return False  # cut short: the reader gets less than it was told
                await _send(self._writer, piece)
                offset += len(piece)
        finally:
            file.close()
        return True

    async def _say(self, problem: Problem, error: BaseException) -> bool:
        await _send(self._writer, messages.error_reply(problem, str(error)))
        return True


async def _send(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(data)
    await asyncio.wait_for(writer.drain(), _SECONDS_TO_TAKE)
