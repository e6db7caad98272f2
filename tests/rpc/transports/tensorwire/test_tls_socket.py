"""A socket with TLS behaves as the readers and writers of the transport expect of a socket."""

from __future__ import annotations

import os
import random
import select
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme

from rpc.transports.tensorwire.tls import Certificates
from rpc.transports.tensorwire.tls_socket import TlsSocket, certified_names, take_the_place
from tests.rpc.transports.tensorwire.certificates import for_everybody, write
from tests.waiting import until

Pair = tuple[TlsSocket, TlsSocket]


def connected() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
    return near, far


def shake(connecting: Certificates, accepting: Certificates) -> Pair:
    near, far = connected()
    near.setblocking(False)
    ends = (
        TlsSocket(near.family, near.type, near.proto, near.detach()),
        TlsSocket.over(far, accepting.accepting()),
    )
    ends[0].setblocking(False)
    ends[0].start(connecting.connecting())
    until(lambda: sum(end.shake_hands() for end in ends) == 2)
    return ends


@pytest.fixture(scope="module")
def certificates() -> Certificates:
    """With which any worker may be anybody."""
    return Certificates(for_everybody(), "w0")


@pytest.fixture
def pair(certificates: Certificates) -> Iterator[Pair]:
    """Two ends of a connection, hands shaken."""
    ends = shake(certificates, certificates)
    yield ends
    for end in ends:
        end.close()


def is_readable(sock: socket.socket) -> bool:
    return bool(select.select([sock], [], [], 0)[0])


def received(sock: TlsSocket, size: int) -> bytes:
    found = bytearray()

    def take() -> bool:
        try:
            found.extend(sock.recv(size - len(found)))
        except BlockingIOError:
            return False
        return len(found) == size

    until(take)
    return bytes(found)


def test_bytes_travel_and_names_are_known(pair: Pair) -> None:
    near, far = pair
    assert near.send(b"hello") == 5
    assert received(far, 5) == b"hello"
    assert (certified_names(near), certified_names(far)) == (("*",), ("*",))


def test_what_is_sent_is_encrypted(pair: Pair) -> None:
    near, far = pair
    near.send(b"a secret " * 100)
    until(lambda: is_readable(far))
    assert b"secret" not in socket.socket.recv(far, 65536, socket.MSG_PEEK)


@pytest.mark.parametrize("seed", range(3))
def test_a_stream_arrives_whole_however_it_is_cut(pair: Pair, seed: int) -> None:
    """One end sends pieces of any size, several at once, and offers again what was not taken."""
    draw = random.Random(seed)
    near, far = pair
    near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 14)
    pieces = [draw.randbytes(draw.choice((1, 40, 5000, 70_000, 400_000))) for _ in range(15)]
    expected = b"".join(pieces)
    found = bytearray()
    refusals = 0

    def read() -> None:
        size = draw.choice((1, 1000, 65536, 400_000))
        try:
            if draw.random() < 0.5:
                found.extend(far.recv(size))
            else:
                room = bytearray(size)
                found.extend(room[: far.recv_into(memoryview(room))])
        except BlockingIOError:
            pass

    left = [memoryview(piece) for piece in pieces]
    while left:
        try:
            sent = near.sendmsg(left[:5])
        except BlockingIOError:
            refusals += 1
            read()
            continue
        while sent:
            taken = min(sent, len(left[0]))
            left[0], sent = left[0][taken:], sent - taken
            if not left[0]:
                left.pop(0)
    until(lambda: read() or len(found) == len(expected))
    assert bytes(found) == expected
    assert refusals > 1


@pytest.mark.parametrize("size", [100, 5000, 16001])
def test_it_is_readable_until_everything_was_handed_out(pair: Pair, size: int) -> None:
    near, far = pair
    near.send(os.urandom(16001))
    left = 16001
    while left:
        assert len(received(far, min(size, left))) == min(size, left)
        left -= min(size, left)
        assert not left or is_readable(far)
    with pytest.raises(BlockingIOError):
        far.recv(size)
    assert not is_readable(far)


def test_what_comes_with_the_last_of_the_handshake_makes_it_readable(
    certificates: Certificates,
) -> None:
    plain, far_plain = connected()
    near = TlsSocket(plain.family, plain.type, plain.proto, plain.detach())
    near.setblocking(False)
    near.start(certificates.connecting())
    far = TlsSocket.over(far_plain, certificates.accepting())
    until(lambda: (far.shake_hands(), near.shake_hands())[1])
    near.send(b"at once")
    assert received(far, 3) == b"at "
    with select.epoll() as epoll:
        epoll.register(far, select.EPOLLIN | select.EPOLLET)
        assert epoll.poll(1.0), "registered late, and still told"
    assert received(far, 4) == b"once"
    near.close()
    far.close()


def test_one_thread_reads_while_another_sends(pair: Pair) -> None:
    near, far = pair
    block, rounds = os.urandom(50_000), 60

    def send(sock: TlsSocket) -> None:
        left = memoryview(block * rounds)
        while left:
            select.select([], [sock], [], 5)
            try:
                left = left[sock.sendmsg([left]) :]
            except BlockingIOError:
                continue

    threads = [threading.Thread(target=send, args=(end,)) for end in pair]
    for thread in threads:
        thread.start()
    halves = {near: bytearray(), far: bytearray()}

    def read_both() -> bool:
        for end, found in halves.items():
            try:
                found.extend(end.recv(1 << 20))
            except BlockingIOError:
                continue
        return all(len(found) == len(block) * rounds for found in halves.values())

    until(read_both)
    for thread in threads:
        thread.join()
    assert all(bytes(found) == block * rounds for found in halves.values())


def test_the_end_is_an_end_like_any_other(pair: Pair) -> None:
    near, far = pair
    near.send(b"last words")
    near.close()
    assert received(far, 10) == b"last words"
    until(lambda: is_readable(far))
    assert (far.recv(100), far.recv(100), far.recv_into(memoryview(bytearray(3)))) == (b"", b"", 0)


def test_bytes_that_were_changed_on_the_way_end_the_connection(certificates: Certificates) -> None:
    near, far = shake(certificates, certificates)
    raw = socket.socket(near.family, near.type, near.proto, os.dup(near.fileno()))
    raw.send(b"\x17\x03\x03\x00\x20" + bytes(32))
    until(lambda: is_readable(far))
    with pytest.raises(ssl.SSLError):
        far.recv(100)
    for end in (near, far, raw):
        end.close()


def test_a_newer_connection_takes_the_place_with_all_that_arrived(
    pair: Pair, certificates: Certificates
) -> None:
    near, far = pair
    newer_near, newer_far = shake(certificates, certificates)
    newer_near.send(b"from the newer one")
    assert received(newer_far, 4) == b"from"
    take_the_place(far, newer_far)
    newer_far.close()
    assert received(far, 14) == b" the newer one"
    far.send(b"answer")
    assert received(newer_near, 6) == b"answer"
    newer_near.close()
    near.close()


@pytest.mark.parametrize("liar", ["connecting", "accepting"])
def test_one_whose_authority_is_unknown_is_refused(liar: str, tmp_path: Path) -> None:
    unknown = trustme.CA()
    honest = Certificates(for_everybody(), "w0")
    (tmp_path / "liar").mkdir()
    options = write(tmp_path / "liar", "w1", by=unknown, ca=unknown)
    with Path(options.ca).open("ab") as known:
        known.write(Path(for_everybody().ca).read_bytes())
    stranger = Certificates(options, "w1")
    ends = (stranger, honest) if liar == "connecting" else (honest, stranger)
    near, far = connected()
    client = TlsSocket(near.family, near.type, near.proto, near.detach())
    client.setblocking(False)
    client.start(ends[0].connecting())
    server = TlsSocket.over(far, ends[1].accepting())
    with client, server, pytest.raises(ssl.SSLError, match=r"unknown ca|verify failed"):
        until(lambda: (client.shake_hands(), server.shake_hands()) == (True, True))
