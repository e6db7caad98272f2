"""TensorWire keeps promises beyond those of others: outsiders, endpoints, bounds, ends."""

from __future__ import annotations

import errno
import itertools
import logging
import os
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from rpc.errors import (
    AgentClosedError,
    DeviceMapError,
    EncodeError,
    QueueFullError,
    RpcError,
    UnknownWorkerError,
    WorkerLostError,
)
from rpc.options import WhenFull
from rpc.runtime import signals as interrupts
from rpc.transports.base import Frame, FrameKind, Peer, Unreceived
from rpc.transports.host.frame_table import Source
from rpc.transports.host.segments import ReceivedSegments
from rpc.transports.tensorwire import Settings, TensorWireTransport
from rpc.transports.tensorwire.address import TensorWireAddress
from rpc.transports.tensorwire.bulk import BulkMover
from rpc.transports.tensorwire.channel import Unsent
from rpc.transports.tensorwire.connector import Connector, configure
from rpc.transports.tensorwire.framing import pack_fixed
from rpc.transports.tensorwire.handshake import ChannelKind, HandshakeError, Identity
from rpc.transports.tensorwire.link import Link
from rpc.transports.tensorwire.main_reader import FrameDecoder
from rpc.transports.tensorwire.peer import RemotePeer
from rpc.transports.tensorwire.receive_buffers import ReceiveBuffers
from rpc.transports.tensorwire.reconnect import Reconnector
from rpc.transports.tensorwire.replies import ReplySide
from rpc.transports.tensorwire.requests import RequestSide
from rpc.transports.tensorwire.wakeup import WakeUp
from rpc.worker_info import WorkerInfo
from tests import waiting
from tests.rpc.transports.conformance import (
    SECONDS,
    Worker,
    check_that_requests_wait,
    introduce,
)
from tests.rpc.transports.tensorwire.bare_connections import connect, shake
from tests.signals import heeding_interrupts

Maker = Callable[..., list[Worker]]


@pytest.fixture
def make() -> Iterator[Maker]:
    """Makes started workers that know each other; closes them."""
    made: list[Worker] = []

    def workers(*each: Settings, known: bool = True) -> list[Worker]:
        found = [
            Worker(TensorWireTransport(settings), WorkerInfo(f"worker{i}", i))
            for i, settings in enumerate(each)
        ]
        made.extend(found)
        for worker in found:
            worker.start()
        introduce(found if known else ())
        return found

    yield workers
    for worker in made:
        worker.close(0.2)


until = partial(waiting.until, seconds=SECONDS)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


# Outsiders.


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


# What this worker lacks itself.


def refuse(_: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_a_peer_is_not_lost_because_this_worker_has_no_descriptors_left(
    make: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = make(Settings(connect_seconds=0.5), Settings())
    tries = itertools.count()

    def lack(sock: socket.socket) -> None:
        if next(tries) < 3:
            raise OSError(errno.EMFILE, "Too many open files")
        configure(sock)

    monkeypatch.setattr("rpc.transports.tensorwire.connector.configure", lack)
    assert a.call(b, b"h").header == b"h"
    assert a.lost == []


def without_large_memory(patched: pytest.MonkeyPatch) -> None:
    take = ReceiveBuffers.take

    def refuse(buffers: ReceiveBuffers, length: int) -> object:
        if length > 1 << 21:
            raise MemoryError(f"{length} bytes cannot be allocated")
        return take(buffers, length)

    patched.setattr(ReceiveBuffers, "take", refuse)


def test_a_message_for_which_there_is_no_memory_says_so_and_no_peer_is_lost(
    make: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = make(Settings(local_paths=False), Settings(local_paths=False))
    b.answer = lambda w, s, f: w.transport.send(
        s, f._replace(kind=FrameKind.REPLY, payload=b"", tensors=(torch.ones(1 << 20),))
    )
    without_large_memory(monkeypatch)
    asked = a.ask(b, b"header", b"payload", torch.ones(1 << 20), torch.ones(1 << 18))
    b.until(lambda: len(b.received) == 1)
    _, frame = b.received[0]
    why = "from worker 'worker0' could not be taken in: 4194304 bytes cannot be allocated"
    assert isinstance(frame.payload, Unreceived)
    assert frame.payload.decode() == f"a message of {7 + (5 << 20)} bytes {why}"
    assert (frame.header, frame.tensors) == (b"header", ())
    assert isinstance(a.reply(asked).payload, Unreceived)
    monkeypatch.undo()
    assert a.call(b, b"h", b"", torch.ones(1 << 20)).tensors[0].sum() == 1 << 20
    assert a.lost == b.lost == []


@pytest.mark.parametrize("local", [True, False])
def test_a_header_for_which_there_is_no_memory_fails_its_call_and_no_other(
    make: Maker, monkeypatch: pytest.MonkeyPatch, local: bool
) -> None:
    a, b = make(Settings(local_paths=local), Settings(local_paths=local))
    large = torch.ones(1 << 19)
    for _ in range(4):  # so that there is shared memory
        a.call(b, b"h", b"", large)
    header = b"first" + bytes(3 << 20)
    b.received.clear()
    without_large_memory(monkeypatch)
    asked = [a.ask(b, header), a.ask(b, header, b"payload", large, torch.ones(9)), a.ask(b, b"h")]
    b.until(lambda: len(b.received) == 3)
    frames = {frame.correlation: frame for _, frame in b.received}
    sizes = ["", f" of {7 + large.nbytes + 36} bytes"]
    for correlation, size in zip(asked, sizes, strict=False):
        frame = frames[correlation]
        assert frame.header == header[: 1 << 18]
        assert isinstance(frame.payload, Unreceived)
        why = f"a message{size} from worker 'worker0' could not be taken in: "
        assert frame.payload.decode().startswith(why)
        assert frame.payload.endswith(b"bytes cannot be allocated")
    assert a.reply(asked[2]).header == b"h"
    monkeypatch.undo()
    for _ in range(20):  # more than there is room for, if no slot came back
        assert a.call(b, header, b"", large).header == header
    assert a.lost == b.lost == []


def test_a_notice_for_which_there_is_no_memory_loses_the_peer(
    make: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = make(Settings(local_paths=False), Settings(local_paths=False))
    without_large_memory(monkeypatch)
    a.notify(b, b"header", torch.ones(1 << 20))
    b.until(lambda: bool(b.lost))
    assert "4194304 bytes cannot be allocated" in b.lost[0][1]


def test_a_message_for_which_a_device_has_no_memory_says_so_and_no_peer_is_lost(
    make: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = make(Settings(), Settings())

    def full(*_: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    b.answer = lambda w, s, f: w.transport.send(s, f._replace(kind=FrameKind.REPLY, tensors=()))
    monkeypatch.setattr("rpc.transports.tensorwire.link.tensor_over", full)
    payload = a.call(b, b"header", b"payload", torch.ones(4)).payload
    assert bytes(payload).endswith(b"could not be taken in: OutOfMemoryError: CUDA out of memory")
    assert a.lost == b.lost == []


def test_without_a_thread_to_connect_a_request_is_refused_and_the_next_is_not(
    make: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = make(Settings(max_bytes_in_flight=4096), Settings())
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RpcError, match="worker 'worker1' cannot be connected to at the mom"):
            a.ask(b, b"h")
        a.notify(b, b"waits")
    assert a.call(b, b"h").header == b"h"
    b.until(lambda: {frame.header for _, frame in b.received} == {b"waits", b"h"})
    assert a.lost == []


def test_without_a_thread_for_bulk_a_request_is_refused_and_the_next_is_not(
    make: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = make(Settings(), Settings())
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refusing("tensorwire-worker0-bulk"))
        with pytest.raises(RpcError, match="worker 'worker1' cannot be connected to at the mom"):
            a.ask(b, b"h")
    assert a.call(b, b"h").header == b"h"
    assert b.call(a, b"h").header == b"h"
    assert a.lost == b.lost == []


def test_a_worker_without_a_thread_for_bulk_is_reached_when_it_has_one(
    make: Maker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    a, b = make(Settings(), Settings())
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refusing("tensorwire-worker1-bulk"))
        asked = a.ask(b, b"h")
        until(lambda: "worker0 cannot be let in at the moment" in caplog.text)
    assert a.reply(asked).header == b"h"
    assert b.call(a, b"h").header == b"h"
    assert a.lost == b.lost == []


@pytest.mark.parametrize(
    ("owner", "name"), [(RequestSide, "add_main"), (BulkMover, "add")], ids=["main", "bulk"]
)
def test_a_worker_that_cannot_read_another_connection_is_reached_when_it_can(
    make: Maker,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    owner: type,
    name: str,
) -> None:
    a, b = make(Settings(), Settings())
    here = b.transport.running().shared  # type: ignore[attr-defined]
    add, errors = getattr(owner, name), [OSError(errno.ENOSPC, "no watch is left")] * 2

    def scarce(side: object, *arguments: Any) -> None:
        if errors and side in (here.requests, here.bulk):
            raise errors.pop()
        add(side, *arguments)

    monkeypatch.setattr(owner, name, scarce)
    asked = a.ask(b, b"h")
    a.until(lambda: asked in a.replies or bool(a.lost))
    assert a.lost == b.lost == []
    assert caplog.text.count("worker0 cannot be let in at the moment") == 2
    assert b.call(a, b"h").header == b"h"


def refusing(name: str) -> Callable[[threading.Thread], None]:
    """``Thread.start`` where the thread of that name cannot be started."""
    start = threading.Thread.start

    def start_others(thread: threading.Thread) -> None:
        if thread.name == name:
            refuse(thread)
        start(thread)

    return start_others


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "no watch is left"), MemoryError()], ids=["watches", "memory"]
)
@pytest.mark.parametrize(
    ("owner", "name"),
    [(ReplySide, "add_main"), (BulkMover, "add"), (Connector, "connect"), (Link, "__init__")],
    ids=["main", "bulk", "connection", "link"],
)
def test_a_worker_that_lacks_something_for_its_first_connection_tries_again(
    make: Maker,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    owner: type,
    name: str,
    error: Exception,
) -> None:
    a, b = make(Settings(), Settings())
    do, errors = getattr(owner, name), [error] * 2

    def scarce(*arguments: Any, **named: Any) -> Any:
        if errors and threading.current_thread().name == "tensorwire-connect-worker1":
            raise errors.pop()
        return do(*arguments, **named)

    monkeypatch.setattr(owner, name, scarce)
    asked = a.ask(b, b"h")
    a.until(lambda: asked in a.replies or bool(a.lost))
    assert a.lost == b.lost == []
    assert not errors
    assert caplog.text.count("no connection to worker worker1 yet: ") == 1
    assert b.call(a, b"h").header == b"h"


def test_a_link_that_cannot_be_made_in_time_loses_the_peer_and_leaves_nothing_behind(
    make: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = make(Settings(connect_seconds=0.2), Settings())

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no watch is left")

    monkeypatch.setattr(ReplySide, "add_main", full)
    a.ask(b, b"h")
    a.until(lambda: bool(a.lost))
    assert "no watch is left" in a.lost[0][1]
    with pytest.raises(WorkerLostError, match="no watch is left"):
        a.notify(b, b"h")


# What cannot be sent, although it looked as if it could.


def without_memory(use: Callable[[torch.Tensor], object], elements: int = 1 << 16) -> None:
    """Has a tensor used that looks like any other, but has no memory of its own."""
    with pytest.raises(RuntimeError, match="data pointer"):
        torch.vmap(use)(torch.ones(2, elements))


@pytest.mark.parametrize("early", [True, False], ids=["first", "later"])
def test_a_tensor_without_memory_fails_its_call_alone(make: Maker, early: bool) -> None:
    a, b = make(Settings(max_bytes_in_flight=1 << 19), Settings())
    if not early:
        a.call(b, b"h")
        until(lambda: link_of(a) is not None)
    for _ in range(3):
        without_memory(lambda tensor: a.ask(b, b"h", b"", tensor))
    assert a.call(b, b"h", b"", torch.ones(1 << 16)).header == b"h"
    assert a.transport.peers[1].window.held == 0  # type: ignore[attr-defined]
    assert a.lost == b.lost == []


def test_a_first_frame_that_cannot_leave_fails_its_call_and_no_other(
    make: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = make(Settings(), Settings())
    send = Link.send

    def refuse(link: Link, frame: Frame, *more: Any) -> None:
        if frame.header == b"bad":
            raise MemoryError("nothing is left")
        send(link, frame, *more)

    monkeypatch.setattr(Link, "send", refuse)
    connect_now = threading.Event()
    opened = Connector.connect
    monkeypatch.setattr(
        Connector, "connect", lambda self: connect_now.wait(SECONDS) and opened(self)
    )
    bad, good = (a.ask(b, header, b"", torch.ones(4)) for header in (b"bad", b"good"))
    a.notify(b, b"bad", torch.ones(4))
    connect_now.set()
    payload = a.reply(bad).payload
    assert isinstance(payload, Unreceived)
    why = b"a message to worker 'worker1' could not be sent: MemoryError: nothing is left"
    assert payload == why
    assert a.reply(good).header == b"good"
    assert a.transport.peers[1].window.held == 0  # type: ignore[attr-defined]
    assert [frame.header for _, frame in b.received] == [b"good"]
    assert a.lost == b.lost == []


def link_of(worker: Worker) -> Link | None:
    """The link that a worker opened to the worker with id 1."""
    return worker.transport.peers[1].outgoing  # type: ignore[attr-defined,no-any-return]


def test_nothing_of_a_message_that_cannot_be_sent_arrives(make: Maker) -> None:
    a, b = make(Settings(local_paths=False), Settings(local_paths=False))
    large = torch.ones(1 << 19)
    a.call(b, b"h")
    until(lambda: link_of(a) is not None)
    without_memory(lambda tensor: a.ask(b, b"h", b"", large, tensor))
    a.call(b, b"h", b"", large)  # comes after what was sent before it
    incoming = b.transport.peers[0].incoming  # type: ignore[attr-defined]
    assert len(incoming.transfers) == 0


def test_nothing_of_a_message_that_cannot_be_put_together_arrives(
    make: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = make(Settings(local_paths=False), Settings(local_paths=False))
    large = torch.ones(1 << 19)
    a.call(b, b"h")
    until(lambda: link_of(a) is not None)
    view, bad = Source.view, bytearray(b"bad")
    monkeypatch.setattr(Source, "view", lambda it: it.size if it.size == len(bad) else view(it))
    with pytest.raises(TypeError):
        a.ask(b, b"h", bad, large)  # type: ignore[arg-type]
    a.call(b, b"h", b"", large)  # comes after what was sent before it
    incoming = b.transport.peers[0].incoming  # type: ignore[attr-defined]
    assert len(incoming.transfers) == 0


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


# Beginnings.


def test_a_start_that_finds_no_descriptors_leaves_none_open() -> None:
    def start() -> bool:
        transport = TensorWireTransport(Settings())
        try:
            Worker(transport, WorkerInfo("worker0", 0)).start()
        except OSError as error:
            assert error.errno == errno.EMFILE  # noqa: PT017
            return False
        finally:
            transport.close(0.1)
        return True

    files, most = descriptors(), resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = {int(each) for each in os.listdir("/proc/self/fd")}
    free = [number for number in range(1000) if number not in taken]
    try:
        for room in range(30):
            resource.setrlimit(resource.RLIMIT_NOFILE, (free[room], most[1]))
            started = start()
            resource.setrlimit(resource.RLIMIT_NOFILE, most)
            assert descriptors() == files
            if started:
                break
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, most)
    assert started
    assert room > 5


# Ends.


def test_nothing_can_be_sent_after_close(make: Maker) -> None:
    a, b = make(Settings(), Settings())
    a.call(b, b"h")
    a.close()
    with pytest.raises(AgentClosedError):
        a.notify(b, b"h")


def test_threads_and_descriptors_are_gone_after_close(make: Maker) -> None:
    threads, files = set(threading.enumerate()), descriptors()
    workers = make(Settings(), Settings(), Settings(local_paths=False))
    large = torch.ones(1 << 18)
    for a in workers:
        for b in workers:
            for _ in range(5):
                kept = a.call(b, b"h", b"x" * 100_000, large)
    for worker in workers:
        worker.close()
        worker.received.clear()
    assert set(threading.enumerate()) == threads
    assert descriptors() == files
    assert kept.tensors[0].sum() == 1 << 18


def test_a_handler_may_close_its_own_transport(make: Maker) -> None:
    a, b = make(Settings(), Settings())
    closed = threading.Event()

    def answer(worker: Worker, sender: int, frame: Frame) -> None:
        worker.transport.close(0.5)
        closed.set()

    b.answer = answer
    a.ask(b, b"h")
    assert closed.wait(SECONDS)
    a.until(lambda: bool(a.lost))


class Interrupt(BaseException):
    """An error such as a signal handler may raise."""


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        pytest.param(RemotePeer, "flush", marks=pytest.mark.interpreted),
        (Reconnector, "join"),
        (threading.Thread, "join"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_close_that_is_interrupted_closes_everything_all_the_same(
    make: Maker, monkeypatch: pytest.MonkeyPatch, owner: type, name: str
) -> None:
    threads, files = set(threading.enumerate()), descriptors()
    a, b = make(Settings(), Settings())
    a.call(b, b"h", b"", torch.ones(1 << 18))
    b.call(a, b"h", b"", torch.ones(1 << 18))
    step, errors = getattr(owner, name), [Interrupt()]

    def interrupted(*arguments: Any) -> Any:
        if errors:
            raise errors.pop()
        return step(*arguments)

    monkeypatch.setattr(owner, name, interrupted)
    with pytest.raises(Interrupt):
        a.close()
    a.closed = True
    b.close()
    a.received.clear()
    b.received.clear()
    a.replies.clear()
    b.replies.clear()
    until(lambda: set(threading.enumerate()) == threads and descriptors() == files)


def test_ctrl_c_in_the_middle_of_a_step_of_closing_waits_until_nothing_is_left_open(
    make: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads, files = set(threading.enumerate()), descriptors()
    a, b = make(Settings(), Settings())
    a.call(b, b"h")
    wake, woken = WakeUp.set, list[WakeUp]()

    def wake_and_interrupt(wake_up: WakeUp) -> None:
        if not woken:
            woken.append(wake_up)
            signal.raise_signal(signal.SIGINT)
        wake(wake_up)

    with heeding_interrupts(), monkeypatch.context() as patched:
        interrupts.use()
        patched.setattr(WakeUp, "set", wake_and_interrupt)
        with pytest.raises(KeyboardInterrupt):
            a.close()
    a.closed = True
    b.close()
    for each in (a, b):
        each.received.clear()
        each.replies.clear()
    until(lambda: set(threading.enumerate()) == threads and descriptors() == files)


def half_of(worker: Worker, peer: int, which: str) -> Link:
    found = getattr(worker.transport.peers[peer], which)  # type: ignore[attr-defined]
    assert isinstance(found, Link)
    return found
