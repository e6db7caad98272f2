"""Connections are authenticated one by one, and closed where there are too many."""

from __future__ import annotations

import errno
import os
import socket
import threading
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import pytest

from rpc.constants import DEFAULT_BUSY_POLL_SEC
from rpc.transports.tensorwire.acceptor import (
    AuthenticatedConnection,
    ConnectionAcceptor,
    origin_of,
)
from rpc.transports.tensorwire.handshake import ChannelKind, Hello, Identity, Initiator
from rpc.transports.tensorwire.requests import RequestSide

_SECONDS = 10.0
_TRY_SECONDS = 0.05
"""Seconds that a thread gets to close the acceptor, if it can."""


class _Interrupted:
    """Runs ``meanwhile`` in another thread just before a connection is registered."""

    def __init__(self) -> None:
        self.inner = RequestSide("test", lambda: None, DEFAULT_BUSY_POLL_SEC)
        self.sweeping = False
        self.remove = self.inner.remove
        self.meanwhile: Callable[[], None] | None = None
        self.thread: threading.Thread | None = None

    def add(self, sock: socket.socket, handler: Callable[[int], None]) -> None:
        if self.meanwhile is not None:
            self.thread = threading.Thread(target=self.meanwhile)
            self.meanwhile = None
            self.thread.start()
            self.thread.join(_TRY_SECONDS)
        self.inner.add(sock, handler)


class _Crowded(socket.socket):
    """A listener of a process that has no descriptors left, or lacks something else."""

    lacking = errno.EMFILE

    def accept(self) -> tuple[socket.socket, object]:
        raise OSError(self.lacking, os.strerror(self.lacking))


def _listener() -> socket.socket:
    return _listening(socket.socket(socket.AF_UNIX))


def _listening(listener: socket.socket) -> socket.socket:
    listener.setblocking(False)
    listener.bind("")
    listener.listen()
    return listener


def _unwanted(_: AuthenticatedConnection) -> None:
    raise AssertionError("nobody has proven anything")


def _acceptor(
    *listeners: socket.socket,
    authenticated: Callable[[AuthenticatedConnection], None] = _unwanted,
    **limits: Any,
) -> ConnectionAcceptor:
    identity = Identity(0, 0)
    return ConnectionAcceptor(list(listeners), b"key", identity, _SECONDS, authenticated, **limits)


@pytest.fixture
def requests() -> Iterator[_Interrupted]:
    side = _Interrupted()
    yield side
    side.inner.close()


def test_an_acceptor_that_closes_while_a_connection_comes_closes_that(
    requests: _Interrupted,
) -> None:
    listener = _listener()
    acceptor = _acceptor(listener)
    acceptor.open(requests)
    requests.meanwhile = acceptor.close
    requests.inner.start()
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(_SECONDS)
        client.connect(listener.getsockname())
        assert client.recv(1) == b""
    assert requests.thread is not None
    requests.thread.join(_SECONDS)
    assert not requests.thread.is_alive()


class _Told:
    """Has no threads: the test says when a socket is ready."""

    def __init__(self) -> None:
        self.sweeping = False
        self.ready: dict[int, Callable[[int], None]] = {}

    def add(self, sock: socket.socket, handler: Callable[[int], None]) -> None:
        self.ready[sock.fileno()] = handler

    def remove(self, sock: socket.socket) -> None:
        self.ready.pop(sock.fileno(), None)


class _Crowd:
    """An acceptor with two listeners, and a clock that the test sets."""

    def __init__(self) -> None:
        self.now = 100.0
        self.places: Iterator[str] | None = None
        """The process from which clients connect; this one if None."""
        self.requests = _Told()
        self.listeners = [_listener(), _listener()]
        self.authenticated: list[AuthenticatedConnection] = []
        self.acceptor = _acceptor(
            *self.listeners,
            authenticated=self.authenticated.append,
            most_silent=3,
            most_identified=3,
            origin=self.origin_of,
            clock=lambda: self.now,
        )
        self.acceptor.open(self.requests)
        self.clients: list[socket.socket] = []

    def origin_of(self, sock: socket.socket, address: tuple[str, int]) -> Hashable:
        return origin_of(sock, address) if self.places is None else next(self.places)

    def enter(self, number: int = 0, says: bytes = b"") -> socket.socket:
        """Somebody connects to a listener, and says something at once."""
        client = socket.socket(socket.AF_UNIX)
        client.connect(self.listeners[number].getsockname())
        client.settimeout(_SECONDS)
        client.sendall(says)
        self.requests.ready[self.listeners[number].fileno()](0)
        self.clients.append(client)
        return client

    def hear(self) -> None:
        """Reads what clients have said."""
        for handler in list(self.requests.ready.values())[len(self.listeners) :]:
            handler(0)

    def inside(self) -> list[bool]:
        """The clients that have not been sent away."""
        return [not _is_over(client) for client in self.clients]

    def close(self) -> None:
        self.acceptor.close()
        for authenticated in self.authenticated:
            authenticated.hang_up()
        for client in self.clients:
            client.close()


def _is_over(client: socket.socket) -> bool:
    client.setblocking(False)
    try:
        return client.recv(1) == b""
    except BlockingIOError:
        return False


@pytest.fixture
def crowd() -> Iterator[_Crowd]:
    made = _Crowd()
    yield made
    made.close()


def _member() -> Initiator:
    return Initiator(
        b"key", Hello(ChannelKind.MAIN, Identity(1, 1), Identity(0, 0), b"t" * 16, b"n" * 32)
    )


def _answer(member: Initiator, sock: socket.socket) -> None:
    """A member answers the ccrowdenge that has come."""
    answer = b""
    while not answer:
        answer = member.receive(sock.recv(member.wanted))
    sock.sendall(answer)


def test_where_too_many_are_silent_the_oldest_makes_room(crowd: _Crowd) -> None:
    for _ in range(4):
        crowd.enter()
    assert crowd.inside() == [False, True, True, True]


def test_a_member_gets_in_while_others_connect_faster_than_it_is_read(crowd: _Crowd) -> None:
    member = _member()
    for _ in range(10):
        crowd.enter()
    sock = crowd.enter(says=member.begin())
    for _ in range(10):
        crowd.enter()
    _answer(member, sock)
    crowd.hear()
    assert [authenticated.hello.initiator for authenticated in crowd.authenticated] == [
        Identity(1, 1)
    ]


def test_a_member_that_speaks_late_is_heard_if_others_come_from_elsewhere(
    crowd: _Crowd,
) -> None:
    crowd.places = iter([*"sssss", "member", *"sssss"])
    member = _member()
    for _ in range(5):
        crowd.enter()
    sock = crowd.enter()
    for _ in range(5):
        crowd.enter()
    sock.sendall(member.begin())
    crowd.hear()
    _answer(member, sock)
    crowd.hear()
    assert len(crowd.authenticated) == 1


def test_members_that_come_all_at_once_do_not_push_each_other_out(crowd: _Crowd) -> None:
    members = [_member() for _ in range(4)]
    for member in members:
        crowd.enter(says=member.begin())
    *early, late = crowd.clients
    for member, sock in zip(members, early, strict=False):
        _answer(member, sock)
    crowd.hear()
    assert len(crowd.authenticated) == 3
    member = _member()
    _answer(member, crowd.enter(says=member.begin()))
    crowd.hear()
    assert len(crowd.authenticated) == 4
    assert late.recv(1000)  # it was ccrowdenged
    assert late.recv(1) == b""


def test_a_member_that_only_said_hello_makes_room_when_its_time_is_over(crowd: _Crowd) -> None:
    for _ in range(3):
        crowd.enter(says=_member().begin())
    crowd.now += 1.1
    crowd.enter(says=_member().begin())
    for client in crowd.clients:
        assert client.recv(1000)  # its ccrowdenge
    assert crowd.inside() == [False, True, True, True]


def test_who_comes_from_which_host_or_process_is_known() -> None:
    with _listener() as listener, socket.socket(socket.AF_UNIX) as client:
        client.connect(listener.getsockname())
        with listener.accept()[0] as accepted:
            assert origin_of(accepted, ("", 0)) == os.getpid()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        accepted, address = listener.accept()
        with client, accepted:
            assert origin_of(accepted, address) == "127.0.0.1"


def test_a_crowd_at_one_listener_keeps_nobody_out_of_another(crowd: _Crowd) -> None:
    for number in (0, 0, 0, 1):
        crowd.enter(number)
    assert crowd.inside() == [True, True, True, True]


def test_who_says_nothing_is_sent_away_long_before_who_says_something(crowd: _Crowd) -> None:
    crowd.enter()
    crowd.enter(says=b"TWhs")
    talker = crowd.enter(says=_member().begin())
    assert talker.recv(1000)  # its ccrowdenge
    crowd.now += 6.0
    crowd.acceptor.sweep()
    assert crowd.inside() == [False, False, True]


class _Strained:
    """An acceptor whose only listener lacks something whenever somebody connects."""

    def __init__(self) -> None:
        self.listener = _Crowded(socket.AF_UNIX)
        self.requests = _Told()
        self.acceptor = _acceptor(_listening(self.listener))
        self.acceptor.open(self.requests)

    def request_reconnect(self) -> None:
        self.requests.ready[self.listener.fileno()](0)

    def watched(self) -> list[int]:
        """The descriptors that are read."""
        return list(self.requests.ready)


@pytest.fixture
def strained() -> Iterator[_Strained]:
    made = _Strained()
    yield made
    made.acceptor.close()


@pytest.mark.parametrize("error", [errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM])
def test_a_listener_that_lacks_something_is_not_asked_before_the_next_sweep(
    strained: _Strained, error: int
) -> None:
    strained.listener.lacking = error
    for _ in range(2):
        strained.request_reconnect()
        assert strained.requests.sweeping
        assert strained.watched() == []
        strained.acceptor.sweep()
        assert strained.watched() == [strained.listener.fileno()]


def test_a_listener_that_cannot_be_watched_again_is_at_the_sweep_after(
    strained: _Strained, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(*_: object) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    strained.request_reconnect()
    with monkeypatch.context() as short:
        short.setattr(strained.requests, "add", no_memory)
        strained.acceptor.sweep()
    assert strained.requests.sweeping
    assert strained.watched() == []
    strained.acceptor.sweep()
    assert strained.watched() == [strained.listener.fileno()]


def test_a_paused_listener_is_not_read_again_once_the_acceptor_is_closed() -> None:
    listener = _listening(_Crowded(socket.AF_UNIX))
    acceptor = _acceptor(listener)
    paused = threading.Event()

    def sweep() -> None:
        if not paused.is_set():
            paused.set()
            acceptor.close()
        acceptor.sweep()

    requests = RequestSide("test", sweep, DEFAULT_BUSY_POLL_SEC)
    acceptor.open(requests)
    requests.start()
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(listener.getsockname())
        assert paused.wait(_SECONDS)
    requests.close()
    assert not requests.sweeping
