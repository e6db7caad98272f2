"""Sending on one socket: in one piece if possible, in order, never blocking."""

from __future__ import annotations

import errno
import os
import socket
import threading
from collections.abc import Callable

import pytest

from rpc.transports.tensorwire.channel import QueuedFrame, Sender, Unsent
from tests.rpc.transports.tensorwire.descriptors import to_be_closed
from tests.rpc.transports.tensorwire.wires import (
    SECONDS,
    Wire,
)
from tests.waiting import until


def test_a_small_frame_leaves_at_once(wire: Wire) -> None:
    wire.sender.send_small(1, 5, b"header", b"", b"payload")
    wire.receive(1)
    assert wire.found == [(5, b"header", b"payload")]
    assert wire.unsent.count == 0
    assert wire.watching == []


def test_what_does_not_fit_waits_for_the_socket_and_stays_in_order(wire: Wire) -> None:
    big = bytes(range(256)) * 4000
    for number in range(30):
        if number % 3:
            wire.sender.send_small(1, number, b"h", b"", b"p")
        else:
            wire.sender.send(QueuedFrame(1, number, b"h", b"", (big, b"tail"), len(big) + 4))
    assert wire.watching[-1] is True
    assert wire.unsent.count > 1 << 20
    wire.receive(30)
    assert [(n, len(p)) for n, _, p in wire.found] == [
        (n, 1 if n % 3 else len(big) + 4) for n in range(30)
    ]
    assert wire.unsent.count == 0
    assert wire.watching[-1] is False


def test_queued_frames_leave_with_a_flush(wire: Wire) -> None:
    for number in range(200):
        wire.sender.hold_small(2, number, b"h", b"", b"")
    wire.other.setblocking(False)
    with pytest.raises(BlockingIOError):
        wire.other.recv(1)
    wire.other.settimeout(10)
    wire.sender.flush()
    wire.receive(200)
    assert [number for number, _, _ in wire.found] == list(range(200))


def test_threads_share_a_socket_without_mixing_frames(wire: Wire) -> None:
    def send(thread: int) -> None:
        for step in range(300):
            payload = bytes([thread]) * (step * 7)
            wire.sender.send_small(1, thread * 1000 + step, b"h", b"", payload)

    threads = [threading.Thread(target=send, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    wire.receive(1200)
    for thread in threads:
        thread.join()
    assert sorted(wire.found) == sorted(
        (t * 1000 + s, b"h", bytes([t]) * (s * 7)) for t in range(4) for s in range(300)
    )


def test_a_descriptor_is_passed_once_and_closed_here(wire: Wire) -> None:
    with to_be_closed() as descriptor:
        before = os.fstat(descriptor)
        wire.sender.send(QueuedFrame(17, 0, b"about it", descriptor=descriptor))
        data, descriptors, _, _ = socket.recv_fds(wire.other, 1000, 4)
        assert data.endswith(b"about it")
        (passed,) = descriptors
        assert os.fstat(passed).st_ino == before.st_ino
        os.close(passed)


def test_where_too_many_descriptors_are_on_their_way_the_message_leaves_without(
    wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_many(*_: object) -> int:
        raise OSError(errno.ETOOMANYREFS, "Too many references: cannot splice")

    monkeypatch.setattr(socket, "send_fds", too_many)
    with to_be_closed() as descriptor:
        wire.sender.send(QueuedFrame(17, 0, b"about it", descriptor=descriptor))
        wire.sender.send_small(1, 5, b"", b"", b"after it")
        data, descriptors, _, _ = socket.recv_fds(wire.other, 1000, 4)
        assert b"about it" in data
        assert data.endswith(b"after it")
        assert descriptors == []


def test_a_descriptor_that_never_leaves_is_closed(wire: Wire) -> None:
    while not wire.watching:
        wire.sender.send_small(1, 0, b"h", b"", b"x" * 60_000)
    with to_be_closed() as descriptor:
        wire.sender.send(QueuedFrame(17, 0, b"", descriptor=descriptor))
        wire.sender.close()


class Interrupted(socket.socket):
    """A socket during whose closing something else happens, as another thread may have it."""

    meanwhile: Callable[[], None]

    def close(self) -> None:
        self.meanwhile()
        super().close()


@pytest.mark.parametrize("remember", [0, 100])
def test_what_is_given_to_a_sender_while_it_is_closed_is_dropped(remember: int) -> None:
    mine, other = socket.socketpair()
    sock = Interrupted(fileno=mine.detach())
    unsent = Unsent()
    sender = Sender(sock, unsent, lambda _: None, remember)
    with other, to_be_closed() as descriptor:
        sock.meanwhile = lambda: sender.send(QueuedFrame(17, 0, b"about it", descriptor=descriptor))
        sender.close()
        assert sender.queued() == unsent.count == 0


def test_a_broken_socket_drops_frames_and_counts_nothing(wire: Wire) -> None:
    while not wire.watching:
        wire.sender.send_small(1, 0, b"h", b"", b"x" * 60_000)
    wire.other.close()
    wire.sender.writable()
    wire.sender.send_small(1, 0, b"h", b"", b"")
    wire.sender.send(QueuedFrame(1, 0, b"h", b"", (b"x" * 100_000,), 100_000))
    assert wire.unsent.count == 0


def test_waiting_for_the_socket_ends_when_the_bytes_have_left(wire: Wire) -> None:
    while not wire.watching:
        wire.sender.send_small(1, 0, b"h", b"", b"x" * 60_000)
    assert not wire.unsent.wait(0, 0.0)
    done = threading.Event()

    def wait() -> None:
        wire.unsent.wait(0, 10)
        done.set()

    waiter = threading.Thread(target=wait)
    waiter.start()
    wire.other.close()
    wire.sender.writable()
    waiter.join(10)
    assert done.is_set()


def test_waiting_while_bytes_leave_ends_when_few_are_left_or_none_leave() -> None:
    unsent = Unsent()
    unsent.add(10)
    assert unsent.wait_while_moving(10, 0.0)
    assert not unsent.wait_while_moving(5, 0.01)
    found: list[bool] = []
    waiter = threading.Thread(target=lambda: found.append(unsent.wait_while_moving(5, SECONDS)))
    waiter.start()
    until(lambda: unsent.waiters > 0)
    for count in (-1, 3, -4, -3):
        unsent.add(count)
    waiter.join(SECONDS)
    assert found == [True]


class Refusing:
    """A socket that sends nothing, for the given reason."""

    def __init__(self, sock: socket.socket, error: int) -> None:
        self._sock, self._error = sock, error

    def send(self, _: object) -> int:
        raise OSError(self._error, os.strerror(self._error))

    sendmsg = send

    def __getattr__(self, name: str) -> object:
        return getattr(self._sock, name)


@pytest.mark.parametrize("size", [1, 100_000])
@pytest.mark.parametrize(
    ("error", "why"),
    [
        (errno.EFAULT, "what was to be sent to it cannot be sent: Bad address"),
        (errno.EINVAL, "what was to be sent to it cannot be sent: Invalid argument"),
        (errno.EPIPE, ""),
        (errno.ETIMEDOUT, ""),
        (errno.ENOBUFS, ""),
    ],
)
def test_what_can_be_sent_on_no_connection_is_told_from_a_connection_that_broke(
    wire: Wire, size: int, error: int, why: str
) -> None:
    wire.sender.sock = Refusing(wire.sender.sock, error)  # type: ignore[assignment]
    if size == 1:
        wire.sender.send_small(1, 0, b"h", b"", b"x")
    else:
        wire.sender.send(QueuedFrame(1, 0, b"h", b"", (b"x" * size,), size))
    assert wire.sender.fault == why
    assert wire.unsent.count == 0


def test_what_is_sent_after_the_end_is_no_fault(wire: Wire) -> None:
    wire.sender.close()
    wire.sender.send_small(1, 0, b"h", b"", b"x")
    assert wire.sender.fault == ""


def test_a_large_header_is_not_copied(wire: Wire) -> None:
    header, table = bytes(1 << 20), bytes(1 << 18)
    wire.sender.send(QueuedFrame(1, 1, header, table, (b"p",), 1))
    remaining = [view.obj for view in wire.sender._unsent]
    assert any(each is header for each in remaining)
    wire.receive(1)
    assert wire.found == [(1, header, b"p")]
