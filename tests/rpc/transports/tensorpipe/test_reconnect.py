"""TensorPipe's pipes that break while both ends live: others take their place, nothing is lost."""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rpc.errors import WorkerLostError
from rpc.ids import Life
from rpc.transports.base import Frame, Peer
from rpc.transports.tensorpipe.ledger import Calls, Served
from rpc.transports.tensorpipe.links import Link
from rpc.transports.tensorpipe.reconnect import Mender
from rpc.transports.tensorpipe.transport import available
from rpc.worker_info import WorkerInfo
from tests.rpc.transports.conformance import SECONDS, Worker, echo, introduce
from tests.rpc.transports.tensorpipe.process import (
    RemoteTransport,
    Workplace,
    place_of,
    shares,
    workplaces,
)
from tests.signals import freeze
from tests.waiting import until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.usefixtures("process_server"),
    pytest.mark.xdist_group("tensorpipe"),
    pytest.mark.skipif(not available(), reason="this torch has no TensorPipe"),
]

Maker = Callable[..., list[Worker]]
Options = dict[str, Any]

UV: Options = {"_transports": ["uv"]}
PATIENT: Options = {"link_resume_timeout": 1000.0}
ROADS = [pytest.param(UV, id="uv"), pytest.param({}, id="shm")]
CALLS = 500
AT_ONCE = 25
CUTS = 5


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Workplace]]:
    with workplaces(tmp_path_factory.mktemp("stderr"), 2) as made:
        yield made


@pytest.fixture
def victim(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workplace]:
    """A process to be killed."""
    place = Workplace(tmp_path_factory.mktemp("victim") / "stderr")
    yield place
    with suppress(ProcessLookupError):  # a test killed it
        os.kill(place.pid, signal.SIGCONT)
    place.kill()
    place.end()


@pytest.fixture
def make(places: list[Workplace]) -> Iterator[Maker]:
    """Makes two workers that know each other, each in a process of its own; closes them."""
    made: list[Worker] = []

    def workers(
        *each: Options, among: list[Workplace] = places, acquainted: bool = True
    ) -> list[Worker]:
        for number, (options, place) in enumerate(zip(each, among, strict=True)):
            transport = RemoteTransport(place, **options)
            made.append(Worker(transport, WorkerInfo(f"worker{number}", number)))
            made[-1].start()
        introduce(made if acquainted else ())
        return made

    yield workers
    for worker in made:
        worker.close(0.5)


@contextmanager
def cuts(worker: Worker) -> Iterator[Callable[[], int]]:
    """Breaks all connections whenever they are whole; tells how often."""
    place_of(worker).call("cut_every", 0.02)
    try:
        yield lambda: int(place_of(worker).call("cuts_so_far"))
    finally:
        place_of(worker).call("stop_cutting")


def cut(worker: Worker) -> None:
    """Breaks the worker's connections once all are there.

    One that breaks while it is being opened is the end of torch's listener.
    """
    until(lambda: place_of(worker).call("is_whole"))
    assert place_of(worker).call("cut")


def asked_of(worker: Worker) -> Counter[bytes]:
    """How often each request arrived."""
    return Counter(frame.header for _, frame in worker.received)


def freeze_for_good(worker: Worker) -> None:
    """Stops the worker's process, which will not be asked to close."""
    freeze(place_of(worker).pid)
    worker.closed = True


@pytest.mark.parametrize("options", ROADS)
def test_calls_to_oneself_need_no_pipe(make: Maker, options: Options) -> None:
    a, b = make(options, options)
    assert a.call(b, b"hello").header == b"hello"
    cut(a)
    assert a.call(a, b"myself", b"", torch.ones(50_000)).tensors[0].sum() == 50_000
    assert a.call(b, b"hello").header == b"hello"


@pytest.mark.parametrize("options", ROADS)
def test_an_idle_link_that_breaks_is_whole_again(make: Maker, options: Options) -> None:
    a, b = make(options, options)
    a.call(b, b"h")
    b.call(a, b"h")
    for number in range(3):
        cut(a)
        assert a.call(b, b"%d" % number).header == b"%d" % number
        assert b.call(a, b"%d" % number).header == b"%d" % number
    assert a.lost == b.lost == []


def test_tensors_in_shared_memory_arrive_once_and_whole_among_breaks(make: Maker) -> None:
    """What is under way at once has room in one segment, unless breaks cost some of it."""
    a, b = make(UV, UV)
    until(lambda: a.call(b, b"ready", b"", torch.ones(40_000)) and shares(b) == 2)
    taken = len(b.received)
    with cuts(a) as made:
        for begin in range(0, CALLS, AT_ONCE):
            echo_of = {n: torch.full((40_000,), float(n)) for n in range(begin, begin + AT_ONCE)}
            asked = {n: a.ask(b, b"%d" % n, b"", sent) for n, sent in echo_of.items()}
            for number, correlation in asked.items():
                assert torch.equal(a.reply(correlation).tensors[0], echo_of[number])
        assert made()
    assert set(asked_of(b).values()) == {1, taken}
    assert shares(b) == 2


@pytest.mark.parametrize("options", ROADS)
def test_calls_among_breaks_run_once_and_are_answered_once(make: Maker, options: Options) -> None:
    a, b = make(options, options)
    a.call(b, b"connect")
    count = 0
    with cuts(a) as made:
        while count < CALLS or made() < CUTS:
            asked = {a.ask(b, b"%d" % number): number for number in range(count, count + 50)}
            for correlation, number in asked.items():
                assert a.reply(correlation).header == b"%d" % number
            count += 50
    assert asked_of(b) == {b"connect": 1} | {b"%d" % number: 1 for number in range(count)}
    assert a.lost == b.lost == []


def test_notices_among_breaks_arrive_once_and_in_order(make: Maker) -> None:
    a, b = make(UV, UV)
    a.call(b, b"connect")
    count = 0
    with cuts(a) as made:
        while count < CALLS or made() < CUTS:
            for worker, other in ((a, b), (b, a)):
                for number in range(count, count + 50):
                    worker.notify(other, b"%d" % number)
            count += 50
        expected = [b"%d" % number for number in range(count)]
        for worker in (a, b):
            worker.until(lambda worker=worker: len(worker.received) >= count)
    assert [frame.header for _, frame in b.received[1:]] == expected
    assert [frame.header for _, frame in a.received] == expected


def test_large_tensors_among_breaks_arrive_as_they_were(make: Maker) -> None:
    a, b = make(UV, UV)
    number = 0
    with cuts(a) as made:
        while number < 20 or made() < CUTS:
            sent = [torch.full((size,), float(number)) for size in (3_000, 300_000)]
            a.check_echoes(b, b"h", b"p" * 200_000, sent)
            b.received.clear()
            number += 1
    assert a.lost == b.lost == []
    until(lambda: place_of(b).call("replies_in_flight", 0) == 0)


def test_devices_are_asked_for_among_breaks_until_the_peer_has_answered(make: Maker) -> None:
    a, b = make(UV | {"device_maps": {"worker1": {"cpu": "cpu"}}, "shared_memory": 0}, UV)
    place_of(a).call("take_host_memory_for_devices")  # which stands in for them
    number = 0
    with cuts(a) as made:
        while number < 100 or made() < 2 * CUTS:
            place_of(a).call("forget_who_is_ready")
            assert a.call(b, b"%d" % number, b"", torch.ones(40_000)).header == b"%d" % number
            number += 1
    assert set(asked_of(b).values()) == {1}
    assert a.lost == b.lost == []


def test_a_request_that_is_being_served_when_the_link_breaks_is_answered(make: Maker) -> None:
    a, b = make(UV, UV)
    kept: list[Frame] = []
    b.answer = lambda _worker, _sender, frame: kept.append(frame)
    asked = [a.ask(b, b"%d" % number, b"x" * 100_000) for number in range(5)]
    b.until(lambda: len(b.received) == 5)
    cut(a)
    until(lambda: place_of(a).call("is_whole"))
    for frame in kept:
        echo(b, 0, frame)
    for number, correlation in enumerate(asked):
        assert a.reply(correlation).header == b"%d" % number
    assert len(b.received) == 5


def test_what_is_kept_for_another_pipe_is_let_go_soon(make: Maker) -> None:
    a, b = make(*[UV | {"shared_memory": 0}] * 2)
    a.call(b, b"h", b"x" * 200_000, torch.zeros(50_000))
    until(lambda: place_of(b).call("remembers", 0) == (0, 0))
    b.answer = lambda *_: None
    a.ask(b, b"never answered", b"x" * 200_000, torch.zeros(50_000))
    until(lambda: place_of(a).call("remembers", 1) == (0, 0))


def test_a_killed_worker_is_lost_without_waiting_for_the_bound(
    make: Maker, places: list[Workplace], victim: Workplace
) -> None:
    a, b = make(UV | PATIENT, UV | PATIENT, among=[places[0], victim])
    a.call(b, b"h")
    b.closed = True
    victim.kill()
    a.until(lambda: bool(a.lost))
    assert "its connection broke" in a.lost[0][1]
    with pytest.raises(WorkerLostError, match="worker1"):
        a.notify(b, b"h")


def with_a_frozen_peer(
    make: Maker, options: Options, place: Workplace, victim: Workplace
) -> tuple[Worker, Worker]:
    """Two workers whose link is cut while the second, in ``victim``, is stopped."""
    a, b = make(options, options, among=[place, victim])
    a.call(b, b"h")
    until(lambda: place_of(a).call("is_whole"))
    freeze_for_good(b)
    assert place_of(a).call("cut")
    return a, b


def test_a_worker_that_is_killed_while_its_link_is_mended_is_lost(
    make: Maker, places: list[Workplace], victim: Workplace
) -> None:
    a, b = with_a_frozen_peer(make, UV | PATIENT, places[0], victim)
    waiting = a.ask(b, b"waits")
    victim.kill()
    a.until(lambda: bool(a.lost))
    assert "nobody listens at its address any more" in a.lost[0][1]
    assert waiting not in a.replies


def test_a_worker_that_does_not_answer_is_lost_when_the_bound_is_over(
    make: Maker, places: list[Workplace], victim: Workplace
) -> None:
    a, _ = with_a_frozen_peer(make, UV | {"link_resume_timeout": 0.3}, places[0], victim)
    a.until(lambda: bool(a.lost))
    assert "not opened again within 0.3 s" in a.lost[0][1]


def test_a_worker_may_leave_while_a_link_is_mended(
    make: Maker, places: list[Workplace], victim: Workplace
) -> None:
    a, b = with_a_frozen_peer(make, UV | PATIENT, places[0], victim)
    a.notify(b, b"waits")
    a.close(0.3)
    assert a.lost == []


def test_both_leave_in_order_after_a_break(make: Maker) -> None:
    a, b = make(UV, UV)
    a.call(b, b"h")
    b.call(a, b"h")
    cut(a)
    a.call(b, b"h")
    b.call(a, b"h")
    a.close(SECONDS)
    b.until(lambda: bool(b.lost))
    assert b.lost == [(Life(0, a.incarnation), "it shut down")]


@pytest.mark.parametrize("off", [0, 1])
def test_a_break_is_a_loss_if_either_end_wants_it_so(make: Maker, off: int) -> None:
    each = [UV, UV]
    each[off] = UV | {"link_resume_timeout": 0}
    a, b = make(*each)
    a.call(b, b"h")
    cut(a)
    for worker in (a, b):
        worker.until(lambda worker=worker: bool(worker.lost))
        assert len(worker.lost) == 1


def test_somebody_else_at_the_address_is_not_taken_for_the_worker(make: Maker) -> None:
    a, b = make(UV | PATIENT, UV | PATIENT)
    a.call(b, b"h")
    until(lambda: place_of(a).call("is_whole"))
    place_of(b).call("be_somebody_else")
    assert place_of(a).call("cut")
    a.until(lambda: bool(a.lost))
    assert "somebody else listens at its address by now" in a.lost[0][1]


def test_calls_that_came_before_their_sender_was_known_outlive_a_break(make: Maker) -> None:
    a, b = make(UV, UV, acquainted=False)
    a.transport.add_peer(b.peer())
    asked = [a.ask(b, b"%d" % number) for number in range(3)]
    a.notify(b, b"notice")
    until(lambda: place_of(b).call("early_calls") >= 5)
    assert place_of(a).call("cut")
    asked.append(a.ask(b, b"3"))
    until(lambda: place_of(b).call("early_calls") >= 10)
    b.transport.add_peer(a.peer())
    for number, correlation in enumerate(asked):
        assert a.reply(correlation).header == b"%d" % number
    b.until(lambda: len(b.received) == 5)
    assert set(asked_of(b).values()) == {1}


def test_without_a_thread_to_mend_it_a_link_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    given_up: list[str] = []
    stand_in: Any = SimpleNamespace(give_up=lambda _, reason: given_up.append(reason))
    mender = Mender("mender", threading.Lock(), stand_in, stand_in, stand_in)
    peer = Peer(WorkerInfo("peer", 1), 1, b"")
    link = Link(peer, None, False, {}, {}, Calls(remembers=True), Served(keeps=True), 5.0)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        mender.broke(link, 0, "EOF")
    mender.close()
    assert given_up == [
        "its connection broke: EOF, and cannot be opened again: can't start new thread"
    ]
