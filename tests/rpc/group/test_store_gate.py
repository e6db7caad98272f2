"""The proof by which a client and a store know each other, and the sockets behind it."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import struct
import threading
import time
from contextlib import ExitStack

import pytest

from rpc.group import store_gate
from rpc.group.store_gate import (
    HELLO,
    LATEST_BYTES,
    NONCE_BYTES,
    PROOF_BYTES,
    RUN_BYTES,
    Gate,
    Knock,
    NotProvenError,
)
from rpc.group.store_host import StoreServer, host_store
from rpc.group.tcp_store import AnotherKeyError, TcpStoreClient
from tests.rpc.stores import SOON
from tests.waiting import until

KEY, RUN, NONCE = b"k" * 32, b"r" * RUN_BYTES, b"n" * NONCE_BYTES
GROUP_KEY = b"the key of a group, long enough"


def knock(key: bytes = KEY) -> Knock:
    return Knock(key, b"c" * NONCE_BYTES)


def test_both_prove_the_key_and_the_client_learns_which_store_it_is() -> None:
    gate, side = Gate(KEY, RUN, NONCE), knock()
    told = gate.receive(side.answer(gate.receive(side.hello())) + b"a request")
    assert (gate.is_open, gate.left) == (True, b"a request")
    assert side.check(told) == RUN


def test_it_may_come_byte_by_byte_or_at_once() -> None:
    side = knock()
    said = side.hello() + side.answer(NONCE)
    for size in (1, 7, len(said)):
        gate, replies = Gate(KEY, RUN, NONCE), b""
        for start in range(0, len(said), size):
            replies += gate.receive(said[start : start + size])
        assert gate.is_open
        assert replies[:NONCE_BYTES] == NONCE
        assert len(replies) == NONCE_BYTES + RUN_BYTES + PROOF_BYTES


def test_who_has_another_key_is_refused_and_gets_no_proof_of_ours() -> None:
    gate, side = Gate(KEY, RUN, NONCE), knock(b"x" * 32)
    answer = side.answer(gate.receive(side.hello()))
    with pytest.raises(NotProvenError):
        gate.receive(answer)
    assert not gate.is_open


def test_a_proof_serves_for_one_connection_and_one_direction_only() -> None:
    side = knock()
    proof = side.answer(NONCE)
    other = Gate(KEY, RUN, b"m" * NONCE_BYTES)
    other.receive(knock().hello())
    with pytest.raises(NotProvenError):
        other.receive(proof)
    with pytest.raises(NotProvenError):
        side.check(RUN + proof)
    with pytest.raises(NotProvenError):
        side.check(RUN + store_gate.proof(KEY, b"server", b"something else"))


@pytest.mark.parametrize("seed", range(50))
def test_junk_is_refused_at_the_latest_when_it_is_longer_than_a_proof(seed: int) -> None:
    draw = random.Random(seed)
    gate, sent = Gate(KEY, RUN, NONCE), 0
    keep = draw.randrange(len(HELLO) + 1)
    junk = HELLO[:keep] + draw.randbytes(2 * LATEST_BYTES)
    with contextlib.suppress(NotProvenError):
        while sent < len(junk):
            size = draw.randrange(1, 40)
            gate.receive(junk[sent : sent + size])
            sent += size
    assert not gate.is_open
    assert sent <= LATEST_BYTES


# --- Behind real sockets


def hosted() -> StoreServer:
    return host_store("127.0.0.1", 0, GROUP_KEY)


def stranger(host: StoreServer) -> socket.socket:
    made = socket.create_connection(("127.0.0.1", host.port), SOON)
    made.settimeout(SOON)
    return made


def is_closed(connection: socket.socket) -> bool:
    try:
        return connection.recv(4096) == b""
    except ConnectionResetError:
        return True


def ask(kind: int, *parts: bytes) -> bytes:
    return bytes([kind]) + b"".join(struct.pack("<Q", len(part)) + part for part in parts)


def test_who_has_the_key_keeps_values_where_who_has_not_sees_nothing() -> None:
    host = hosted()
    mine = host.client(SOON)
    mine.set("plan", "mine")
    assert host.client(SOON).get("plan") == b"mine"
    open_part = host.tcp_store()
    assert not open_part.check(["plan"])
    open_part.set("plan", "a stranger's")
    open_part.delete_key("plan")
    assert mine.get("plan") == b"mine"


def test_no_request_before_the_proof_is_heeded() -> None:
    host = hosted()
    mine = host.client(SOON)
    mine.set("plan", "mine")
    hello = struct.pack("<BI", 0, 0x3C85F7CE)
    for junk in (
        HELLO + os.urandom(NONCE_BYTES + PROOF_BYTES) + hello + ask(1, b"/plan", b"forged"),
        HELLO[:3] + ask(1, b"/plan", b"forged"),
        HELLO + os.urandom(1000),
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff" * 4096,
    ):
        with stranger(host) as connection:
            connection.sendall(junk)
            while not is_closed(connection):
                pass
    assert mine.get("plan") == b"mine"


def test_a_recorded_handshake_opens_nothing() -> None:
    host = hosted()
    side = Knock(b"some key", os.urandom(NONCE_BYTES))
    with stranger(host) as connection:
        connection.sendall(side.hello())
        nonce = connection.recv(NONCE_BYTES)
        recorded = side.hello() + side.answer(nonce)
    with stranger(host) as connection:
        connection.sendall(recorded)
        assert connection.recv(NONCE_BYTES) != nonce
        assert is_closed(connection)


@pytest.mark.slow
def test_who_shows_nothing_is_closed_after_five_seconds() -> None:
    host = hosted()
    with ExitStack() as held:
        connections = [held.enter_context(stranger(host)) for _ in range(20)]
        for connection in connections[::2]:
            connection.sendall(HELLO[:2])
        began = time.monotonic()
        for connection in connections:
            connection.settimeout(60)
            assert is_closed(connection)
        assert time.monotonic() - began > store_gate.SECONDS_TO_PROVE - 1


def test_members_keep_their_connections_however_many_strangers_come() -> None:
    host = hosted()
    mine = host.client(SOON)
    mine.set("key", "value")
    run = mine.run
    with ExitStack() as held:
        for _ in range(300):
            held.enter_context(stranger(host))
        assert mine.get("key") == b"value"
        assert host.client(SOON).get("key") == b"value"
    assert mine.run == run


def test_a_client_with_another_key_is_told_so() -> None:
    host = hosted()
    client = TcpStoreClient("127.0.0.1", host.port, SOON, b"another key, which is no use")
    with pytest.raises(AnotherKeyError, match="the workers disagree about group_key"):
        client.get("key")


def test_a_host_that_only_pretends_to_have_the_key_is_not_believed() -> None:
    """It answers as the open part does, and then sends bytes of the right length."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = TcpStoreClient("127.0.0.1", listener.getsockname()[1], SOON, GROUP_KEY)

        def pretend() -> None:
            first, _ = listener.accept()
            with first:
                first.recv(4096)
                first.sendall(b"\0")
            second, _ = listener.accept()
            with second:
                second.recv(4096)
                second.sendall(os.urandom(NONCE_BYTES))
                second.recv(4096)
                second.sendall(os.urandom(RUN_BYTES + PROOF_BYTES))

        pretender = threading.Thread(target=pretend)
        pretender.start()
        with pytest.raises(AnotherKeyError):
            client.connect()
        pretender.join()


def test_another_store_at_the_same_address_is_not_taken_for_the_first() -> None:
    first = host_store("127.0.0.1", 0, GROUP_KEY)
    client = TcpStoreClient("127.0.0.1", first.port, SOON, GROUP_KEY)
    client.set("key", "value")
    port = first.port
    del first
    again: list[StoreServer] = []

    def is_free() -> bool:
        try:
            again.append(host_store("127.0.0.1", port, GROUP_KEY))
        except OSError:
            return False
        return True

    until(is_free, SOON * 6, 0.05)
    with pytest.raises(ConnectionError, match="is another one than before"):
        client.get("key")
