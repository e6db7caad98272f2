"""Parsers of bytes that come from others, each with one try at bytes that somebody made up.

A target is given a source of randomness, makes bytes (random ones, or changed ones that were
right), and hands them to a parser in pieces of any size. It raises unless the parser refuses
them with its own error, or takes them for what anybody may say.
"""

from __future__ import annotations

import contextlib
import random
import socket
import ssl
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from torch.distributed import HashStore

from rpc.errors import BringUpError, FrameError
from rpc.group.liveness_process import ANSWER, QUESTION, Answering, Datagram
from rpc.group.member_list import Departure, End
from rpc.group.records import Record
from rpc.group.signed_store import SignedStore, signing_key
from rpc.group.store_gate import (
    NONCE_BYTES,
    PROOF_BYTES,
    RUN_BYTES,
    Gate,
    Knock,
    NotProvenError,
)
from rpc.group.store_values import RefusedError, Room, Store
from rpc.group.tcp_store import StoreLostError, TcpStoreClient
from rpc.transports.tensorwire.address import TensorWireAddress
from rpc.transports.tensorwire.framing import (
    BulkDecoder,
    WireKind,
    pack_fixed,
    pack_pair,
)
from rpc.transports.tensorwire.handshake import (
    MAX_MESSAGE_BYTES,
    Acceptor,
    ChannelKind,
    HandshakeError,
    Hello,
    Identity,
    Initiator,
)
from rpc.transports.tensorwire.main_reader import FrameDecoder
from rpc.transports.tensorwire.tls import Certificates
from rpc.transports.tensorwire.tls_socket import TlsSocket
from tests.fuzz.folders import checkpoints, snapshots
from tests.fuzz.mutations import changed, pieces
from tests.fuzz.published import publisher_replies, reader_handshake, reader_requests
from tests.rpc.transports.tensorwire.certificates import for_everybody

Draw = random.Random
_KEY, _NOT_THE_KEY = b"the key of the group", b"a guess"
_ME, _OTHER = Identity(1, 7), Identity(0, 4)
_HELLO = Hello(ChannelKind.MAIN, _OTHER, _ME, b"t" * 16, b"n" * 32)
_HEAD_BYTES = 8
_MOST_BYTES = 1 << 16


# --- Before anything is proven


def acceptor(draw: Draw) -> None:
    """A stranger opens a connection to a worker."""
    side = Acceptor(_KEY, _ME, b"a" * 32)
    stranger = Initiator(_NOT_THE_KEY, _HELLO)
    hello = stranger.begin()
    said = changed(draw, [hello, hello + hello, hello + b"\0" * 40])
    with contextlib.suppress(HandshakeError):
        for piece in _as_wanted(side, said):
            assert len(side.receive(piece)) <= MAX_MESSAGE_BYTES
    assert side.authenticated is None


def initiator(draw: Draw) -> None:
    """A stranger answers a worker that connects."""
    side, stranger = Initiator(_KEY, _HELLO), Acceptor(_NOT_THE_KEY, _ME, b"a" * 32)
    challenge = stranger.receive(side.begin())
    said = changed(draw, [challenge, Acceptor.accept(), challenge + Acceptor.accept(3)])
    if draw.random() < 0.2:
        said = changed(draw, [Acceptor.reject("no \N{SNOWMAN}")])
    with contextlib.suppress(HandshakeError):
        for piece in _as_wanted(side, said):
            assert side.receive(piece) == b"", "a proof for one who proved nothing"
    assert not side.accepted


def _as_wanted(side: Acceptor | Initiator, data: bytes) -> Any:
    """Pieces as the owner of a side reads them: never more than it wants."""
    while data and side.wanted:
        assert 0 < side.wanted <= _HEAD_BYTES + MAX_MESSAGE_BYTES
        yield data[: side.wanted]
        data = data[side.wanted :] if side.wanted else b""


def datagrams(draw: Draw) -> None:
    """A stranger asks a worker for a sign of life, or tells it that it was lost."""
    token, asker = b"w" * 16, b"s" * 16
    side = Answering(_KEY, token, lambda: True)
    question = Datagram(QUESTION, asker, b"n" * 16, b"").sealed(_NOT_THE_KEY, token)
    answer = Datagram(ANSWER, asker, b"n" * 16, b"+").sealed(_KEY, asker)
    assert side.reply(changed(draw, [question, answer])) == (b"", b"")


def store_values(draw: Draw) -> None:
    """A stranger writes to the group's store; what counts is a value with the key's proof."""
    store: Any = HashStore()
    SignedStore(store, _KEY, "group").set("member/w0", b"what a member wrote")
    SignedStore(store, _NOT_THE_KEY, "group").set("member/w1", b"what a stranger wrote")
    forged = changed(draw, [store.get("group/member/w0"), store.get("group/member/w1")])
    store.set("group/member/w2", forged)
    store.set("group/member/w1", store.get("group/member/w0"))
    read = SignedStore(store, _KEY, "group").get_all(["member/w0", "member/w1", "member/w2"])
    assert read == [b"what a member wrote", None, None]


def store_replies(draw: Draw) -> None:
    """A stranger plays the group's store."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client: Any = TcpStoreClient("127.0.0.1", listener.getsockname()[1], timeout=0.5)
        client.connect()
        connected, _ = listener.accept()
        listener.close()
        size = draw.choice([0, 3, 40, 1 << 20, 1 << 40, (1 << 64) - 1])
        reply = size.to_bytes(8, "little") + b"three" * draw.randrange(10)
        with connected:
            connected.sendall(changed(draw, [reply, reply[8:]]))
            connected.shutdown(socket.SHUT_WR)
            with contextlib.suppress(StoreLostError, TimeoutError, ConnectionRefusedError):
                draw.choice([lambda: client.get("key"), lambda: client.add("key", 1)])()


def store_gate(draw: Draw) -> None:
    """A stranger knocks at the closed part of the group's store, or pretends to be it."""
    gate, member = Gate(_KEY, b"r" * RUN_BYTES, b"n" * NONCE_BYTES), Knock(_KEY, b"c" * NONCE_BYTES)
    stranger = Knock(_NOT_THE_KEY, b"c" * NONCE_BYTES)
    recorded = Knock(_KEY, b"d" * NONCE_BYTES)
    past = recorded.hello() + recorded.answer(b"m" * NONCE_BYTES)
    said = changed(draw, [stranger.hello() + stranger.answer(b"n" * NONCE_BYTES), past, past * 3])
    with contextlib.suppress(NotProvenError):
        for piece in pieces(draw, said):
            assert len(gate.receive(piece)) <= NONCE_BYTES, "a proof for one who proved nothing"
    assert not gate.is_open
    member.answer(b"n" * NONCE_BYTES)
    with pytest.raises(NotProvenError):
        member.check(changed(draw, [past[-RUN_BYTES - PROOF_BYTES :], bytes(48)]))


def store_requests(draw: Draw) -> None:
    """A stranger asks the group's store."""
    stored, under_way = Room(1 << 12), Room(1 << 12)
    store = Store(stored, under_way, lambda client: store.closed(client), lambda _: None)
    store.trust(signing_key(_KEY))
    clients = [store.opened() for _ in range(2)]
    kinds = [bytes([kind]) for kind in range(1, 20)]
    key, number = b"\2" + bytes(7) + b"/k", (1).to_bytes(8, "little")
    parts = [*kinds, key, key, number, number, bytes(8), b"\xff" * 8]
    told = [b"".join(draw.choices(parts, k=30)) for _ in clients]
    for client, data in zip(clients, told, strict=True):
        hello = b"\0" + (0x3C85F7CE).to_bytes(4, "little")
        with contextlib.suppress(RefusedError):
            for piece in pieces(
                draw, changed(draw, [hello + data]) if draw.random() < 0.3 else hello + data
            ):
                store.receive(client, piece)
        assert stored.taken <= stored.most
        assert under_way.taken <= under_way.most
    for client in clients:
        store.closed(client)
    assert under_way.taken == 0


def records(draw: Draw) -> None:
    """A group without a key lets anybody write what a member would."""
    record = Record("w0", 0, 2, 3, "TENSORWIRE", b"address")
    departure = Departure("w0", 0, 3, End.LOST, "w1", 1.5, "silent", record.digest())
    data = changed(draw, [record.encode(), departure.encode(), b"[" * 3000])
    for parse in (Record.decode, Departure.decode):
        with contextlib.suppress(BringUpError):
            parse(data)


def addresses(draw: Draw) -> None:
    """The part of a record that says where a worker listens."""
    address = TensorWireAddress("host", "unix", (("10.0.0.1", 4000), ("::1", 4001)), b"s" * 16)
    with contextlib.suppress(FrameError):
        TensorWireAddress.decode(changed(draw, [address.encode(), b"[" * 3000]))


def tls(draw: Draw) -> None:
    """A stranger speaks to a socket with TLS before, or instead of, shaking hands."""
    ours, theirs = socket.socketpair()
    with theirs, TlsSocket.over(ours, _certificates().accepting()) as sock:
        theirs.setblocking(False)
        outgoing = ssl.MemoryBIO()
        client = _certificates().connecting().wrap_bio(ssl.MemoryBIO(), outgoing)
        with contextlib.suppress(ssl.SSLWantReadError):
            client.do_handshake()
        for piece in pieces(
            draw, changed(draw, [outgoing.read(), Initiator(_KEY, _HELLO).begin()])
        ):
            theirs.send(piece)
            with contextlib.suppress(OSError):  # ssl.SSLError is one
                assert sock.recv(100) == b""
        assert sock.names == ()


def _certificates() -> Certificates:
    if not _made:
        _made.append(Certificates(for_everybody(), "w0"))
    return _made[0]


_made: list[Certificates] = []


# --- Behind the proof: members are trusted, but what breaks must break with an error


def frames(draw: Draw) -> None:
    """The main channel."""
    first = pack_fixed(1, 5, 0, 3, 2, 4) + b"headtbline"[:9]
    second = pack_fixed(2, 5, 1, 0, 0, 70_000) + bytes(70_000)
    decoder = FrameDecoder(_MOST_BYTES * 2)
    with contextlib.suppress(FrameError):
        for piece in pieces(draw, changed(draw, [first, first + second])):
            _feed(decoder, piece)


def _feed(decoder: FrameDecoder, data: bytes) -> None:
    while data:
        room = decoder.room()
        if room is None:
            decoder.feed(data)
            return
        count = min(len(room), len(data))
        room[:count] = data[:count]
        decoder.filled(count)
        data = data[count:]


def bulk(draw: Draw) -> None:
    """A channel for large tensors."""
    room = bytearray(_MOST_BYTES)

    def place(_: int, offset: int, length: int, total: int) -> memoryview | None:
        if total > _MOST_BYTES:
            raise FrameError("more than was announced")
        return memoryview(room)[offset : offset + length] if draw.random() < 0.9 else None

    chunk = pack_fixed(WireKind.CHUNK, 5, 0, 16, 0, 300) + pack_pair(100, 500) + bytes(300)
    offer = pack_fixed(WireKind.SEGMENT, 5, 1, 16, 0, 0) + pack_pair(1 << 20, 0)
    decoder = BulkDecoder(place)
    data = changed(draw, [chunk, chunk + offer])
    with contextlib.suppress(FrameError):
        while data:
            buffer = decoder.buffer()
            count = min(len(buffer), len(data), draw.choice((1, 40, 1000)))
            buffer[:count] = data[:count]
            decoder.advance(count)
            data = data[count:]


TARGETS: Mapping[str, Callable[[Draw], None]] = {
    each.__name__: each
    for each in (
        acceptor,
        initiator,
        datagrams,
        store_values,
        store_gate,
        store_replies,
        store_requests,
        records,
        addresses,
        tls,
        frames,
        bulk,
        checkpoints,
        snapshots,
        reader_handshake,
        reader_requests,
        publisher_replies,
    )
}
