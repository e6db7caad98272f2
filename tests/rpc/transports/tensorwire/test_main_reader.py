"""The reading half of a main channel: what ends it, and what another connection resumes."""

from __future__ import annotations

import errno
import os
from typing import Any

import pytest

from rpc.transports.host.copying import CopyThreads
from rpc.transports.host.segments import Budget
from rpc.transports.tensorwire.channel import Sender, Unsent
from rpc.transports.tensorwire.device_maps import PeerDeviceMap
from rpc.transports.tensorwire.link import Link, Resources
from rpc.transports.tensorwire.main_reader import FrameDecoder, MainReader
from rpc.transports.tensorwire.receive_buffers import ReceiveBuffers


class Socket:
    """Receives what the test says: bytes, or an error."""

    def __init__(self, found: bytes | Exception) -> None:
        self.found = found

    def recv(self, _: int) -> bytes:
        if isinstance(self.found, Exception):
            raise self.found
        return self.found


def read(found: bytes | Exception) -> MainReader:
    """A reader that has read once."""
    sock: Any = Socket(found)
    buffers = ReceiveBuffers(0)
    resources = Resources(Budget(0), buffers, 1 << 30, CopyThreads("test", 0), 0.0)
    link = Link(resources, "bob", PeerDeviceMap("bob", {}), same_host=False)
    sender = Sender(sock, Unsent(), lambda _: None)
    reader = MainReader(sock, link, 1 << 30, buffers, sender, lambda _: None)
    assert reader.read() == []
    return reader


@pytest.mark.parametrize(
    ("found", "why"),
    [
        (b"", "closed by the other end"),
        (OSError(errno.ECONNRESET, os.strerror(errno.ECONNRESET)), "Connection reset by peer"),
        (MemoryError(), "there is no memory to receive anything"),
    ],
)
def test_a_connection_that_ends_can_be_replaced(found: bytes | Exception, why: str) -> None:
    reader = read(found)
    assert why in reader.over
    assert not reader.garbled


def test_after_bytes_that_are_no_frames_no_connection_helps() -> None:
    reader = read(b"x" * 100)
    assert "cannot be read" in reader.over
    assert reader.garbled


@pytest.mark.interpreted
def test_want_of_memory_while_frames_are_read_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(FrameDecoder, "feed", refuse)
    assert read(b"x" * 100).over == "what it sent cannot be read: MemoryError"


def test_a_socket_that_has_nothing_at_the_moment_is_dry_and_not_over() -> None:
    reader = read(BlockingIOError())
    assert reader.dry
    assert reader.silent
    assert not reader.over
