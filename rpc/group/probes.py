"""How workers give each other signs of life without help from the interpreter.

Every worker runs a c10d ``TCPStore`` server, whose C++ thread answers even while a
handler holds the interpreter lock, and falls silent when the process is stopped.
To ask for a sign of life is to ask a peer's server whether it holds a *note* that
the asker was declared lost, so that a worker which was silent for a while, and
wakes, learns what became of it. The note also lies in its own server.

Keys contain a worker's random token, which only those know who can read the
group's store. Decides nothing: ``liveness`` does, and ``watch`` carries it out.
"""

from __future__ import annotations

import json
import logging
import secrets
import socket
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Final, Protocol, TypeVar

import torch
from torch._C._distributed_c10d import TCPStore

from rpc.ids import Life
from rpc.runtime.store_visits import ProcessEndsError, visit

T = TypeVar("T")

_log = logging.getLogger("rpc")

_BACKLOG = 1024
_OWN_SERVER_SECONDS = 10.0
_RECEIVE_BYTES = 256
_LOOKS_WHILE_PARTING = 50
_LOOPBACK = "127.0.0.1"

# The store's protocol, as torch's own clients speak it: little endian, keys begin with a slash.
_HELLO: Final = struct.pack("<BI", 0, 0x3C85F7CE)
_SET: Final = 1
_CHECK: Final = 5
_HELD: Final = 0
_LENGTH: Final = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class Answer:
    """A sign of life.

    Args:
        life: whose.
        expelled: it says that it declared this worker lost.
    """

    life: Life
    expelled: bool


class Prober(Protocol):
    """Asks for signs of life. One thread at a time calls all but :meth:`verdict`."""

    def start(self, me: Life) -> str:
        """Begins to give signs of life; returns what the others need in order to ask."""

    def ask(self, life: Life, address: str) -> None:
        """Asks a peer, unless it still owes an answer; does not wait.

        Raises:
            OSError: this worker lacks something for it, such as a file descriptor.
        """

    def collect(self) -> list[Answer]:
        """The answers that came since the last time."""

    def forget(self, life: Life) -> None:
        """A peer will not be asked for a while."""

    def condemn(self, address: str, reason: str) -> None:
        """Leaves a note for a worker that was declared lost; raises as :meth:`ask` does."""

    def verdict(self) -> str | None:
        """The note that somebody left for this worker."""

    def close(self) -> None:
        """Stops giving signs of life."""


@dataclass(frozen=True, slots=True)
class _Address:
    """Where a worker's server listens, and its token."""

    host: str
    port: int
    token: str

    def encode(self) -> str:
        return json.dumps([self.host, self.port, self.token])

    @classmethod
    def decode(cls, text: str) -> _Address:
        host, port, token = json.loads(text)
        return cls(str(host), int(port), str(token))


class StoreProber:
    """Signs of life through c10d stores; see the module's docstring.

    Args:
        host: this worker's address on the network of the group; default the loopback
            interface.
    """

    def __init__(self, host: str | None = None) -> None:
        self._host = host or _LOOPBACK
        self._server: TCPStore | None = None
        self._client: TCPStore | None = None
        self._token = secrets.token_hex(16)
        self._lines: dict[Life, _Line] = {}
        self._parting: list[_Line] = []

    def start(self, me: Life) -> str:
        """Starts the server; see :class:`Prober`.

        Raises:
            OSError: there is no such address here.
            RuntimeError: torch cannot start its server.
        """
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as listener:
            listener.bind((self._host, 0))
            listener.listen(_BACKLOG)
            port: int = listener.getsockname()[1]
            self._server = _serve(self._host, port, listener.detach())
        self._client = self._server
        self._client.set(_life_key(self._token), "")
        return _Address(self._host, port, self._token).encode()

    def ask(self, life: Life, address: str) -> None:
        """Sends a question; the answer comes with a later :meth:`collect`."""
        line = self._lines.get(life)
        if line is None:
            line = self._lines[life] = _Line(_Address.decode(address))
        if not line.owes:
            line.say(_check(_note_key(self._token)))
            line.owes += 1
        line.flush()

    def collect(self) -> list[Answer]:
        """Reads what came."""
        self._parting = [line for line in self._parting if not line.parted()]
        answers: list[Answer] = []
        for life, line in list(self._lines.items()):
            for held in line.answers():
                answers.append(Answer(life, held))
            if line.broken:
                self.forget(life)
        return answers

    def forget(self, life: Life) -> None:
        """Hangs up."""
        line = self._lines.pop(life, None)
        if line is not None:
            line.close()

    def condemn(self, address: str, reason: str) -> None:
        """Leaves a note here and at the worker itself, which reads it when it can."""
        place = _Address.decode(address)
        self._ask_own(lambda store: store.set(f"expelled/{place.token}", reason))
        known = [life for life, line in self._lines.items() if line.address == place]
        line = self._lines.pop(known[0]) if known else _Line(place)
        line.say(_set(_note_key(place.token), reason))
        line.flush()
        self._parting.append(line)

    def verdict(self) -> str | None:
        """Looks into this worker's own server."""
        key = f"expelled/{self._token}"
        return self._ask_own(lambda s: s.get(key).decode() if s.check([key]) else None)

    def close(self) -> None:
        """Hangs up everywhere and stops the server."""
        for line in [*self._lines.values(), *self._parting]:
            line.close()
        self._lines.clear()
        self._parting.clear()
        self._server = self._client = None

    def _ask_own(self, ask: Callable[[TCPStore], T]) -> T | None:
        """Asks this worker's own server, which must be connected to anew if that broke."""
        server, client = self._server, self._client
        if server is None or client is None:
            return None
        try:
            with visit():
                return self._ask_either(ask, server, client)
        except ProcessEndsError:
            return None

    def _ask_either(
        self, ask: Callable[[TCPStore], T], server: TCPStore, client: TCPStore
    ) -> T | None:
        try:
            return ask(client)
        except RuntimeError:
            wait = timedelta(seconds=_OWN_SERVER_SECONDS)
        try:
            self._client = TCPStore(self._host, server.port, None, False, wait)
            return ask(self._client)
        except RuntimeError as error:
            _log.error("this worker cannot reach its own server for signs of life: %s", error)
            return None


def _serve(host: str, port: int, descriptor: int) -> TCPStore:
    return TCPStore(
        host,
        port,
        None,
        True,
        timedelta(seconds=_OWN_SERVER_SECONDS),
        wait_for_workers=False,
        master_listen_fd=descriptor,
        use_libuv=torch.__version__ >= "2.8",  # before, that server takes no descriptor
    )


@dataclass(slots=True)
class _Line:
    """A connection to a peer's server. Never waits."""

    address: _Address
    owes: int = 1
    patience: int = _LOOKS_WHILE_PARTING
    broken: bool = False
    _known: bool = False
    _unsent: bytes = b""
    _socket: socket.socket = field(init=False)

    def __post_init__(self) -> None:
        family = socket.AF_INET6 if ":" in self.address.host else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        self._socket.setblocking(False)
        self._socket.connect_ex((self.address.host, self.address.port))
        self.say(_HELLO + _check(_life_key(self.address.token, raw=True)))

    def say(self, message: bytes) -> None:
        self._unsent += message

    def flush(self) -> None:
        """Sends what it can; connecting counts as not yet."""
        try:
            while self._unsent:
                self._unsent = self._unsent[self._socket.send(self._unsent) :]
        except BlockingIOError:
            return
        except OSError:
            self.broken = True

    def answers(self) -> Iterator[bool]:
        """Whether the peer holds what it was asked for, for each answer that came."""
        self.flush()
        try:
            received = self._socket.recv(_RECEIVE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            received = b""
        self.broken = self.broken or not received
        for answer in received:
            self.owes -= 1
            if self._known:
                yield answer == _HELD
            elif answer == _HELD:
                self._known = True
                yield False
            else:  # another process listens there now
                self.broken = True
                return

    def parted(self) -> bool:
        """Hangs up once everything is said, which the kernel then delivers; True if it did."""
        self.flush()
        self.patience -= 1
        if self._unsent and not self.broken and self.patience:
            return False
        self.close()
        return True

    def close(self) -> None:
        self._socket.close()


def _life_key(token: str, *, raw: bool = False) -> str:
    return f"{'/' if raw else ''}life/{token}"


def _note_key(token: str) -> str:
    return f"/expelled/{token}"


def _text(value: str) -> bytes:
    encoded = value.encode()
    return _LENGTH.pack(len(encoded)) + encoded


def _check(key: str) -> bytes:
    return struct.pack("<BQ", _CHECK, 1) + _text(key)


def _set(key: str, value: str) -> bytes:
    return struct.pack("<B", _SET) + _text(key) + _text(value)
