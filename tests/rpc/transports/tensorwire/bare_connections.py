"""Bare connections to a worker, as an outsider or a member of the group would make them."""

from __future__ import annotations

import os
import socket

from rpc.transports.tensorwire.address import TensorWireAddress
from rpc.transports.tensorwire.handshake import (
    ChannelKind,
    HandshakeError,
    Hello,
    Identity,
    Initiator,
    derive_key,
)
from tests.rpc.transports.conformance import SECONDS, Worker


def connect(worker: Worker, *, unix: bool = True) -> socket.socket:
    """A bare connection to a worker."""
    address = TensorWireAddress.decode(worker.address)
    if unix:
        sock = socket.socket(socket.AF_UNIX)
        sock.connect("\0" + address.unix_name)
    else:
        sock = socket.create_connection(address.tcp[0])
    sock.settimeout(SECONDS)
    return sock


def shake(
    sock: socket.socket,
    worker: Worker,
    initiator: Identity,
    *,
    kind: ChannelKind = ChannelKind.MAIN,
    key: bytes | None = None,
    token: bytes = b"t" * 16,
    attempt: int = 0,
) -> None:
    """A handshake as a member of the group would make it."""
    address = TensorWireAddress.decode(worker.address)
    acceptor = Identity(worker.info.id, worker.incarnation)
    hello = Hello(kind, initiator, acceptor, token, os.urandom(32), 0, attempt)
    side = Initiator(derive_key(b"", address.secret) if key is None else key, hello)
    sock.sendall(side.begin())
    while not side.accepted:
        data = sock.recv(side.wanted)
        if not data:
            raise HandshakeError("closed")
        answer = side.receive(data)
        if answer:
            sock.sendall(answer)
