"""Decides who may read versions: reader and publisher prove the reader key to each other. Sans-IO.

Four messages, each of a length that is known in advance::

    reader → publisher   MAGIC, 32 random bytes
    publisher → reader   MAGIC, 32 random bytes
    reader → publisher   HMAC(key, "reader" ‖ all of that)
    publisher → reader   1, HMAC(key, "publisher" ‖ all of that); or 0 and zeros: refused

The reader goes first, so that who has no key is told nothing that helps to guess it. A proof
serves neither on another connection nor in the other direction.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Final

MAGIC: Final = b"\xf5TWread\x01"
"""The protocol, and in its last byte the protocol's version."""
NONCE_BYTES: Final = 32
HELLO_BYTES: Final = len(MAGIC) + NONCE_BYTES
PROOF_BYTES: Final = 32
VERDICT_BYTES: Final = 1 + PROOF_BYTES
REFUSED: Final = bytes(VERDICT_BYTES)
_TAKEN: Final = b"\x01"


class HandshakeError(Exception):
    """The other end does not speak this protocol; says what it does instead."""


class NotProvenError(HandshakeError):
    """One of the ends does not have the key of the other; says which one said so."""


def _proof(key: bytes, role: bytes, said: bytes) -> bytes:
    return hmac.digest(key, role + said, hashlib.sha256)


def _require_hello(hello: bytes, who: str) -> None:
    if len(hello) != HELLO_BYTES or hello[: len(MAGIC) - 1] != MAGIC[:-1]:
        raise HandshakeError(f"{who} does not speak the protocol of published versions")
    if hello[len(MAGIC) - 1] != MAGIC[-1]:
        raise HandshakeError(
            f"{who} speaks version {hello[len(MAGIC) - 1]} of the protocol, not {MAGIC[-1]}"
        )


class PublisherSide:
    """The publisher's side of one connection.

    Args:
        key: the reader key.
        nonce: fresh random bytes.
    """

    def __init__(self, key: bytes, nonce: bytes) -> None:
        self._key = key
        self._hello = MAGIC + nonce
        self._said = b""

    def answer(self, hello: bytes) -> bytes:
        """Takes the first ``HELLO_BYTES`` of a reader; returns as many to send.

        Raises:
            HandshakeError: it is no reader; close the connection.
        """
        _require_hello(hello, "who connects")
        self._said = hello + self._hello
        return self._hello

    def verdict(self, proof: bytes) -> bytes:
        """Takes ``PROOF_BYTES``; returns ``VERDICT_BYTES`` to send before the first reply.

        Raises:
            NotProvenError: the reader does not have the key: send ``REFUSED``, and close.
        """
        if not hmac.compare_digest(proof, _proof(self._key, b"reader", self._said)):
            raise NotProvenError("the reader does not have the key")
        return _TAKEN + _proof(self._key, b"publisher", self._said + proof)


class ReaderSide:
    """The reader's side of one connection.

    Args:
        key: the reader key.
        nonce: fresh random bytes.
    """

    def __init__(self, key: bytes, nonce: bytes) -> None:
        self._key = key
        self._said = MAGIC + nonce

    def hello(self) -> bytes:
        """The first bytes to send; ``HELLO_BYTES`` come back."""
        return self._said

    def prove(self, hello: bytes) -> bytes:
        """Takes the publisher's first bytes; returns bytes to send. ``VERDICT_BYTES`` come back.

        Raises:
            HandshakeError: it is no publisher.
        """
        _require_hello(hello, "who answers")
        self._said += hello
        proof = _proof(self._key, b"reader", self._said)
        self._said += proof
        return proof

    def check(self, verdict: bytes) -> None:
        """Takes the publisher's verdict.

        Raises:
            NotProvenError: it refuses the key, or does not have it.
        """
        if hmac.compare_digest(verdict, REFUSED):
            raise NotProvenError("the publisher refuses the key")
        if not hmac.compare_digest(verdict, _TAKEN + _proof(self._key, b"publisher", self._said)):
            raise NotProvenError("who answers does not have the key")
