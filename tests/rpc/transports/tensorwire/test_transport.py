"""TensorWire keeps promises beyond those of others: outsiders, endpoints, bounds, ends."""

from __future__ import annotations

import errno
import itertools
import logging
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from rpc.errors import (
    DeviceMapError,
    EncodeError,
    QueueFullError,
    WorkerLostError,
)
from rpc.options import WhenFull
from rpc.transports.base import Frame, FrameKind, Peer
from rpc.transports.host.segments import ReceivedSegments
from rpc.transports.tensorwire import Settings
from rpc.transports.tensorwire.address import TensorWireAddress
from rpc.transports.tensorwire.channel import Unsent
from rpc.transports.tensorwire.framing import pack_fixed
from rpc.transports.tensorwire.handshake import Identity
from rpc.transports.tensorwire.link import Link
from rpc.transports.tensorwire.main_reader import FrameDecoder
from rpc.worker_info import WorkerInfo
from tests.rpc.transports.conformance import (
    SECONDS,
    Worker,
    check_that_requests_wait,
)
from tests.rpc.transports.tensorwire.bare_connections import connect, shake
from tests.rpc.transports.tensorwire.transports import (
    Maker,
    link_of,
    until,
)

# Endpoints.


def spoil(worker: Worker, **fields: object) -> Peer:
    """The worker as a peer whose address is partly wrong."""
    address = replace(TensorWireAddress.decode(worker.address), **fields)  # type: ignore[arg-type]
    return replace(worker.peer(), address=address.encode())


def test_a_unix_socket_that_leads_elsewhere_falls_back_to_tcp_with_one_line(
    make: Maker, caplog: pytest.LogCaptureFixture
) -> None:
    a, b, c = make(Settings(), Settings(), Settings(), known=False)
    wrong = TensorWireAddress.decode(c.address).unix_name
    a.transport.add_peer(spoil(b, unix_name=wrong))
    b.transport.add_peer(a.peer())
    with caplog.at_level(logging.WARNING, "rpc.transports.tensorwire"):
        large = torch.arange(100_000)
        for _ in range(3):
            assert torch.equal(a.call(b, b"h", b"", large).tensors[0], large)
    (record,) = caplog.records
    assert "reached over TCP, although it seems to be on this host" in record.getMessage()
    assert a.lost == b.lost == []


def test_a_neighbour_that_is_gone_is_no_matter_of_endpoints(
    make: Maker, caplog: pytest.LogCaptureFixture
) -> None:
    a, b = make(Settings(), Settings())
    b.close()
    with caplog.at_level(logging.WARNING, "rpc.transports.tensorwire"):
        a.notify(b, b"h")
        a.until(lambda: bool(a.lost))
    assert caplog.records == []
    assert "Unix socket" in a.lost[0][1]


def test_another_host_is_reached_by_tcp_without_a_word(
    make: Maker, caplog: pytest.LogCaptureFixture
) -> None:
    a, b = make(Settings(), Settings(), known=False)
    a.transport.add_peer(spoil(b, host="another boot/4026531840", unix_name="nobody"))
    b.transport.add_peer(a.peer())
    with caplog.at_level(logging.WARNING, "rpc.transports.tensorwire"):
        assert a.call(b, b"h").header == b"h"
    assert caplog.records == []


def test_addresses_are_tried_in_turn(make: Maker) -> None:
    a, b = make(Settings(local_paths=False), Settings(local_paths=False), known=False)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        nobody = closed.getsockname()[:2]
    tcp = (nobody, *TensorWireAddress.decode(b.address).tcp)
    a.transport.add_peer(spoil(b, tcp=tcp))
    b.transport.add_peer(a.peer())
    assert a.call(b, b"h").header == b"h"


def test_a_peer_that_cannot_be_reached_is_lost_with_what_was_tried(make: Maker) -> None:
    (a,) = make(Settings(local_paths=False))
    with socket.create_server(("127.0.0.1", 0)) as closed:
        nobody = closed.getsockname()[:2]
    address = TensorWireAddress("", "", (nobody,), b"secret")
    a.transport.add_peer(Peer(WorkerInfo("nobody", 5), 1, address.encode()))
    a.transport.send(5, Frame(FrameKind.NOTICE, 0, b"h"))
    a.until(lambda: bool(a.lost))
    assert str(nobody[1]) in a.lost[0][1]
    with pytest.raises(WorkerLostError):
        a.transport.send(5, Frame(FrameKind.NOTICE, 0, b"h"))


def test_a_frozen_peer_delays_neither_others_nor_closing(make: Maker) -> None:
    a, b = make(Settings(local_paths=False, connect_seconds=60), Settings(local_paths=False))
    with socket.create_server(("127.0.0.1", 0)) as frozen:
        address = TensorWireAddress("", "", (frozen.getsockname()[:2],), b"secret")
        a.transport.add_peer(Peer(WorkerInfo("frozen", 5), 1, address.encode()))
        a.transport.send(5, Frame(FrameKind.NOTICE, 0, b"h"))
        assert a.call(b, b"h").header == b"h"
        began = time.monotonic()
        a.close(0.1)
        assert time.monotonic() - began < 5


def test_listening_stays_on_the_loopback_interface_unless_told_otherwise(make: Maker) -> None:
    a, b = make(Settings(), Settings(bind_address="0.0.0.0"))
    assert {host for host, _ in TensorWireAddress.decode(a.address).tcp} == {"127.0.0.1"}
    reachable = {host for host, _ in TensorWireAddress.decode(b.address).tcp}
    assert "127.0.0.1" in reachable
    assert "0.0.0.0" not in reachable


def test_large_tensors_take_shared_memory_and_give_it_back(make: Maker) -> None:
    a, b = make(Settings(shared_memory_bytes=24 << 20), Settings())
    large = torch.ones(1 << 20)

    def both_ways_are_ready() -> bool:
        b.received.clear()
        answer = a.call(b, b"h", b"", large)
        return is_mapped(answer.tensors[0]) and is_mapped(b.received[0][1].tensors[0])

    until(both_ways_are_ready)
    for _ in range(50):
        b.received.clear()
        assert is_mapped(a.call(b, b"h", b"", large).tensors[0])
        assert is_mapped(b.received[0][1].tensors[0])


def is_mapped(tensor: torch.Tensor) -> bool:
    """True if a tensor lives in a shared segment."""
    address = tensor.data_ptr()
    with open("/proc/self/maps") as maps:
        for line in maps:
            start, end = (int(part, 16) for part in line.split()[0].split("-"))
            if start <= address < end:
                return "memfd:tensorwire" in line
    return False


def test_a_full_pool_falls_back_to_the_socket(make: Maker) -> None:
    a, b = make(Settings(shared_memory_bytes=20 << 20), Settings())
    large = torch.ones(1 << 20)

    def is_ready() -> bool:
        b.received.clear()
        a.call(b, b"h", b"", large)
        return is_mapped(b.received[0][1].tensors[0])

    until(is_ready)
    b.received.clear()
    for number in range(20):
        a.notify(b, b"%d" % number, large * number)
    b.until(lambda: len(b.received) == 20)
    found = {int(frame.header): frame.tensors[0] for _, frame in b.received}
    assert all(bool((found[number] == number).all()) for number in range(20))
    endpoints = {is_mapped(tensor) for tensor in found.values()}
    assert endpoints == {True, False}


def test_shared_memory_that_the_receiver_lacked_the_means_for_is_used_when_it_has_them(
    make: Maker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("rpc.transports.host.backoff.FIRST_PAUSE_SECONDS", 0.001)
    add, refused = ReceivedSegments.add, itertools.count(1)

    def lack(self: ReceivedSegments, *arguments: Any) -> None:
        if next(refused) <= 4:
            raise OSError(errno.ENOMEM, "nothing is left")
        add(self, *arguments)

    monkeypatch.setattr(ReceivedSegments, "add", lack)
    a, b = make(Settings(), Settings())
    large = torch.ones(1 << 18)

    def is_shared() -> bool:
        b.received.clear()
        a.call(b, b"h", b"", large)
        return is_mapped(b.received[0][1].tensors[0])

    until(is_shared)
    said = [record.getMessage() for record in caplog.records]
    assert len([line for line in said if "worker1 cannot map shared memory" in line]) == 1
    assert a.lost == b.lost == []


def test_small_calls_overtake_a_large_one_over_tcp(make: Maker) -> None:
    a, b = make(Settings(local_paths=False), Settings(local_paths=False))
    a.call(b, b"connect")
    huge = torch.zeros(256 << 20, dtype=torch.uint8)
    arrived = threading.Event()

    def ask() -> None:
        assert a.call(b, b"huge", b"", huge).tensors[0].nbytes == 256 << 20
        arrived.set()

    asking = threading.Thread(target=ask)
    asking.start()
    overtaken = 0
    while not arrived.is_set():
        a.call(b, b"small")
        overtaken += 1
    asking.join()
    assert overtaken > 5


# Bounds.


def test_at_the_bound_a_request_is_refused_if_asked_for(make: Maker) -> None:
    settings = Settings(max_bytes_in_flight=64 << 10, when_full=WhenFull.RAISE)
    a, b = make(settings, settings)
    b.answer = lambda *_: None
    for _ in range(16):
        a.ask(b, b"h")
    with pytest.raises(QueueFullError, match="max_bytes_in_flight"):
        a.ask(b, b"h")
    b.until(lambda: len(b.received) == 16)


def in_time(work: Callable[[], object], seconds: float = SECONDS) -> bool:
    """True if something ends in so many seconds; one that does not is left behind."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    return not thread.is_alive()


def test_a_notice_is_neither_refused_nor_waits_when_calls_are(make: Maker) -> None:
    settings = Settings(max_bytes_in_flight=64 << 10, when_full=WhenFull.RAISE)
    a, b = make(settings, settings)
    a.call(b, b"h")
    until(lambda: link_of(a) is not None)  # the reply may come first
    half_of(a, 1, "outgoing").unsent.add(1 << 20)  # as if the sockets were full
    assert in_time(lambda: a.notify(b, b"a reference is free"))
    b.until(lambda: b"a reference is free" in [frame.header for _, frame in b.received])
    half_of(a, 1, "outgoing").unsent.add(-(1 << 20))


def replying_to_one_that_is_stuck(
    make: Maker, patience: float
) -> tuple[Callable[[], object], Unsent]:
    """A sender of replies to a worker that takes none, and where what it has not taken counts."""
    a, b = make(Settings(), Settings(max_bytes_in_flight=64 << 10, stuck_seconds=patience))
    b.answer = lambda *_: None
    asked = a.ask(b, b"h")
    b.until(lambda: len(b.received) == 1)
    unsent = half_of(b, 0, "incoming").unsent
    unsent.add(1 << 20)
    frame = Frame(FrameKind.REPLY, asked, b"reply")
    return lambda: b.transport.send(0, frame), unsent


def test_a_reply_waits_until_others_have_left(make: Maker) -> None:
    reply, unsent = replying_to_one_that_is_stuck(make, SECONDS)
    sending = threading.Thread(target=reply)
    sending.start()
    until(lambda: unsent.waiters > 0)
    unsent.add(-(1 << 20))
    sending.join(SECONDS)
    assert not sending.is_alive()


def test_a_reply_to_a_worker_that_takes_none_holds_no_thread_for_good(make: Maker) -> None:
    reply, unsent = replying_to_one_that_is_stuck(make, 0.05)
    assert in_time(reply)
    unsent.add(-(1 << 20))


def test_the_main_thread_does_not_wait_to_send_a_reply(make: Maker) -> None:
    assert threading.current_thread() is threading.main_thread()
    reply, unsent = replying_to_one_that_is_stuck(make, SECONDS)
    began = time.monotonic()
    reply()
    assert time.monotonic() - began < SECONDS / 2
    unsent.add(-(1 << 20))


def test_at_the_bound_a_request_waits_for_replies(make: Maker) -> None:
    a, b = make(Settings(max_bytes_in_flight=64 << 10), Settings())
    check_that_requests_wait(a, b, room=16)


def test_a_request_that_waits_at_the_bound_learns_of_the_loss(make: Maker) -> None:
    a, b = make(Settings(max_bytes_in_flight=8192), Settings())
    b.answer = lambda *_: None
    a.ask(b, b"h")
    a.ask(b, b"h")
    errors: list[Exception] = []

    def ask() -> None:
        try:
            a.ask(b, b"h")
        except WorkerLostError as error:
            errors.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    b.until(lambda: len(b.received) == 2)
    b.close()
    asking.join(SECONDS)
    assert len(errors) == 1


def test_replies_to_someone_who_does_not_read_wait_until_it_reads(make: Maker) -> None:
    settings = Settings(max_bytes_in_flight=1 << 20, local_paths=False)
    (a,) = make(settings)
    a.transport.add_peer(Peer(WorkerInfo("reader", 1), 1, a.address))
    a.answer = lambda w, s, f: w.transport.send(
        s, Frame(FrameKind.REPLY, f.correlation, b"", bytes(10_000))
    )
    with connect(a, unix=False) as sock:
        shake(sock, a, Identity(1, 1))
        for number in range(1500):
            sock.sendall(pack_fixed(1, number, number, 0, 0, 0))
        a.until(lambda: len(a.received) > 100)
        pause = threading.Event()
        seen = -1
        while len(a.received) != seen:
            seen = len(a.received)
            pause.wait(0.2)
        decoder, got = FrameDecoder(1 << 20), 0
        while got < 1500:
            piece = sock.recv(1 << 17)
            assert piece
            got += len(decoder.feed(piece))
        a.until(lambda: len(a.received) == 1500)


def test_a_message_beyond_the_limit_is_refused_by_its_sender(make: Maker) -> None:
    a, b = make(Settings(max_message_bytes=1 << 20), Settings())
    with pytest.raises(EncodeError, match="max_message_bytes"):
        a.ask(b, b"h", bytes(1 << 20))
    with pytest.raises(EncodeError, match="max_message_bytes"):
        a.ask(b, b"h", b"", torch.zeros(1 << 18))
    assert a.call(b, b"h").header == b"h"


def test_a_message_beyond_the_receivers_limit_loses_the_sender(make: Maker) -> None:
    a, b = make(Settings(), Settings(max_message_bytes=1 << 20))
    a.ask(b, b"h", bytes(2 << 20))
    b.until(lambda: bool(b.lost))
    assert "max_message_bytes" in b.lost[0][1]


def test_what_cannot_be_sent_is_refused_before_anything_leaves(make: Maker) -> None:
    a, b = make(Settings(), Settings())
    good, bad = torch.zeros(100_000), torch.zeros(4, 4)[:, :2]
    with pytest.raises(EncodeError):
        a.ask(b, b"h", b"", good, bad)
    with pytest.raises(DeviceMapError, match="set_device_map"):
        a.ask(b, b"h", b"", torch.zeros(2, device="meta"))
    assert a.call(b, b"h").header == b"h"
    assert len(b.received) == 1


def half_of(worker: Worker, peer: int, which: str) -> Link:
    found = getattr(worker.transport.peers[peer], which)  # type: ignore[attr-defined]
    assert isinstance(found, Link)
    return found
