"""A worker that lacks memory, threads or descriptors fails single calls and loses nobody."""

from __future__ import annotations

import errno
import itertools
import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from rpc.errors import (
    RpcError,
    WorkerLostError,
)
from rpc.transports.base import Frame, FrameKind, Unreceived
from rpc.transports.host.frame_table import Source
from rpc.transports.tensorwire import Settings
from rpc.transports.tensorwire.bulk import BulkMover
from rpc.transports.tensorwire.connector import Connector, configure
from rpc.transports.tensorwire.link import Link
from rpc.transports.tensorwire.receive_buffers import ReceiveBuffers
from rpc.transports.tensorwire.replies import ReplySide
from rpc.transports.tensorwire.requests import RequestSide
from tests.rpc.transports.conformance import (
    SECONDS,
)
from tests.rpc.transports.tensorwire.transports import (
    Maker,
    link_of,
    until,
)


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
