"""A client of the group's store, or of torch's ``TCPStore``, with deadlines that hold.

Given the group's key, it speaks to the closed part of a store of ours (``store_gate``) or to
nobody. Given a job, it sees only what was written for that job: all names of keys begin with it.

torch's own client looks up the name of the address that it connects to, which takes
seconds where the resolver is slow; it cannot be interrupted; and it prints C++ stack traces
when the server is gone. This one speaks the same protocol, on one connection, and says in the
log what it waits for. A store that has too many connections closes some that are idle, so it
connects again where that is so.

A key is sent as torch's clients send it, with a slash in front, so both see the same keys.
"""

from __future__ import annotations

import enum
import errno
import hashlib
import hmac
import logging
import math
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from ipaddress import ip_address
from typing import Any, Final, TypeVar
from urllib.parse import quote

from rpc.group.own_store import OwnStore
from rpc.group.store_gate import NONCE_BYTES, PROOF_BYTES, RUN_BYTES, Knock, NotProvenError
from rpc.group.store_values import HAS_CLOSED_PART

T = TypeVar("T")

_logger = logging.getLogger("rpc")

_MAGIC: Final = 0x3C85F7CE
_HELLO: Final = struct.Struct("<BI")
_LENGTH: Final = struct.Struct("<Q")
_NUMBER: Final = struct.Struct("<q")
_LONGEST_REPLY: Final = 1 << 26
_MOST_TRIES: Final = 5
_SECONDS_BETWEEN_ATTEMPTS: Final = 0.1
_NO_WAY: Final = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ETIMEDOUT, errno.ENETDOWN)
_NO_RUN: Final = b"0" * 16
_SECONDS_TO_PROVE: Final = 5.0
_PIPELINE: Final = 64
"""Requests that are sent before their replies are read: few enough to fit into the sockets."""
SECONDS_OF_SILENCE: Final = 5.0
"""Seconds after which the log says what is waited for; then whenever twice as much has passed."""


class _Request(enum.IntEnum):
    """Requests, by torch's numbers."""

    HELLO = 0
    SET = 1
    COMPARE_SET = 2
    GET = 3
    ADD = 4
    CHECK = 5
    WAIT = 6
    NUMBER_OF_KEYS = 7
    DELETE = 8
    MULTI_GET = 10
    CANCEL_WAIT = 12
    PING = 13


_NONCE: Final = b"ping"
_PING: Final = bytes([_Request.PING]) + _NONCE  # is answered, which a value that is set is not

_READY: Final = 0
_WAIT_IS_OVER: Final = 0
_WAIT_CANCELLED: Final = 1


def is_address(host: str) -> bool:
    """True of an IP address, False of a name."""
    try:
        ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True


def plain_host(host: str) -> str | bytes:
    """A host for the functions of ``socket``, which load much to encode what is no bytes.

    Names stay text, so that those that cannot be are told.
    """
    return host.encode() if is_address(host) else host


class StoreLostError(ConnectionError):
    """The store's host is gone, or does not answer."""


class NoClosedPartError(StoreLostError):
    """There is a store, but nobody there has the group's key."""


class AnotherKeyError(StoreLostError):
    """There is a store, and its host was given another key than this process."""


class _ClosedError(StoreLostError):
    """The store closed the connection."""


class _SilentError(StoreLostError):
    """Nothing came on a connection in time."""


class _Connection:
    """One connection. Every method returns or raises by ``deadline``, a monotonic time."""

    def __init__(self, connected: socket.socket, where: str, deadline: float) -> None:
        self.deadline = deadline
        self._where = where
        self._socket = connected
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def greet(self) -> None:
        """Begins to speak as torch's clients do."""
        self.send(_HELLO.pack(_Request.HELLO, _MAGIC))

    def prove(self, key: bytes) -> bytes:
        """Proves the key, and has the store prove it; returns the store's run.

        Raises:
            AnotherKeyError: one of the two cannot.
        """
        side = Knock(key, os.urandom(NONCE_BYTES))
        self.deadline = min(self.deadline, time.monotonic() + _SECONDS_TO_PROVE)
        self.send(side.hello())
        try:
            self.send(side.answer(self.receive(NONCE_BYTES)))
            run = side.check(self.receive(RUN_BYTES + PROOF_BYTES))
        except (NotProvenError, _ClosedError, ConnectionResetError, BrokenPipeError):
            raise AnotherKeyError(
                f"the workers disagree about group_key: the store at {self._where} was given "
                "another one than this process, or refused it; give every worker of the group "
                "the same"
            ) from None
        self.greet()
        return run

    def send(self, data: bytes) -> None:
        self._socket.settimeout(self._left())
        try:
            self._socket.sendall(data)
        except TimeoutError:
            raise _SilentError(self._silence()) from None

    def receive(self, size: int) -> bytes:
        """Reads exactly ``size`` bytes; says in the log if that takes long."""
        received = bytearray()
        began, silence = time.monotonic(), SECONDS_OF_SILENCE
        while len(received) < size:
            until_told = began + silence - time.monotonic()
            self._socket.settimeout(min(self._left(), max(until_told, 0.001)))
            try:
                chunk = self._socket.recv(size - len(received))
            except TimeoutError:
                if time.monotonic() >= self.deadline:
                    raise _SilentError(self._silence()) from None
                if time.monotonic() >= began + silence:
                    _logger.warning(
                        "the group's store at %s has not answered for %g s; is the "
                        "process that hosts it frozen?",
                        self._where,
                        silence,
                    )
                    silence *= 2
                continue
            if not chunk:
                raise self._closed()
            received += chunk
        return bytes(received)

    def byte_within(self, seconds: float) -> int | None:
        """Reads one byte if it comes within that time."""
        self._socket.settimeout(max(0.001, min(seconds, self._left())))
        try:
            received = self._socket.recv(1)
        except TimeoutError:
            return None
        if not received:
            raise self._closed()
        return received[0]

    def value(self) -> bytes:
        (size,) = _LENGTH.unpack(self.receive(_LENGTH.size))
        if size > _LONGEST_REPLY:
            raise StoreLostError(f"the store at {self._where} sent a value of {size} bytes")
        return self.receive(size)

    def values(self, count: int) -> list[bytes]:
        return [self.value() for _ in range(count)]

    def number(self) -> int:
        return int(_NUMBER.unpack(self.receive(_NUMBER.size))[0])

    def is_closed(self) -> bool:
        """True if the store closed it, or sent what it was not asked for."""
        events = select.poll()
        events.register(self._socket, select.POLLIN)
        return bool(events.poll(0))

    def close(self) -> None:
        self._socket.close()

    __del__ = close  # as torch's clients, which nobody closes either

    def _closed(self) -> _ClosedError:
        return _ClosedError(
            f"the store at {self._where} closed the connection: it ended, or is full"
        )

    def _left(self) -> float:
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise _SilentError(self._silence())
        return min(left, threading.TIMEOUT_MAX)

    def _silence(self) -> str:
        return f"the store at {self._where} did not answer in time"


class TcpStoreClient(OwnStore):
    """One worker's connection to a ``TCPStore``; any thread may use it, one at a time.

    It connects with the first request, and anew with the next one after a failure.

    Args:
        host: name or address of the server's host.
        port: of the server.
        timeout: seconds that one request may take.
        group_key: it speaks to the closed part of a store, which proves this key, or to
            nobody. Default to the open part, or to torch's.
        job: the id of a job, of whose keys alone it sees and writes. Default to those of none.

    Attributes:
        attempt: seconds after which what was not answered is asked over another connection: where
            a cable was cut, one that is there already is silent for as long again as the cut.
            Default never. Not for :meth:`add`.
    """

    def __init__(
        self, host: str, port: int, timeout: float, group_key: bytes = b"", job: str = ""
    ) -> None:
        super().__init__(f"/job/{quote(job, safe='')}" if job else "")
        self._key = connection_key(group_key) if group_key else b""
        self._run = b""
        self.attempt = math.inf
        self._host = host
        self._port = port
        self._seconds = timeout
        self._lock = threading.Lock()
        self._connection: _Connection | None = None

    @property
    def run(self) -> bytes:
        """Says which store this is, among all that were ever hosted there; 16 bytes.

        The same for all stores that have no closed part.

        Raises:
            OSError: it is not known yet, and the store does not answer.
        """
        if self._key and not self._run:
            self.connect()
        return self._run or _NO_RUN

    @property
    def host(self) -> str:
        """Name or address of the server's host."""
        return self._host

    @property
    def port(self) -> int:
        """The server's port."""
        return self._port

    def set_timeout(self, timeout: timedelta) -> None:
        """Sets how long one request may take."""
        self._seconds = timeout.total_seconds()

    def connect(self) -> None:
        """Connects, if it is not connected.

        Raises:
            NoClosedPartError: a group key was given, and the store there has no closed part.
            AnotherKeyError: it has another one.
            OSError: nobody listens there, or nothing answers; says what the kernel says.
        """
        with self._lock:
            self._connected()

    def has_closed_part(self) -> bool:
        """True if the store has a part that only who proves its key may use."""
        request = bytes([_Request.CHECK]) + _LENGTH.pack(1) + _bytes(HAS_CLOSED_PART)
        return self._ask(request, lambda connection: connection.receive(1)[0] == _READY)

    def _request(self, kind: _Request, *keys: str, counted: bool = False) -> bytes:
        count = _LENGTH.pack(len(keys)) if counted else b""
        return bytes([kind]) + count + b"".join(_bytes(f"{self.prefix}/{key}") for key in keys)

    # --- Requests, by torch's names

    def set(self, key: str, value: str | bytes) -> None:
        """Puts a value under a key; returns when it is there."""
        request = self._request(_Request.SET, key) + _bytes(value)
        self._ask(request + _PING, lambda connection: connection.receive(len(_NONCE)))

    def get(self, key: str) -> bytes:
        """The value under a key, which is waited for."""
        self.wait([key], timedelta(seconds=min(self._seconds, threading.TIMEOUT_MAX)))
        return self._ask(self._request(_Request.GET, key), _Connection.value)

    def add(self, key: str, amount: int) -> int:
        """Adds to a counter and returns what it is then."""
        request = self._request(_Request.ADD, key) + _NUMBER.pack(amount)
        if not amount:
            return self._ask(request, _Connection.number)
        with self._lock:
            return self._ask_once(request, _Connection.number)

    def check(self, keys: Sequence[str]) -> bool:
        """True if there are values under all these keys."""
        request = self._request(_Request.CHECK, *keys, counted=True)
        return self._ask(request, lambda connection: connection.receive(1)[0] == _READY)

    def compare_set(
        self, key: str, expected_value: str | bytes, desired_value: str | bytes
    ) -> bytes:
        """Puts the desired value under a key that has the expected one; returns what is there."""
        return self.compare_set_all([(key, expected_value, desired_value)])[0]

    def compare_set_all(
        self, changes: Sequence[tuple[str, str | bytes, str | bytes]]
    ) -> list[bytes]:
        """Makes several compare-and-sets in one round trip; together they are not one step."""
        results: list[bytes] = []
        for start in range(0, len(changes), _PIPELINE):
            some = changes[start : start + _PIPELINE]
            request = b"".join(
                self._request(_Request.COMPARE_SET, key) + _bytes(expected) + _bytes(desired)
                for key, expected, desired in some
            )
            results += self._ask(request, partial(_Connection.values, count=len(some)))
        return results

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """The values under several keys, which must be there."""
        request = self._request(_Request.MULTI_GET, *keys, counted=True)
        return self._ask(request, partial(_Connection.values, count=len(keys)))

    def delete_key(self, key: str) -> bool:
        """Deletes a key; True if it was there."""
        with self._lock:
            return self._ask_once(self._request(_Request.DELETE, key), _Connection.number) == 1

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Puts values under several keys, one after the other."""
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def num_keys(self) -> int:
        """The number of keys there are."""
        return self._ask(self._request(_Request.NUMBER_OF_KEYS), _Connection.number)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Returns when there are values under all these keys.

        Args:
            keys: their names.
            timeout: how long to wait; default what one request may take.

        Raises:
            TimeoutError: the time is over.
            StoreLostError: the store is gone, or does not even say so.
        """
        seconds = self._seconds if timeout is None else timeout.total_seconds()
        request = self._request(_Request.WAIT, *keys, counted=True)
        if not self._ask(request, lambda connection: _wait(connection, seconds), seconds):
            raise TimeoutError(f"{list(keys)} were not there within {seconds:g} s")

    # --- The connection

    def _ask(self, request: bytes, read: Callable[[_Connection], T], more: float = 0.0) -> T:
        """Asks what may be asked twice: again, while the store closes the connection meanwhile.

        With ``attempt``, also while nothing comes, or no way leads to the store's host.
        """
        closed = 0
        with self._lock:
            deadline = min(self.until, time.monotonic() + self._seconds + more)
            while True:
                try:
                    attempt = time.monotonic() + self.attempt + more
                    return self._ask_once(request, read, min(deadline, attempt))
                except (_ClosedError, ConnectionResetError, BrokenPipeError):
                    closed += 1
                    if closed == _MOST_TRIES:
                        raise
                except OSError as error:
                    is_over = time.monotonic() + _SECONDS_BETWEEN_ATTEMPTS >= deadline
                    if is_over or self.attempt == math.inf or not _may_pass(error):
                        raise
                    time.sleep(_SECONDS_BETWEEN_ATTEMPTS)

    def _ask_once(
        self, request: bytes, read: Callable[[_Connection], T], deadline: float = math.inf
    ) -> T:
        """Sends requests and reads their replies, over one connection. Needs the lock."""
        connection = self._connected(deadline)
        try:
            connection.send(request)
            return read(connection)
        except BaseException:  # what is still to come would be taken for the next answer
            connection.close()
            self._connection = None
            raise

    def _connected(self, deadline: float = math.inf) -> _Connection:
        if deadline == math.inf:
            deadline = min(self.until, time.monotonic() + self._seconds)
        if self._connection is not None and self._connection.is_closed():
            self._connection.close()
            self._connection = None
        if self._connection is None:
            self._connection = self._open(deadline)
        self._connection.deadline = deadline
        return self._connection

    def _open(self, deadline: float) -> _Connection:
        if not self._key:
            connection = self._dial(deadline)
            connection.greet()
            return connection
        if not self._run:
            self._find_closed_part(deadline)
        connection = self._dial(deadline)
        run = connection.prove(self._key)
        if run != (self._run or run):
            raise StoreLostError(
                f"the store at {self._host}:{self._port} is another one than before: the first "
                "ended, and what it held is lost"
            )
        self._run = run
        return connection

    def _find_closed_part(self, deadline: float) -> None:
        asked = self._dial(deadline)
        try:
            asked.greet()
            asked.send(bytes([_Request.CHECK]) + _LENGTH.pack(1) + _bytes(HAS_CLOSED_PART))
            if asked.receive(1)[0] != _READY:
                raise NoClosedPartError(
                    f"the store at {self._host}:{self._port} asks nobody for a group_key"
                )
        finally:
            asked.close()

    def _dial(self, deadline: float) -> _Connection:
        left = min(max(0.001, deadline - time.monotonic()), threading.TIMEOUT_MAX)
        place: Any = (plain_host(self._host), self._port)  # the stubs know of no bytes here
        connected = socket.create_connection(place, left)
        return _Connection(connected, f"{self._host}:{self._port}", deadline)


def _may_pass(error: OSError) -> bool:
    """True of a failure after which the store may answer soon, as when a cable is mended."""
    if isinstance(error, StoreLostError):
        return isinstance(error, _SilentError)
    return isinstance(error, TimeoutError) or error.errno in _NO_WAY


def _wait(connection: _Connection, seconds: float) -> bool:
    answer = connection.byte_within(seconds)
    if answer is not None:
        return answer == _WAIT_IS_OVER
    connection.send(bytes([_Request.CANCEL_WAIT]))
    came = False
    while (answer := connection.receive(1)[0]) != _WAIT_CANCELLED:
        came = came or answer == _WAIT_IS_OVER
    return came


def _bytes(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else bytes(value)
    return _LENGTH.pack(len(data)) + data


def connection_key(group_key: bytes) -> bytes:
    """The key that clients and hosts of a group's store prove to each other."""
    return hmac.digest(group_key, b"tensorwire store connection", hashlib.sha256)
