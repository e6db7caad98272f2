"""TensorWire keeps outsiders, and peers that break the rules, from disturbing anybody else."""

from __future__ import annotations

import os
import socket
from typing import Any

import pytest

from rpc.errors import (
    UnknownWorkerError,
    WorkerLostError,
)
from rpc.transports.tensorwire import Settings
from rpc.transports.tensorwire.framing import pack_fixed
from rpc.transports.tensorwire.handshake import ChannelKind, HandshakeError, Identity
from rpc.transports.tensorwire.link import Link
from tests.rpc.transports.tensorwire.bare_connections import connect, shake
from tests.rpc.transports.tensorwire.transports import (
    Maker,
)


@pytest.mark.parametrize("unix", [True, False], ids=["unix", "tcp"])
@pytest.mark.parametrize(
    "data", [b"GET / HTTP/1.0\r\n\r\n", bytes(1000), os.urandom(4096)], ids=["http", "0", "random"]
)
def test_noise_is_sent_away_and_disturbs_nobody(make: Maker, data: bytes, unix: bool) -> None:
    a, b = make(Settings(), Settings())
    a.call(b, b"h")
    with connect(b, unix=unix) as sock:
        sock.sendall(data)
        answer = b""
        try:
            while piece := sock.recv(1000):
                answer += piece
        except ConnectionResetError:
            pass
        assert len(answer) < 300
    assert a.call(b, b"still there").header == b"still there"
    assert (a.lost, b.lost) == ([], [])


def test_connections_that_say_nothing_hold_up_nobody(make: Maker) -> None:
    a, b = make(Settings(), Settings())
    silent = [connect(b, unix=bool(number % 2)) for number in range(40)]
    half = [connect(b) for _ in range(10)]
    for sock in half:
        sock.sendall(b"TWhs")
    assert a.call(b, b"h").header == b"h"
    assert b.call(a, b"h").header == b"h"
    for sock in silent + half:
        sock.close()


def test_a_silent_connection_is_sent_away_in_time(make: Maker) -> None:
    (a,) = make(Settings(connect_seconds=0.2))
    with connect(a) as sock:
        assert b"too long" in sock.recv(1000)
        assert sock.recv(1000) == b""


def test_without_the_key_nobody_gets_in(make: Maker) -> None:
    (a,) = make(Settings())
    with connect(a) as sock, pytest.raises(HandshakeError, match="acceptor does not hold"):
        shake(sock, a, Identity(1, 1), key=b"wrong")


def test_workers_with_different_group_keys_do_not_connect(make: Maker) -> None:
    a, b = make(Settings(group_key=b"one"), Settings(group_key=b"other"))
    a.notify(b, b"h")
    a.until(lambda: bool(a.lost))
    ((life, reason),) = a.lost
    assert life.worker == 1
    assert "does not hold the group's key" in reason
    assert b.received == []


def test_a_worker_of_another_life_is_refused(make: Maker) -> None:
    a, _ = make(Settings(), Settings())
    with connect(a) as sock, pytest.raises(HandshakeError, match="history"):
        shake(sock, a, Identity(1, 0))


def test_a_life_that_was_lost_is_refused(make: Maker) -> None:
    a, b = make(Settings(), Settings())
    a.call(b, b"h")
    b.close()
    a.until(lambda: bool(a.lost))
    with connect(a) as sock, pytest.raises(HandshakeError, match="declared lost"):
        shake(sock, a, Identity(1, 1))


def test_a_worker_that_is_removed_while_it_connects_is_refused(
    make: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = make(Settings(), Settings())

    def remove_first(*args: Any, **kwargs: Any) -> Link:
        a.transport.remove_peer(b.info.id)
        return Link(*args, **kwargs)

    monkeypatch.setattr("rpc.transports.tensorwire.peer.Link", remove_first)
    with connect(a) as sock, pytest.raises(HandshakeError, match="declared lost"):
        shake(sock, a, Identity(1, 1))


def test_a_worker_may_connect_before_it_is_known(make: Maker) -> None:
    a, b = make(Settings(), Settings(), known=False)
    a.transport.add_peer(b.peer())
    asked = a.ask(b, b"early")
    with pytest.raises(UnknownWorkerError):
        b.notify(a, b"h")
    assert b.received == []
    b.transport.add_peer(a.peer())
    assert a.reply(asked).header == b"early"


def test_a_worker_that_never_becomes_known_is_sent_away(make: Maker) -> None:
    a, b = make(Settings(), Settings(connect_seconds=0.5), known=False)
    a.transport.add_peer(b.peer())
    a.notify(b, b"h")
    a.until(lambda: bool(a.lost))
    assert "has not heard of" in a.lost[0][1]


@pytest.mark.parametrize(
    "data",
    [
        b"\0" * 100,
        pack_fixed(1, 1, 0, 1 << 31, 0, 1 << 40),
        pack_fixed(1, 1, 0, 1, 8, 0) + b"h" + b"\xff" * 8,
        pack_fixed(1, 1, 5, 0, 0, 0),
        pack_fixed(1, 1, 0, 0, 0, 0)[:-1] + b"x",
    ],
    ids=["zeros", "oversize", "table", "sequence", "checksum"],
)
def test_a_peer_that_sends_malformed_frames_is_lost_and_no_other(make: Maker, data: bytes) -> None:
    a, b, c = make(Settings(), Settings(), Settings())
    a.call(c, b"h")
    with connect(a) as sock:
        shake(sock, a, Identity(1, 1))
        sock.sendall(data)
        a.until(lambda: bool(a.lost))
        ((life, reason),) = a.lost
        assert life.worker == 1
        assert "cannot be read" in reason
    assert a.call(c, b"still there").header == b"still there"
    assert c.call(a, b"still there").header == b"still there"
    with pytest.raises(WorkerLostError, match="cannot be read"):
        a.notify(b, b"h")


def test_malformed_bulk_loses_its_peer_only(make: Maker) -> None:
    a, _, c = make(Settings(), Settings(), Settings())
    with connect(a) as main, connect(a) as bulk:
        shake(main, a, Identity(1, 1))
        shake(bulk, a, Identity(1, 1), kind=ChannelKind.BULK)
        socket.send_fds(bulk, [b"\0" * 100], [main.fileno(), bulk.fileno()])
        a.until(lambda: bool(a.lost))
        assert "cannot be read" in a.lost[0][1]
    assert a.call(c, b"h").header == b"h"


def test_a_bulk_connection_whose_link_is_gone_may_be_tried_again(make: Maker) -> None:
    a, _ = make(Settings(), Settings())
    with connect(a) as sock, pytest.raises(HandshakeError, match=r"^closed$"):
        shake(sock, a, Identity(1, 1), kind=ChannelKind.BULK)
    assert a.lost == []


def test_a_link_that_is_heard_of_after_a_later_one_does_not_take_its_place(make: Maker) -> None:
    a, _ = make(Settings(), Settings())
    with connect(a) as later, connect(a) as late, connect(a) as bulk:
        shake(later, a, Identity(1, 1), attempt=2)
        with pytest.raises(HandshakeError, match=r"^closed$"):
            shake(late, a, Identity(1, 1), token=b"u" * 16, attempt=1)
        shake(bulk, a, Identity(1, 1), kind=ChannelKind.BULK)
    assert a.lost == []


def test_a_first_attempt_that_came_to_nothing_is_no_loss(make: Maker) -> None:
    a, b = make(Settings(), Settings())
    with connect(a) as sock:
        shake(sock, a, Identity(1, 1))
    assert b.call(a, b"h").header == b"h"
    assert a.call(b, b"h").header == b"h"
    assert a.lost == []
