"""A worker's door that is closed by one thread while another lets somebody in."""

from __future__ import annotations

import errno
import os
import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from rpc.constants import DEFAULT_BUSY_POLL_SEC
from rpc.transports.tensorwire.acceptor import Door
from rpc.transports.tensorwire.handshake import Identity
from rpc.transports.tensorwire.requests import RequestSide

_SECONDS = 10.0
_TRY_SECONDS = 0.05
"""How long a thread gets to close the door if it can."""


class _Interrupted(RequestSide):
    """Runs ``meanwhile`` in another thread just before a guest's socket is registered."""

    meanwhile: Callable[[], None] | None = None
    thread: threading.Thread | None = None

    def add(self, sock: socket.socket, handler: Callable[[int], None]) -> None:
        if self.meanwhile is not None:
            self.thread = threading.Thread(target=self.meanwhile)
            self.meanwhile = None
            self.thread.start()
            self.thread.join(_TRY_SECONDS)
        super().add(sock, handler)


class _Crowded(socket.socket):
    """A listener of a process that has no descriptors left."""

    def accept(self) -> tuple[socket.socket, object]:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def _listener(kind: type[socket.socket] = socket.socket) -> socket.socket:
    listener = kind(socket.AF_UNIX)
    listener.setblocking(False)
    listener.bind("")
    listener.listen()
    return listener


def _door(listener: socket.socket) -> Door:
    def unwanted(_: object) -> None:
        raise AssertionError("nobody has proven anything")

    return Door([listener], b"key", Identity(0, 0), _SECONDS, unwanted)


@pytest.fixture
def requests() -> Iterator[_Interrupted]:
    side = _Interrupted("test", lambda: None, DEFAULT_BUSY_POLL_SEC)
    yield side
    side.close()


def test_a_door_that_closes_while_a_guest_comes_in_sends_it_away(requests: _Interrupted) -> None:
    listener = _listener()
    door = _door(listener)
    door.open(requests)
    requests.meanwhile = door.close
    requests.start()
    with socket.socket(socket.AF_UNIX) as guest:
        guest.settimeout(_SECONDS)
        guest.connect(listener.getsockname())
        assert guest.recv(1) == b""
    assert requests.thread is not None
    requests.thread.join(_SECONDS)
    assert not requests.thread.is_alive()


def test_a_paused_listener_is_not_read_again_once_the_door_is_closed() -> None:
    listener = _listener(_Crowded)
    door = _door(listener)
    paused = threading.Event()

    def sweep() -> None:
        if not paused.is_set():
            paused.set()
            door.close()
        door.sweep()

    requests = RequestSide("test", sweep, DEFAULT_BUSY_POLL_SEC)
    door.open(requests)
    requests.start()
    with socket.socket(socket.AF_UNIX) as guest:
        guest.connect(listener.getsockname())
        assert paused.wait(_SECONDS)
    requests.close()
    assert not requests.sweeping
