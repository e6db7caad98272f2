"""Decides who may use the closed part of a store: whoever proves the group's key. Sans-IO.

A store that was given a key has two parts. The *open* part is for torch's own clients, which can
prove nothing, and holds nothing of ours. The *closed* part is the group's. A client of it shows
by its first byte what it is, and client and server prove to each other that they have the key:

    client → server   HELLO, 32 random bytes
    server → client   32 random bytes
    client → server   HMAC(key, "client" ‖ all of that)
    server → client   the store's run, HMAC(key, "server" ‖ all of that ‖ run)

The client goes first, so who has no key is told nothing that helps to guess it. The *run* is
random and made by each store, so a client knows one store from another that has its address.

``store_process`` uses this module, so it imports C modules only.
"""

from _operator import _compare_digest

HELLO = b"\xf5TWstore"
"""Begins the conversation with the closed part; no request of torch's protocol begins with its
first byte.
"""
NONCE_BYTES = 32
PROOF_BYTES = 32
RUN_BYTES = 16
LATEST_BYTES = 256
"""Bytes that are held at most of a client that has proven nothing."""
SECONDS_TO_PROVE = 5.0


class NotProvenError(Exception):
    """A client, or a server, does not have the key."""


def proof(key: bytes, role: bytes, said: bytes) -> bytes:
    """Proves that somebody who has the key heard and said this.

    Args:
        key: see :func:`rpc.group.tcp_store.connection_key`.
        role: ``b"client"`` or ``b"server"``: no proof serves in the other direction.
        said: what was sent before, from the client's first byte on.
    """
    from _hashlib import hmac_digest

    digest: bytes = hmac_digest(key, role + said, "sha256")
    return digest


class Gate:
    """The server's side of one connection, until the client has proven the key.

    Args:
        key: see :func:`proof`.
        run: the store's.
        nonce: fresh random bytes.

    Attributes:
        is_open: the client has proven it.
        left: what it sent after that.
    """

    __slots__ = ("_key", "_nonce", "_run", "_said", "is_open", "left")

    def __init__(self, key: bytes, run: bytes, nonce: bytes) -> None:
        self._key = key
        self._run = run
        self._nonce = nonce
        self._said = b""
        self.is_open = False
        self.left = b""

    def receive(self, data: bytes) -> bytes:
        """Takes what a client sent; returns what to send it.

        Raises:
            NotProvenError: the connection must be closed.
        """
        hello = len(HELLO) + NONCE_BYTES
        had, self._said = len(self._said), self._said + data
        if not HELLO.startswith(self._said[: len(HELLO)]) or len(self._said) > LATEST_BYTES:
            raise NotProvenError
        reply = self._nonce if had < hello <= len(self._said) else b""
        if len(self._said) < hello + PROOF_BYTES:
            return reply
        heard = self._said[:hello] + self._nonce
        digest = self._said[hello : hello + PROOF_BYTES]
        if not _compare_digest(digest, proof(self._key, b"client", heard)):
            raise NotProvenError
        self.is_open, self.left = True, self._said[hello + PROOF_BYTES :]
        heard += digest + self._run
        return reply + self._run + proof(self._key, b"server", heard)


class Knock:
    """The client's side.

    Args:
        key: see :func:`proof`.
        nonce: fresh random bytes.
    """

    def __init__(self, key: bytes, nonce: bytes) -> None:
        self._key = key
        self._said = HELLO + nonce

    def hello(self) -> bytes:
        """The first bytes to send; ``NONCE_BYTES`` come back."""
        return self._said

    def answer(self, nonce: bytes) -> bytes:
        """The bytes to send then; ``RUN_BYTES + PROOF_BYTES`` come back."""
        self._said += nonce
        mine = proof(self._key, b"client", self._said)
        self._said += mine
        return mine

    def check(self, told: bytes) -> bytes:
        """The store's run.

        Raises:
            NotProvenError: the server does not have the key.
        """
        run, digest = told[:RUN_BYTES], told[RUN_BYTES:]
        if not _compare_digest(digest, proof(self._key, b"server", self._said + run)):
            raise NotProvenError
        return run
