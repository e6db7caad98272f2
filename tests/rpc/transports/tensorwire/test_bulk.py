"""The thread that moves large data: whatever becomes of one channel, it serves the others."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from functools import partial

import pytest

from rpc.transports.host.copying import CopyThreads
from rpc.transports.host.segments import Budget
from rpc.transports.tensorwire.bulk import BulkChannel, BulkEvents, BulkMover
from rpc.transports.tensorwire.channel import Sender, Unsent
from rpc.transports.tensorwire.device_maps import PeerDeviceMap
from rpc.transports.tensorwire.framing import BulkDecoder, WireKind, pack_fixed, pack_pair
from rpc.transports.tensorwire.link import Link, Resources
from rpc.transports.tensorwire.receive_buffers import ReceiveBuffers
from tests.rpc.transports.conformance import SECONDS
from tests.rpc.transports.tensorwire.descriptors import to_be_closed
from tests.waiting import until

LIMIT = 1 << 30


class End:
    """One served channel, and the other end of its socket."""

    def __init__(self, mover: BulkMover) -> None:
        self.mover = mover
        mine, self.other = socket.socketpair()
        mine.setblocking(False)
        self.other.settimeout(SECONDS)
        resources = Resources(
            Budget(LIMIT), ReceiveBuffers(LIMIT), LIMIT, CopyThreads("test", 0), 0.0
        )
        self.link = Link(resources, "bob", PeerDeviceMap("bob", {}), same_host=True)
        self.sender = Sender(mine, Unsent(), partial(mover.watch_writable, mine))
        self.reasons: list[str] = []
        events = BulkEvents(lambda _: None, self.ended)
        self.channel = BulkChannel(self.sender, self.link, events, lambda _: None)
        mover.add(mine, self.channel)

    def ended(self, reason: str) -> None:
        """Does as a peer would: has the socket not read any more."""
        self.reasons.append(reason)
        self.mover.remove(self.sender.sock)

    def offer(self) -> None:
        """The other end offers a segment without its descriptor, which is answered."""
        header = pack_pair(4096, 0)
        self.other.sendall(pack_fixed(WireKind.SEGMENT, 7, 0, len(header), 0, 0) + header)

    def is_served(self) -> bool:
        """True if an offer is answered."""
        self.offer()
        return bool(self.other.recv(1000))

    def close(self) -> None:
        self.mover.remove(self.sender.sock)
        self.sender.close()
        self.other.close()
        self.link.close()


@pytest.fixture
def ends() -> Iterator[tuple[End, End]]:
    mover = BulkMover("test-bulk")
    made = End(mover), End(mover)
    yield made
    for end in made:
        end.close()
    mover.close()


def failing(patched: pytest.MonkeyPatch, channel: BulkChannel, error: BaseException) -> None:
    """Has something fail that no channel reckons with."""

    def fail(decoder: BulkDecoder) -> memoryview:
        if decoder is channel._decoder:
            raise error
        return buffer(decoder)

    buffer = BulkDecoder.buffer
    patched.setattr(BulkDecoder, "buffer", fail)


@pytest.mark.parametrize("error", [MemoryError("nothing is left"), SystemExit("not for this")])
def test_a_channel_that_fails_ends_and_says_so_and_the_others_are_served(
    ends: tuple[End, End],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: BaseException,
) -> None:
    bad, good = ends
    failing(monkeypatch, bad.channel, error)
    bad.offer()
    assert good.is_served()
    until(lambda: bool(bad.reasons))
    why = f"a bulk connection cannot be served: {type(error).__name__}: {error}"
    assert bad.reasons == [why]
    assert bad.channel.garbled
    assert not good.channel.garbled
    assert str(error) in caplog.text


def test_descriptors_that_arrive_while_a_channel_is_removed_are_closed(
    ends: tuple[End, End], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of a message of which only the beginning has arrived."""
    left, good = ends
    receive, begins, goes_on = left.channel._receive, threading.Event(), threading.Event()

    def slow(buffer: memoryview) -> int:
        begins.set()
        assert goes_on.wait(SECONDS)
        return receive(buffer)

    monkeypatch.setattr(left.channel, "_receive", slow)
    with to_be_closed() as descriptor:
        socket.send_fds(left.other, [b"begin"], [descriptor])
        os.close(descriptor)
        assert begins.wait(SECONDS)
        left.mover.remove(left.sender.sock)
        goes_on.set()
        assert good.is_served()


def test_a_channel_without_memory_to_receive_breaks_and_can_be_replaced(
    ends: tuple[End, End], monkeypatch: pytest.MonkeyPatch
) -> None:
    bad, good = ends

    def no_memory(_: memoryview) -> int:
        raise MemoryError

    monkeypatch.setattr(bad.channel, "_receive", no_memory)
    bad.offer()
    assert good.is_served()
    until(lambda: bool(bad.reasons))
    assert "there is no memory to receive anything" in bad.reasons[0]
    assert not bad.channel.garbled


def test_a_channel_that_cannot_be_ended_is_not_served_again_and_again(
    ends: tuple[End, End], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bad, good = ends
    failing(monkeypatch, bad.channel, MemoryError("nothing is left"))

    def refuse(_: str) -> None:
        raise RuntimeError("it cannot be ended")

    bad.channel._events = BulkEvents(lambda _: None, refuse)
    bad.offer()
    until(lambda: "a channel could not be ended" in caplog.text)
    assert good.is_served()
    assert caplog.text.count("not dealt with") == 1
