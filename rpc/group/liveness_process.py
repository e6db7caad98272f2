"""Answers for one worker that it runs: a small process beside the worker.

A thread of the worker could not answer while a handler holds the interpreter lock, and a
stranger could fill what a server inside the worker takes. This process answers datagrams that
were made with the group's key, keeps nothing about anybody else, and looks at the kernel's
state of the worker's process: it is silent while that is stopped, and ends when it ends.

The interpreter runs this file by its path, without ``site``, ``rpc`` or torch, and it imports
C modules only: so it starts in about 20 ms and takes 10 MB. ``probes`` imports the format of
the datagrams from here, starts the process and talks with it over a socket.
"""

import posix
import select
import sys
from _blake2 import blake2s
from _operator import _compare_digest
from _socket import AF_UNIX, MSG_DONTWAIT, SOCK_SEQPACKET, socket

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

COOKIE_BYTES = TOKEN_BYTES = 16
NONCE_BYTES = 8
KEY_BYTES = 32
MOST_NOTE_BYTES = 1000
MOST_BYTES = 2048
"""No datagram is longer."""

QUESTION, ANSWER, NOTE, RECEIPT = b"?", b"!", b"n", b"r"
RUNS, EXPELS = b"0", b"1"
"""The body of an answer: the worker runs; it runs, and declared the asker lost."""

_KIND_AT = COOKIE_BYTES
_SENDER_AT = _KIND_AT + 1
_NONCE_AT = _SENDER_AT + TOKEN_BYTES
_BODY_AT = _NONCE_AT + NONCE_BYTES
_CODE_BYTES = 16
_MOST_AT_ONCE = 64
_MOST_NOTES = 16
_STILL = b"TtZX"
"""States of a process that does not run: stopped, traced, ended."""


class Datagram:
    """One datagram that was made with the group's key.

    Args:
        kind: ``QUESTION``, ``ANSWER``, ``NOTE`` or ``RECEIPT``.
        sender: the token of the worker that sent it.
        nonce: a random value; the reply to a datagram has the same.
        body: of an answer ``RUNS`` or ``EXPELS``, of a note its text.
    """

    __slots__ = ("body", "kind", "nonce", "sender")

    def __init__(self, kind: bytes, sender: bytes, nonce: bytes, body: bytes) -> None:
        self.kind = kind
        self.sender = sender
        self.nonce = nonce
        self.body = body

    def sealed(self, key: bytes, to: bytes) -> bytes:
        """Encodes it for the worker whose token is ``to``."""
        head = cookie(key, to) + self.kind + self.sender + self.nonce + self.body
        return head + _code(key, to, head)


def opened(key: bytes, me: bytes, data: bytes) -> Datagram | None:
    """The datagram in ``data``; None unless it was made for ``me`` with the group's key."""
    head, code = data[:-_CODE_BYTES], data[-_CODE_BYTES:]
    if len(head) < _BODY_AT or not _compare_digest(code, _code(key, me, head)):
        return None
    sender, nonce = head[_SENDER_AT:_NONCE_AT], head[_NONCE_AT:_BODY_AT]
    return Datagram(head[_KIND_AT:_SENDER_AT], sender, nonce, head[_BODY_AT:])


def cookie(key: bytes, token: bytes) -> bytes:
    """The bytes that begin every datagram to a worker, so that the kernel can drop all others."""
    return blake2s(b"cookie" + token, key=key, digest_size=COOKIE_BYTES).digest()


def _code(key: bytes, to: bytes, head: bytes) -> bytes:
    return blake2s(to + head, key=key, digest_size=_CODE_BYTES).digest()


class Answering:
    """Decides what to reply to datagrams. No I/O.

    Args:
        key: for datagrams of the group.
        token: of the worker for which this answers.
        runs: says whether that worker runs; if not, questions get no answer.
    """

    def __init__(self, key: bytes, token: bytes, runs: "Callable[[], bool]") -> None:
        self._key = key
        self._token = token
        self._runs = runs
        self._expelled: set[bytes] = set()
        self._heard: list[bytes] = []

    def expel(self, token: bytes) -> None:
        """Notes that the worker declared the one with this token lost."""
        self._expelled.add(token)

    def reply(self, data: bytes) -> tuple[bytes, bytes]:
        """Returns the reply to a datagram, and the note in it; empty if there is none."""
        received = opened(self._key, self._token, data)
        if received is None or (received.kind == QUESTION and not self._runs()):
            return b"", b""
        if received.kind == QUESTION:
            told = EXPELS if received.sender in self._expelled else RUNS
            return self._to(received, ANSWER, told), b""
        if received.kind != NOTE:
            return b"", b""
        is_new = received.nonce not in self._heard
        self._heard = [*self._heard[-_MOST_NOTES:], received.nonce] if is_new else self._heard
        return self._to(received, RECEIPT, b""), received.body if is_new else b""

    def _to(self, received: Datagram, kind: bytes, body: bytes) -> bytes:
        return Datagram(kind, self._token, received.nonce, body).sealed(self._key, received.sender)


class _Worker:
    """The worker's process, as the kernel sees it."""

    def __init__(self, pid: int) -> None:
        self._stat = posix.open(f"/proc/{pid}/stat", posix.O_RDONLY)

    def runs(self) -> bool:
        """False while it is stopped, and when it has ended."""
        try:
            state = posix.pread(self._stat, 512, 0).rpartition(b") ")[2][:1]
        except OSError:
            return False
        return state not in _STILL


def _serve(answering: Answering, datagrams: socket, control: socket) -> None:
    """Replies to what has come."""
    for _ in range(_MOST_AT_ONCE):
        try:
            data, sender = datagrams.recvfrom(MOST_BYTES, MSG_DONTWAIT)
            reply, note = answering.reply(data)
            if note:
                control.send(note, MSG_DONTWAIT)
            if reply:
                datagrams.sendto(reply, MSG_DONTWAIT, sender)
        except OSError:  # there is no more, or no way to the sender
            return


def main(pid: int, datagrams: socket, control: socket, life: int) -> None:
    """Answers until the worker's process ends or closes ``control``.

    Args:
        pid: the worker's.
        datagrams: a bound UDP socket.
        control: leads to the worker: the key and the token come first, then the tokens of
            those that it declares lost. Notes go the other way.
        life: a descriptor that is readable when the worker's process has ended.
    """
    worker = _Worker(pid)
    first = control.recv(KEY_BYTES + TOKEN_BYTES)
    if len(first) < KEY_BYTES + TOKEN_BYTES:
        return
    answering = Answering(first[:KEY_BYTES], first[KEY_BYTES:], worker.runs)
    events = select.poll()
    for descriptor in (datagrams.fileno(), control.fileno(), life):
        events.register(descriptor, select.POLLIN)
    while True:
        ready = {descriptor for descriptor, _ in events.poll()}
        if life in ready:
            return
        if control.fileno() in ready:
            token = control.recv(TOKEN_BYTES)
            if not token:
                return
            answering.expel(token)
        if datagrams.fileno() in ready:
            _serve(answering, datagrams, control)


if __name__ == "__main__":
    _, _name, _pid, _datagrams, _control, _life = sys.argv
    main(
        int(_pid),
        socket(fileno=int(_datagrams)),
        socket(AF_UNIX, SOCK_SEQPACKET, 0, int(_control)),
        int(_life),
    )
