"""Lets workers give each other signs of life without help from the interpreter.

Of a worker on the same host the kernel says whether its process runs (``local_processes``).
Any other is asked by a datagram. Beside it runs a small process that answers for it
(``liveness_process``), also while a handler holds the interpreter lock, and falls silent when
the worker is stopped. The answer also says whether the worker declared the asker lost.
Besides, a *note* is sent to a worker that was declared lost. So one that was silent for a
while, and wakes, learns what became of it.

All datagrams are authenticated with the group's key and begin with a cookie that strangers
do not know; the kernel drops those that do not, before they take room in a buffer. Decides
nothing: ``liveness`` does, and ``watch`` carries it out.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import json
import os
import secrets
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Final, Protocol

from rpc.group import liveness_process
from rpc.group.answerer import Answerer
from rpc.group.datagram_sockets import connected_line, datagram_socket, family_of, is_open
from rpc.group.liveness_process import (
    ANSWER,
    EXPELS,
    MOST_BYTES,
    MOST_NOTE_BYTES,
    NONCE_BYTES,
    NOTE,
    QUESTION,
    RECEIPT,
    TOKEN_BYTES,
    Datagram,
)
from rpc.group.local_processes import LocalProcess, ProcessId
from rpc.ids import Life

_MOST_AT_ONCE: Final = 1000
_LOOKS_FOR_A_RECEIPT: Final = 50
_LOOPBACK: Final = "127.0.0.1"


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

    def expel(self, address: str, reason: str) -> None:
        """Leaves a note for a worker that was declared lost; raises as :meth:`ask` does."""

    def verdict(self) -> str | None:
        """The note that somebody left for this worker."""

    def close(self) -> None:
        """Stops giving signs of life."""


@dataclass(frozen=True, slots=True)
class _Address:
    """The address at which a worker is asked for signs of life, its token, and its process."""

    host: str
    port: int
    token: bytes
    process: ProcessId

    def encode(self) -> str:
        process = [self.process.place, self.process.number, self.process.started]
        return json.dumps([self.host, self.port, self.token.hex(), *process])

    @classmethod
    def decode(cls, text: str) -> _Address:
        host, port, token, place, number, started = json.loads(text)
        ip_address(host)  # a name would have to be looked up
        process = ProcessId(str(place), int(number), str(started))
        return cls(host, int(port), bytes.fromhex(token), process)


@dataclass(slots=True)
class _Peer:
    """Somebody who is asked."""

    address: _Address
    process: LocalProcess | None
    """The worker's process, if it can be watched from here, which spares the questions."""
    line: socket.socket | None
    """A socket connected to its port then: the kernel reports when that port is closed."""
    owed: bytes = b""
    """The nonce of the question that is not answered yet."""


@dataclass(slots=True)
class _Note:
    """A note until its receipt comes."""

    address: _Address
    datagram: Datagram
    looks: int = _LOOKS_FOR_A_RECEIPT


class DatagramProber:
    """Signs of life by datagrams; see the module's docstring.

    Args:
        host: this worker's address on the network of the group; default the loopback
            interface.
        group_key: the group's secret; empty if it has none.
        process: this worker's; default this one.
    """

    def __init__(
        self,
        host: str | None = None,
        group_key: bytes = b"",
        process: ProcessId | None = None,
    ) -> None:
        self._host = host or _LOOPBACK
        self._is_for_one_host = host is None
        self._process = process or ProcessId.of(os.getpid())
        self._key = hmac.digest(group_key, b"tensorwire liveness", "sha256")
        self._token = secrets.token_bytes(TOKEN_BYTES)
        self._cookie = liveness_process.cookie(self._key, self._token)
        self._answerer: Answerer | None = None
        self._asking: dict[int, socket.socket] = {}
        self._peers: dict[Life, _Peer] = {}
        self._owing: dict[bytes, Life] = {}
        self._seen_running: list[Answer] = []
        self._notes: dict[bytes, _Note] = {}

    def start(self, me: Life) -> str:
        """Binds a socket; a process that answers there starts when it is needed.

        Raises:
            OSError: there is no such address here.
        """
        answering = datagram_socket(self._host, self._cookie)
        self._answerer = Answerer(str(me), answering, self._key, self._token)
        port: int = answering.getsockname()[1]
        return _Address(self._host, port, self._token, self._process).encode()

    def ask(self, life: Life, address: str) -> None:
        """Looks at the peer's process, or sends a question; see :class:`Prober`.

        The question stays the same until it is answered.
        """
        peer = self._peers.get(life)
        if peer is None:
            peer = self._peers[life] = self._met(_Address.decode(address))
            self._serve()
        if peer.process is not None and peer.line is not None:
            if peer.process.runs() and is_open(peer.line):
                self._seen_running.append(Answer(life, expelled=False))
            return
        if not peer.owed:
            peer.owed = secrets.token_bytes(NONCE_BYTES)
            self._owing[peer.owed] = life
        self._send(Datagram(QUESTION, self._token, peer.owed, b" "), peer.address)

    def collect(self) -> list[Answer]:
        """Reads what came."""
        self._serve()
        answers, self._seen_running = self._seen_running, []
        for received in self._received():
            if received.kind == RECEIPT:
                self._notes.pop(received.nonce, None)
                continue
            life = self._owing.get(received.nonce)
            peer = None if life is None else self._peers.get(life)
            if received.kind != ANSWER or life is None or peer is None:
                continue
            if received.sender == peer.address.token:
                del self._owing[received.nonce]
                peer.owed = b""
                answers.append(Answer(life, received.body == EXPELS))
        self._send_notes()
        return answers

    def forget(self, life: Life) -> None:
        """Takes no answer from a peer any more."""
        peer = self._peers.pop(life, None)
        if peer is not None:
            self._owing.pop(peer.owed, None)
            if peer.process is not None:
                peer.process.close()
            if peer.line is not None:
                peer.line.close()

    def expel(self, address: str, reason: str) -> None:
        """Tells the process that answers here, and the worker itself, which reads it when it can.

        Raises:
            OSError: this worker lacks something for it, such as a file descriptor.
        """
        place = _Address.decode(address)
        if self._answerer is not None:
            self._answerer.expel(place.token)
        text = reason.encode()[:MOST_NOTE_BYTES]
        datagram = Datagram(NOTE, self._token, secrets.token_bytes(NONCE_BYTES), text)
        self._send(datagram, place)
        self._notes[datagram.nonce] = _Note(place, datagram)

    def verdict(self) -> str | None:
        """The latest note for this worker."""
        return None if self._answerer is None else self._answerer.note()

    def close(self) -> None:
        """Ends the process that answers, and closes the sockets."""
        for asking in self._asking.values():
            asking.close()
        self._asking.clear()
        for life in list(self._peers):
            self.forget(life)
        self._owing.clear()
        self._notes.clear()
        if self._answerer is not None:
            self._answerer.close()

    def _serve(self) -> None:
        """Lets the answerer serve, at once in a group on several hosts, where others ask."""
        if self._answerer is not None:
            in_a_group = bool(self._peers)
            self._answerer.serve(at_once=in_a_group and not self._is_for_one_host)

    def _met(self, address: _Address) -> _Peer:
        """A peer that is to be asked.

        Raises:
            OSError: this worker lacks something for it, such as a file descriptor.
        """
        process = address.process
        if not process.place or process.place != self._process.place:
            return _Peer(address, None, None)
        try:
            seen = LocalProcess(process)
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
                raise
            return _Peer(address, None, None)
        try:
            return _Peer(address, seen, connected_line(address.host, address.port))
        except BaseException:
            seen.close()
            raise

    def _send(self, datagram: Datagram, to: _Address) -> None:
        """Sends a datagram, which may get lost here as well as on its way."""
        family = family_of(to.host)
        asking = self._asking.get(family)
        if asking is None:
            host = self._host if family == family_of(self._host) else ""
            asking = self._asking[family] = datagram_socket(host, self._cookie, family)
        with contextlib.suppress(OSError):
            asking.sendto(datagram.sealed(self._key, to.token), (to.host, to.port))

    def _send_notes(self) -> None:
        for nonce, note in list(self._notes.items()):
            note.looks -= 1
            if note.looks <= 0:
                del self._notes[nonce]
            else:
                self._send(note.datagram, note.address)

    def _received(self) -> Iterator[Datagram]:
        for asking in self._asking.values():
            for _ in range(_MOST_AT_ONCE):
                try:
                    data = asking.recv(MOST_BYTES)
                except OSError:
                    break
                received = liveness_process.opened(self._key, self._token, data)
                if received is not None:
                    yield received
