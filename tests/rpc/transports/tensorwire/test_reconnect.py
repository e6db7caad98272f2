"""Connections that break while both ends live: others take their place, and nothing is lost."""

from __future__ import annotations

import errno
import itertools
import os
import re
import socket
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rpc.errors import ANOTHER_ANSWERS, NO_MEMBER, WorkerLostError
from rpc.protocol import resumption
from rpc.transports.base import Frame, FrameKind, Peer
from rpc.transports.tensorwire import Settings
from rpc.transports.tensorwire import reconnect as reconnector
from rpc.transports.tensorwire.address import TensorWireAddress
from rpc.transports.tensorwire.bulk import BulkMover
from rpc.transports.tensorwire.channel import Sender
from rpc.transports.tensorwire.connector import Connector
from rpc.transports.tensorwire.framing import pack_fixed
from rpc.transports.tensorwire.handshake import Identity
from rpc.transports.tensorwire.replies import ReplySide
from rpc.transports.tensorwire.requests import RequestSide
from rpc.worker_info import WorkerInfo
from tests.rpc.transports.conformance import SECONDS, Worker, echo
from tests.rpc.transports.cutter import Cutter, cutting
from tests.rpc.transports.tensorwire.bare_connections import connect, shake
from tests.rpc.transports.tensorwire.certificates import for_everybody
from tests.rpc.transports.tensorwire.transports import Maker
from tests.waiting import until

CALLS = 3000

WAYS = [
    pytest.param(Settings(), id="shared memory"),
    pytest.param(Settings(shared_memory_bytes=0), id="unix"),
    pytest.param(Settings(local_paths=False), id="tcp"),
    pytest.param(Settings(local_paths=False, tls=for_everybody()), id="tls"),
]


def pause(settings: Settings, seconds: float) -> float:
    """Between two cuts; hands are shaken longer with TLS, and must be done some time."""
    return seconds if settings.tls is None else 5 * seconds


def arrivals(*workers: Worker) -> Callable[[], int]:
    """Counts what they have received."""
    return lambda: sum(len(worker.received) for worker in workers)


def asked_of(worker: Worker) -> Counter[bytes]:
    """Counts how often each request arrived."""
    return Counter(frame.header for _, frame in worker.received)


@pytest.mark.parametrize("settings", WAYS)
def test_an_idle_link_that_breaks_is_whole_again(make: Maker, settings: Settings) -> None:
    cutter = Cutter()
    a, b = make(settings, settings)
    a.call(b, b"h")
    b.call(a, b"h")
    for number in range(5):
        assert cutter.cut()
        assert a.call(b, b"%d" % number).header == b"%d" % number
        assert b.call(a, b"%d" % number).header == b"%d" % number
    assert a.lost == b.lost == []


@pytest.mark.parametrize("settings", WAYS)
def test_calls_among_breaks_run_once_and_are_answered_once(make: Maker, settings: Settings) -> None:
    cutter = Cutter()
    a, b = make(settings, settings)
    a.call(b, b"connect")
    with cutting(cutter, pause(settings, 0.02), arrivals(b)) as cuts:
        asked = {a.ask(b, b"%d" % number): number for number in range(CALLS)}
        for correlation, number in asked.items():
            assert a.reply(correlation).header == b"%d" % number
        number = CALLS
        while len(cuts) < 10:
            assert a.call(b, b"%d" % number).header == b"%d" % number
            number += 1
    assert asked_of(b) == {b"connect": 1} | {b"%d" % n: 1 for n in range(number)}
    assert a.lost == b.lost == []


@pytest.mark.parametrize("settings", WAYS)
def test_notices_among_breaks_arrive_once(make: Maker, settings: Settings) -> None:
    cutter = Cutter()
    a, b = make(settings, settings)
    with cutting(cutter, pause(settings, 0.01), arrivals(b)) as cuts:
        number = 0
        while number < CALLS or len(cuts) < 10:
            a.notify(b, b"%d" % number)
            number += 1
            if number % 500 == 0:
                b.until(lambda number=number: len(b.received) >= number)
        b.until(lambda: len(b.received) >= number)
    assert asked_of(b) == {b"%d" % n: 1 for n in range(number)}


@pytest.mark.parametrize("settings", WAYS)
def test_large_tensors_among_breaks_arrive_as_they_were(make: Maker, settings: Settings) -> None:
    cutter = Cutter()
    a, b = make(settings, settings)
    sizes = [3_000, 6_000, 20_000, 300_000, 1_500_000]
    rounds = 15 if settings.tls is None else 5
    with cutting(cutter, pause(settings, 0.015), arrivals(b)) as cuts:
        number = 0
        while number < rounds or len(cuts) < 5:
            sent = [torch.full((size,), number + place) for place, size in enumerate(sizes)]
            a.check_echoes(b, b"%d" % number, b"p" * 70_000, sent)
            b.received.clear()
            number += 1
    assert a.lost == b.lost == []


@pytest.mark.parametrize("settings", WAYS)
def test_a_link_that_breaks_while_it_is_opened_is_opened(make: Maker, settings: Settings) -> None:
    for _ in range(10):
        cutter = Cutter()
        a, b = make(settings, settings)
        with cutting(cutter, pause(settings, 0.0005), itertools.count().__next__) as cuts:
            for number in range(20):
                a.ask(b, b"%d" % number)
            until(lambda cuts=cuts: len(cuts) >= 5)
        a.until(lambda a=a: len(a.replies) == 20 or bool(a.lost))
        assert a.lost == []
        assert asked_of(b) == {b"%d" % n: 1 for n in range(20)}


def test_many_workers_among_breaks_hear_everything_once(make: Maker) -> None:
    cutter = Cutter()
    workers = make(*[Settings(), Settings(local_paths=False)] * 2)
    with cutting(cutter, 0.03, arrivals(*workers)):
        for number in range(300):
            for worker in workers:
                for other in workers:
                    worker.notify(other, b"%d %d" % (worker.info.id, number))
    expected = {b"%d %d" % (sender, n): 1 for sender in range(4) for n in range(300)}
    for worker in workers:
        worker.until(lambda worker=worker: len(worker.received) >= len(expected))
        assert asked_of(worker) == expected


def test_what_a_worker_is_sent_while_a_link_is_broken_waits(make: Maker) -> None:
    cutter = Cutter()
    a, b = make(Settings(local_paths=False), Settings(local_paths=False))
    a.call(b, b"connect")
    released = threading.Event()

    def answer(worker: Worker, sender: int, frame: Frame) -> None:
        assert released.wait(SECONDS)
        echo(worker, sender, frame)

    b.answer = answer
    asked = [a.ask(b, b"%d" % number, b"x" * 20_000) for number in range(50)]
    b.until(lambda: len(b.received) > 1)
    cutter.cut()
    released.set()
    for number, correlation in enumerate(asked):
        assert a.reply(correlation).header == b"%d" % number


def test_a_connection_that_is_not_answered_leaves_time_for_others(
    make: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_connection = Connector.replace
    given: list[float] = []

    def first_goes_unanswered(self: Connector, *arguments: Any) -> Any:
        given.append(arguments[-1])
        if len(given) == 1:
            raise TimeoutError("no answer came")
        return replace_connection(self, *arguments)

    cutter = Cutter()
    a, b = make(Settings(local_paths=False), Settings(local_paths=False))
    a.call(b, b"connect")
    monkeypatch.setattr(Connector, "replace", first_goes_unanswered)
    assert cutter.cut()
    assert a.call(b, b"h").header == b"h"
    assert len(given) >= 2
    assert max(given) <= Settings().resume_seconds / 2


NO_WATCH = OSError(errno.ENOSPC, "no watch is left")


def refuse_watches(
    monkeypatch: pytest.MonkeyPatch,
    owner: type,
    name: str,
    refused: Callable[[], bool],
    error: Exception = NO_WATCH,
) -> None:
    """Has epoll take no descriptor at times."""
    add = getattr(owner, name)

    def may_refuse(*arguments: Any) -> None:
        if refused():
            raise error
        add(*arguments)

    monkeypatch.setattr(owner, name, may_refuse)


@pytest.mark.parametrize("error", [NO_WATCH, MemoryError()], ids=["watches", "memory"])
@pytest.mark.parametrize(
    ("owner", "name"),
    [(ReplySide, "add_main"), (RequestSide, "add_main"), (BulkMover, "add")],
    ids=["opened", "accepted", "bulk"],
)
def test_a_connection_that_cannot_be_read_at_the_moment_is_replaced_once_more(
    make: Maker, monkeypatch: pytest.MonkeyPatch, owner: type, name: str, error: Exception
) -> None:
    cutter = Cutter()
    a, b = make(Settings(local_paths=False), Settings(local_paths=False))
    large = torch.ones(1 << 19)
    times: list[int] = []
    refuse_watches(monkeypatch, owner, name, lambda: bool(times) and bool(times.pop()), error)
    a.call(b, b"connect", b"", large)
    times += [1, 2, 3]
    assert cutter.cut()
    asked = a.ask(b, b"h", b"", large)
    a.until(lambda: asked in a.replies or bool(a.lost))
    assert a.lost == b.lost == []
    until(lambda: not times)
    assert a.call(b, b"h", b"", large).header == b"h"


def test_connections_that_cannot_be_read_are_none_on_which_something_was_sent(
    make: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = make(*[Settings(local_paths=False, resume_seconds=SECONDS)] * 2)
    monkeypatch.setattr(reconnector, "_LONGEST_PAUSE_SECONDS", 0.001)
    times: list[int] = []
    refuse_watches(monkeypatch, ReplySide, "add_main", lambda: bool(times) and bool(times.pop()))
    a.call(b, b"connect")
    peer = a.transport.peers[1]  # type: ignore[attr-defined]
    until(lambda: peer.outgoing is not None)  # the reply may come first
    sender = peer.outgoing.main
    times += range(1, 2 * resumption.MOST_IN_VAIN)
    sender.shutdown()
    assert a.call(b, b"lost on the way").header == b"lost on the way"
    assert not times


def test_a_connection_that_can_never_be_read_loses_the_peer_when_its_time_is_over(
    make: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    cutter = Cutter()
    a, b = make(*[Settings(local_paths=False, resume_seconds=0.3)] * 2)
    full = threading.Event()
    refuse_watches(monkeypatch, ReplySide, "add_main", full.is_set)
    a.call(b, b"connect")
    full.set()
    assert cutter.cut()
    a.until(lambda: bool(a.lost))
    assert re.search("not opened again within 0.3 s: (.* no watch|no answer)", a.lost[0][1])


@pytest.mark.parametrize("settings", WAYS)
def test_a_worker_that_is_gone_is_lost_without_waiting_for_the_bound(
    make: Maker, settings: Settings
) -> None:
    a, b = make(*[replace(settings, resume_seconds=1000.0)] * 2)
    a.call(b, b"h")
    b.close()
    a.until(lambda: bool(a.lost))
    assert "closed by the other end" in a.lost[0][1]


def test_a_worker_that_does_not_let_us_in_again_is_lost_when_the_bound_is_over(
    make: Maker,
) -> None:
    cutter = Cutter()
    a, b = make(*[Settings(local_paths=False, resume_seconds=0.3)] * 2)
    a.call(b, b"h")
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        for connection in a.transport.peers[1].connections.values():  # type: ignore[attr-defined]
            connection.endpoint = replace(connection.endpoint, where=deaf.getsockname()[:2])
        cutter.cut()
        a.until(lambda: bool(a.lost))
    assert "not opened again within 0.3 s" in a.lost[0][1]
    with pytest.raises(WorkerLostError, match=r"within 0\.3 s"):
        a.notify(b, b"h")


def test_a_worker_that_does_not_come_back_is_lost_when_the_bound_is_over(make: Maker) -> None:
    (a,) = make(Settings(local_paths=False, resume_seconds=0.3))
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        address = TensorWireAddress("", "", (deaf.getsockname()[:2],), b"secret")
        a.transport.add_peer(Peer(WorkerInfo("worker1", 1), 1, address.encode()))
        with connect(a, unix=False) as sock:
            shake(sock, a, Identity(1, 1))
            sock.sendall(pack_fixed(FrameKind.NOTICE, 0, 0, 0, 0, 0))
            a.until(lambda: bool(a.received))
        a.until(lambda: bool(a.lost))
    assert "not opened again within 0.3 s" in a.lost[0][1]


def test_a_worker_that_was_removed_hears_so_when_it_comes_back(make: Maker) -> None:
    a, b = make(Settings(resume_seconds=1000.0), Settings(resume_seconds=1000.0))
    a.call(b, b"h")
    b.transport.remove_peer(0)
    a.until(lambda: bool(a.lost))
    assert f"it answers: refused: {NO_MEMBER}" in a.lost[0][1]
    assert ANOTHER_ANSWERS not in a.lost[0][1]
    assert b.lost == []


@pytest.mark.parametrize("settings", WAYS[1:3])  # others read it here: Python ends then
def test_a_worker_is_lost_to_which_memory_is_sent_that_cannot_be_read(
    make: Maker, settings: Settings, tmp_path: Path
) -> None:
    """A file that became shorter after it was mapped, of which the system cannot send the end."""
    a, b = make(settings, settings)
    a.call(b, b"h")
    file = tmp_path / "tensor"
    file.write_bytes(bytes(8 << 20))
    tensor = torch.from_file(str(file), shared=True, size=2 << 20)
    os.truncate(file, 4096)
    a.ask(b, b"h", b"", tensor)
    for worker in (a, b):
        worker.until(lambda worker=worker: bool(worker.lost))
    assert "what was to be sent to it cannot be sent: Bad address" in a.lost[0][1]


def test_without_a_bound_a_break_is_a_loss_at_once(make: Maker) -> None:
    cutter = Cutter()
    a, b = make(Settings(resume_seconds=0), Settings(resume_seconds=0))
    a.call(b, b"h")
    cutter.cut()
    for worker in (a, b):
        worker.until(lambda worker=worker: bool(worker.lost))
        assert len(worker.lost) == 1


def test_a_loss_ends_what_waits_for_a_broken_link(make: Maker) -> None:
    cutter = Cutter()
    a, b = make(*[Settings(local_paths=False, resume_seconds=1000.0)] * 2)
    b.answer = lambda *_: None
    a.ask(b, b"h")
    b.until(lambda: bool(b.received))
    b.transport.running().acceptor.close()  # type: ignore[attr-defined]
    cutter.cut()
    a.until(lambda: bool(a.lost))
    assert "nobody listens" in a.lost[0][1]
    until(lambda: a.transport.peers[1].is_settled())  # type: ignore[attr-defined]


def keeps_memory_of_others(worker: Worker, peer: Worker) -> bool:
    """True if what is remembered is more than copies of a few bytes."""
    connections = worker.transport.peers[peer.info.id].connections  # type: ignore[attr-defined]
    return any(not isinstance(frame, bytes) for s in connections for frame in s.unacknowledged)


@pytest.mark.parametrize("settings", WAYS)
def test_a_sender_does_not_keep_the_users_memory_long(make: Maker, settings: Settings) -> None:
    a, b = make(settings, settings)
    for size in (4_500, 12_000, 100_000, 3_000_000):
        assert len(a.call(b, b"h", b"", torch.zeros(size)).tensors[0]) == size
    until(lambda: not keeps_memory_of_others(a, b))
    until(lambda: not keeps_memory_of_others(b, a))


def test_an_attempt_that_fails_as_nobody_reckoned_with_is_followed_by_another(
    make: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    cutter = Cutter()
    a, b = make(Settings(), Settings())
    a.call(b, b"h")
    opens, failed = Connector.replace, list[Any]()

    def fail_at_first(*args: Any) -> Any:
        if len(failed) < 3:
            failed.append(args)
            raise MemoryError
        return opens(*args)

    monkeypatch.setattr(Connector, "replace", fail_at_first)
    assert cutter.cut()
    assert a.call(b, b"again").header == b"again"
    assert len(failed) == 3
    assert a.lost == b.lost == []


def test_a_link_that_cannot_be_put_together_again_is_given_up(
    make: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    cutter = Cutter()
    a, b = make(Settings(), Settings())
    a.call(b, b"h")

    def fail(*_: object) -> None:
        raise RuntimeError

    monkeypatch.setattr(Sender, "resume", fail)
    assert cutter.cut()
    a.until(lambda: bool(a.lost))
    b.until(lambda: bool(b.lost))
    reason = re.compile(r"\w.*, and cannot be resumed: RuntimeError")
    assert any(reason.match(w.lost[0][1]) for w in (a, b))


def test_without_a_thread_to_reconnect_a_peer_is_given_up(
    make: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name.startswith("tensorwire-reconnect-worker1"):
            raise RuntimeError("can't start new thread")
        start(thread)

    cutter = Cutter()
    a, b = make(Settings(), Settings())
    a.call(b, b"h")
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        assert cutter.cut()
        a.until(lambda: bool(a.lost))
