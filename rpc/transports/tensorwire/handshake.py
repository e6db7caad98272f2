"""Authenticates both ends of a new connection. Sans-IO.

Four messages, each with a length that is known in advance::

    initiator                               acceptor
    HELLO  who I am, whom I want, nonce ──▶
                                        ◀── CHALLENGE  nonce, proof
    PROOF                               ──▶
                                        ◀── ACCEPT or REJECT with a reason

A connection that takes the place of a broken one says in its HELLO how many frames
have arrived at the initiator, and in its ACCEPT how many at the acceptor.

A proof is an HMAC-SHA256, under a key both hold, over both nonces and
identities and the role of the one who proves. Nothing but these messages is
read before the proof holds, and none is longer than :data:`MAX_MESSAGE_BYTES`.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import struct
from dataclasses import dataclass

from rpc.errors import FrameError

VERSION = 2
NONCE_BYTES = 32
TOKEN_BYTES = 16
MAX_MESSAGE_BYTES = 256

_MAGIC = b"TWhs"
_HEAD = struct.Struct("<4sBBH")
_HELLO = struct.Struct(f"<BqQqQ{TOKEN_BYTES}sIIQ{NONCE_BYTES}s")
_RECEIVED = struct.Struct("<Q")
_PROOF_BYTES = hashlib.sha256().digest_size


class HandshakeError(FrameError):
    """The other end is not who it should be, or does not speak our language."""


class RefusedError(HandshakeError):
    """The other end, which holds the group's key, does not want the connection."""


class ChannelKind(enum.IntEnum):
    """Purposes of a connection."""

    MAIN = 0
    """The first of a link."""
    BULK = 1
    """Another one of a link."""
    RESUME = 2
    """In place of one that broke."""
    RECONNECT_REQUEST = 3
    """For nothing: the sender asks for one in place of one that broke, and for a sign of life."""


class _Message(enum.IntEnum):
    HELLO = 1
    CHALLENGE = 2
    PROOF = 3
    ACCEPT = 4
    REJECT = 5


@dataclass(frozen=True, slots=True)
class Identity:
    """One life of one worker."""

    worker_id: int
    incarnation: int


@dataclass(frozen=True, slots=True)
class Hello:
    """The first message of an initiator, about itself and its intent.

    Args:
        kind: what the connection is for.
        initiator: who speaks.
        acceptor: whom it believes to speak to.
        token: names the link; all channels of a link carry the same.
        nonce: fresh random bytes.
        channel: which one of the link; 0 is its main channel.
        attempt: which connection of that channel, the first is 0; of a main channel, which link
            of its initiator's process: an acceptor takes no earlier one for a later.
        received: how many frames have arrived on that channel.
    """

    kind: ChannelKind
    initiator: Identity
    acceptor: Identity
    token: bytes
    nonce: bytes
    channel: int = 0
    attempt: int = 0
    received: int = 0

    def encode(self) -> bytes:
        """The body of the HELLO message."""
        first, second = self.initiator, self.acceptor
        return _HELLO.pack(
            self.kind,
            first.worker_id,
            first.incarnation,
            second.worker_id,
            second.incarnation,
            self.token,
            self.channel,
            self.attempt,
            self.received,
            self.nonce,
        )


def _decode_hello(body: bytes) -> Hello:
    if len(body) != _HELLO.size:
        raise HandshakeError(f"HELLO of {len(body)} bytes")
    kind, *ids, token, channel, attempt, received, nonce = _HELLO.unpack(body)
    if kind not in ChannelKind.__members__.values():
        raise HandshakeError(f"unknown kind of channel {kind}")
    initiator, acceptor = Identity(*ids[:2]), Identity(*ids[2:])
    return Hello(ChannelKind(kind), initiator, acceptor, token, nonce, channel, attempt, received)


def derive_key(group_key: bytes, listener_secret: bytes) -> bytes:
    """The key for connections to one listener.

    Args:
        group_key: shared by the group, out of band; may be empty.
        listener_secret: random, published with the listener's address, so that
            only who can read the group's store can connect.
    """
    return hmac.new(group_key, b"tensorwire listener" + listener_secret, hashlib.sha256).digest()


def _proof(key: bytes, role: bytes, hello: bytes, nonce: bytes) -> bytes:
    return hmac.new(key, role + hello + nonce, hashlib.sha256).digest()


def _pack(message: _Message, body: bytes) -> bytes:
    return _HEAD.pack(_MAGIC, VERSION, message, len(body)) + body


class _Conversation:
    """Collects one message at a time, never more bytes than it may have."""

    def __init__(self) -> None:
        self._received = bytearray()

    @property
    def wanted(self) -> int:
        """The number of bytes still to read; the owner must not read more."""
        if len(self._received) < _HEAD.size:
            return _HEAD.size - len(self._received)
        length = int(_HEAD.unpack_from(self._received)[3])
        return _HEAD.size + length - len(self._received)

    def _collect(self, data: bytes) -> tuple[_Message, bytes] | None:
        self._received += data
        if len(self._received) < _HEAD.size:
            return None
        magic, version, message, length = _HEAD.unpack_from(self._received)
        if magic != _MAGIC:
            raise HandshakeError("the other end does not speak TensorWire")
        if version != VERSION:
            raise HandshakeError(f"handshake of version {version}; this worker speaks {VERSION}")
        if length > MAX_MESSAGE_BYTES or message not in _Message.__members__.values():
            raise HandshakeError(f"handshake message {message} of {length} bytes")
        if len(self._received) > _HEAD.size + length:
            raise HandshakeError("more bytes than the handshake asked for")
        if self.wanted:
            return None
        body = bytes(self._received[_HEAD.size :])
        self._received.clear()
        return _Message(message), body


class Initiator(_Conversation):
    """The side that connected.

    Args:
        key: from :func:`derive_key`.
        hello: what to say; its nonce must be fresh.

    Attributes:
        accepted: the connection may be used.
        received: how many frames have arrived at the acceptor.
    """

    def __init__(self, key: bytes, hello: Hello) -> None:
        super().__init__()
        self._key = key
        self._hello = hello.encode()
        self.accepted = False
        self.received = 0

    def begin(self) -> bytes:
        """The first bytes to send."""
        return _pack(_Message.HELLO, self._hello)

    def receive(self, data: bytes) -> bytes:
        """Takes bytes from the acceptor; returns bytes to send, often none.

        Raises:
            HandshakeError: the acceptor is not who it should be, or refuses.
        """
        collected = self._collect(data)
        if collected is None:
            return b""
        message, body = collected
        if message is _Message.CHALLENGE:
            return self._answer(body)
        if message is _Message.REJECT:
            why = f"refused: {body.decode(errors='replace')}"
            raise HandshakeError(why) if self._proof_due else RefusedError(why)
        if message is not _Message.ACCEPT or self._proof_due:
            raise HandshakeError(f"unexpected {message.name} in a handshake")
        if len(body) != _RECEIVED.size:
            raise HandshakeError(f"ACCEPT of {len(body)} bytes")
        (self.received,) = _RECEIVED.unpack(body)
        self.accepted = True
        return b""

    _proof_due = True

    def _answer(self, body: bytes) -> bytes:
        if len(body) != NONCE_BYTES + _PROOF_BYTES or not self._proof_due:
            raise HandshakeError(f"unexpected CHALLENGE of {len(body)} bytes")
        nonce, proof = body[:NONCE_BYTES], body[NONCE_BYTES:]
        if not hmac.compare_digest(proof, _proof(self._key, b"acceptor", self._hello, nonce)):
            raise HandshakeError("the acceptor does not hold the group's key")
        self._proof_due = False
        return _pack(_Message.PROOF, _proof(self._key, b"initiator", self._hello, nonce))


class Acceptor(_Conversation):
    """The side that was connected to.

    Once :attr:`authenticated` is set, the owner decides: :meth:`accept` or :meth:`reject`.

    Args:
        key: from :func:`derive_key`.
        identity: this worker.
        nonce: fresh random bytes.
    """

    def __init__(self, key: bytes, identity: Identity, nonce: bytes) -> None:
        super().__init__()
        self._key = key
        self._identity = identity
        self._nonce = nonce
        self._hello: Hello | None = None
        self.authenticated: Hello | None = None

    def receive(self, data: bytes) -> bytes:
        """Takes bytes from the initiator; returns bytes to send, often none.

        Raises:
            HandshakeError: the initiator is refused; :meth:`reject` tells it why.
        """
        collected = self._collect(data)
        if collected is None:
            return b""
        message, body = collected
        if message is _Message.HELLO and self._hello is None:
            return self._challenge(_decode_hello(body))
        if message is not _Message.PROOF or self._hello is None or self.authenticated is not None:
            raise HandshakeError(f"unexpected {message.name} in a handshake")
        expected = _proof(self._key, b"initiator", self._hello.encode(), self._nonce)
        if not hmac.compare_digest(body, expected):
            raise HandshakeError("the initiator does not hold the group's key")
        self.authenticated = self._hello
        return b""

    def _challenge(self, hello: Hello) -> bytes:
        if hello.acceptor != self._identity:  # which one this is, only members are to know
            raise HandshakeError("this is not the worker that the initiator looks for")
        self._hello = hello
        proof = _proof(self._key, b"acceptor", hello.encode(), self._nonce)
        return _pack(_Message.CHALLENGE, self._nonce + proof)

    @staticmethod
    def accept(received: int = 0) -> bytes:
        """Returns what to send before the first frame.

        Args:
            received: how many frames have arrived on earlier connections of the channel.
        """
        return _pack(_Message.ACCEPT, _RECEIVED.pack(received))

    @staticmethod
    def reject(reason: str) -> bytes:
        """Returns what to send before closing."""
        return _pack(_Message.REJECT, reason.encode()[:MAX_MESSAGE_BYTES])
