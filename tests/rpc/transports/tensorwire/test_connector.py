"""Connecting to a peer: how its time is spent, and how a full backlog is waited for."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from rpc.transports.tensorwire.address import TensorWireAddress
from rpc.transports.tensorwire.connector import ConnectError, Connector, Target
from rpc.transports.tensorwire.handshake import Identity
from tests.waiting import until

SECONDS = 20.0


def target(seconds: float, unix_name: str = "", *tcp: tuple[str, int]) -> Target:
    me, peer = Identity(0, 0), Identity(1, 0)
    address = TensorWireAddress("", unix_name, tcp, b"secret")
    return Target("bob", address, bool(unix_name), me, peer, b"", 1, seconds, 0.0)


@pytest.fixture
def silent() -> Iterator[tuple[str, int]]:
    """An address where somebody listens and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[:2]


def test_an_address_that_does_not_answer_leaves_time_for_the_others(
    silent: tuple[str, int],
) -> None:
    with pytest.raises(ConnectError) as raised:
        Connector(target(0.3, "", silent, silent, silent)).connect()
    assert str(raised.value).count("no answer within 0.1 s") == 3


def test_what_a_refused_address_did_not_need_is_there_for_the_others(
    silent: tuple[str, int],
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        nobody = closed.getsockname()[:2]
    with pytest.raises(ConnectError, match=r"refused; .*no answer within 0\.(3|29\d) s"):
        Connector(target(0.3, "", nobody, silent)).connect()


class Patient(Connector):
    """Counts how often it looks whether a socket can be connected."""

    looks = 0

    def _left(self) -> float:
        self.looks += 1
        return super()._left()


@pytest.fixture
def full() -> Iterator[str]:
    """The name of a Unix listener whose backlog is full."""
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as client:
        listener.bind("")
        listener.listen(0)
        name = listener.getsockname()
        client.connect(name)
        yield name[1:].decode()


def test_a_full_backlog_is_waited_for_without_looking_all_the_time(full: str) -> None:
    connector = Patient(target(0.3, full))
    with pytest.raises(ConnectError, match=r"no answer within 0\.3 s"):
        connector.connect()
    assert 3 < connector.looks < 40


def test_waiting_for_a_full_backlog_can_be_cancelled(full: str) -> None:
    connector = Patient(target(10 * SECONDS, full))
    failed: list[ConnectError] = []

    def connect() -> None:
        with pytest.raises(ConnectError) as raised:
            connector.connect()
        failed.append(raised.value)

    connecting = threading.Thread(target=connect)
    connecting.start()
    until(lambda: connector.looks > 2)
    connector.cancel()
    connecting.join(SECONDS)
    assert "gave up" in str(failed[0])
