"""The baton: quick deliveries keep it, slow and blocked ones delay no other."""

from __future__ import annotations

import itertools
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from rpc.constants import DEFAULT_BUSY_POLL_SEC
from rpc.transports.base import Frame, FrameKind
from rpc.transports.host.copying import CopyThreads
from rpc.transports.host.segments import Budget
from rpc.transports.tensorwire.channel import Sender, Unsent
from rpc.transports.tensorwire.device_maps import PeerDeviceMap
from rpc.transports.tensorwire.framing import pack_fixed
from rpc.transports.tensorwire.link import Link, Resources
from rpc.transports.tensorwire.main_reader import MainReader
from rpc.transports.tensorwire.receive_buffers import ReceiveBuffers
from rpc.transports.tensorwire.replies import ChannelEvents
from rpc.transports.tensorwire.requests import RequestSide
from rpc.transports.tensorwire.turns import Turns
from tests.waiting import until

SECONDS = 20.0


class Side:
    """A request side, and what was swept."""

    def __init__(self) -> None:
        self.swept = threading.Event()
        self.requests = RequestSide("test", self.sweep, DEFAULT_BUSY_POLL_SEC)
        self.requests.start()

    def sweep(self) -> None:
        self.requests.sweeping = False
        self.swept.set()

    def run(self, function: object) -> None:
        self.requests.push((lambda _: function(), None))  # type: ignore[operator]


@pytest.fixture
def side() -> Iterator[Side]:
    made = Side()
    yield made
    made.requests.close()


def test_quick_deliveries_stay_on_one_thread(side: Side) -> None:
    threads: list[int] = []
    done = threading.Event()
    for _ in range(50):
        side.run(lambda: threads.append(threading.get_ident()))
    side.run(done.set)
    assert done.wait(SECONDS)
    assert len(set(threads)) <= 2


def test_a_delivery_that_does_not_return_holds_up_no_other(side: Side) -> None:
    release, quick = threading.Event(), threading.Event()
    side.run(lambda: release.wait(SECONDS))
    side.run(quick.set)
    assert quick.wait(SECONDS)
    release.set()


def test_without_another_thread_the_baton_stays_until_there_is_one(
    side: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    release, quick, refused = threading.Event(), threading.Event(), threading.Event()
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "test-requests":
            refused.set()
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        side.run(lambda: release.wait(SECONDS))
        side.run(quick.set)
        assert refused.wait(SECONDS)
    assert quick.wait(SECONDS)
    release.set()


def compute(seconds: float) -> None:
    """Keeps the running thread's processor busy for so long."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def threads_of(side: Side, work: Callable[[], object], times: int) -> list[int]:
    """The threads on which a function ran that was pushed several times at once."""
    threads: list[int] = []
    gathered, done = threading.Event(), threading.Event()

    def run() -> None:
        threads.append(threading.get_ident())
        work()

    side.run(lambda: gathered.wait(SECONDS))
    for _ in range(times):
        side.run(run)
    side.run(done.set)
    gathered.set()
    assert done.wait(SECONDS)
    return threads


def test_deliveries_that_compute_a_little_stay_on_one_thread(side: Side) -> None:
    took: list[float] = []

    def work() -> None:
        began = time.perf_counter()
        compute(0.001)
        took.append(time.perf_counter() - began)

    threads = threads_of(side, work, 40)
    moves = sum(one != next_ for one, next_ in itertools.pairwise(threads))
    # Where the machine is busy, a delivery looks as if it waited: to the watch, or when it ends.
    disturbed = sum(seconds > 0.003 for seconds in took)
    assert moves <= 10 + 2 * disturbed


def test_deliveries_that_wait_a_little_run_side_by_side(side: Side) -> None:
    never = threading.Event()
    threads = threads_of(side, lambda: never.wait(0.001), 40)
    moves = sum(one != next_ for one, next_ in itertools.pairwise(threads))
    assert moves >= 20


def test_many_blocked_deliveries_all_run(side: Side) -> None:
    meeting = threading.Barrier(30, timeout=SECONDS)
    met = threading.Semaphore(0)

    def meet() -> None:
        meeting.wait()
        met.release()

    for _ in range(30):
        side.run(meet)
    for _ in range(30):
        assert met.acquire(timeout=SECONDS)


def test_a_delivery_that_raises_does_not_take_the_baton_along(
    side: Side, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise SystemExit("not for this thread")

    done = threading.Event()
    side.run(fail)
    side.run(done.set)
    assert done.wait(SECONDS)
    assert "not dealt with" in caplog.text


def test_a_socket_whose_handler_raises_does_not_take_the_baton_along(
    side: Side, caplog: pytest.LogCaptureFixture
) -> None:
    mine, other = socket.socketpair()
    done = threading.Event()

    def fail(_: int) -> None:
        mine.recv(1)
        side.run(done.set)
        raise MemoryError("nothing is left")

    side.requests.add(mine, fail)
    other.send(b"x")
    assert done.wait(SECONDS)
    assert "nothing is left" in caplog.text
    side.requests.remove(mine)
    mine.close()
    other.close()


def test_a_sweep_that_raises_does_not_take_the_baton_along(
    caplog: pytest.LogCaptureFixture,
) -> None:
    swept, done = threading.Event(), threading.Event()

    def sweep() -> None:
        requests.sweeping = False
        swept.set()
        raise MemoryError("nothing is left")

    requests = RequestSide("test", sweep, DEFAULT_BUSY_POLL_SEC)
    requests.sweeping = True
    requests.start()
    assert swept.wait(SECONDS)
    requests.push((lambda _: done.set(), None))
    assert done.wait(SECONDS)
    requests.close()
    assert "nothing is left" in caplog.text


class ClosedWhileRead(socket.socket):
    """Is closed by another thread at the moment at which it is read."""

    def recv(self, *_: int) -> bytes:
        self.close()
        return b""


def reader_of(sock: socket.socket) -> MainReader:
    buffers = ReceiveBuffers(0)
    resources = Resources(Budget(0), buffers, 1 << 30, CopyThreads("test", 0), 0.0)
    link = Link(resources, "peer", PeerDeviceMap("peer", {}), same_host=False)
    sender = Sender(sock, link.unsent, lambda _: None)
    return MainReader(sock, link, 1 << 30, buffers, sender, lambda _: None)


def test_a_socket_that_is_closed_while_it_is_read_holds_up_no_other(side: Side) -> None:
    near, other = socket.socketpair()
    mine = ClosedWhileRead(fileno=near.detach())
    ended: list[str] = []
    events = ChannelEvents(lambda _: None, lambda: None, ended.append)
    side.requests.add_main(mine, reader_of(mine), events)
    other.close()
    until(lambda: ended == ["the connection was closed by the other end"])


def test_callers_that_crowd_the_cores_are_served_by_turns() -> None:
    requests = RequestSide("test", lambda: None, 0.0, Turns(2, seconds=60.0))
    served: list[int] = []
    pairs = [socket.socketpair() for _ in range(5)]

    def add(caller: int, near: socket.socket, far: socket.socket) -> None:
        def send(number: int) -> None:
            far.send(pack_fixed(FrameKind.REQUEST, 1, number, 0, 0, 0))

        def deliver(_: Frame) -> None:
            served.append(caller)
            if served.count(caller) < 3:
                send(served.count(caller))

        events = ChannelEvents(deliver, lambda: None, lambda _: None)
        requests.add_main(near, reader_of(near), events)
        send(0)

    for caller, (near, far) in enumerate(pairs):
        near.setblocking(False)
        add(caller, near, far)
    requests.start()
    until(lambda: len(served) == 15)
    requests.close()
    for pair in pairs:
        for sock in pair:
            sock.close()
    turns = [served[:6], served[6:12], served[12:]]
    assert [len({*turn}) for turn in turns] == [2, 2, 1]


def test_whoever_is_about_to_block_passes_the_baton_first(side: Side) -> None:
    answered = threading.Event()
    waited: list[bool] = []
    done = threading.Event()

    def ask() -> None:
        side.run(answered.set)
        side.requests.about_to_block()
        waited.append(answered.wait(SECONDS))
        done.set()

    side.run(ask)
    assert done.wait(SECONDS)
    assert waited == [True]


def test_about_to_block_means_nothing_elsewhere(side: Side) -> None:
    side.requests.about_to_block()
    done = threading.Event()
    side.run(done.set)
    assert done.wait(SECONDS)


def test_replies_of_a_batch_leave_even_if_a_handler_among_them_blocks(side: Side) -> None:
    mine, other = socket.socketpair()
    mine.setblocking(False)
    other.settimeout(SECONDS)
    sender = Sender(mine, Unsent(), lambda _: None)
    gathered, release = threading.Event(), threading.Event()

    def reply() -> None:
        sender.hold_small(2, 0, b"header", b"", b"")
        side.requests.flush_soon(sender)

    side.run(lambda: gathered.wait(SECONDS))
    side.run(reply)
    side.run(lambda: release.wait(SECONDS))
    side.run(reply)
    gathered.set()
    assert other.recv(46, socket.MSG_WAITALL).endswith(b"header")
    release.set()
    assert other.recv(46, socket.MSG_WAITALL).endswith(b"header")
    sender.close()
    other.close()


def test_sockets_are_served_until_they_are_removed(side: Side) -> None:
    one, other = socket.socketpair()
    found = threading.Semaphore(0)

    def handle(_: int) -> None:
        one.recv(10)
        found.release()

    side.requests.add(one, handle)
    for _ in range(3):
        other.send(b"x")
        assert found.acquire(timeout=SECONDS)
    side.requests.remove(one)
    other.send(b"x")
    done = threading.Event()
    side.run(done.set)
    assert done.wait(SECONDS)
    assert not found.acquire(timeout=0.05)
    one.close()
    other.close()


def test_sweeping_happens_while_it_is_asked_for(side: Side) -> None:
    side.requests.sweeping = True
    side.run(lambda: None)
    assert side.swept.wait(SECONDS)


def test_closing_waits_for_the_delivery_under_way() -> None:
    side = Side()
    began, release = threading.Event(), threading.Event()
    finished: list[bool] = []

    def deliver() -> None:
        began.set()
        release.wait(SECONDS)
        finished.append(True)

    side.run(deliver)
    assert began.wait(SECONDS)
    timer = threading.Timer(0.05, release.set)
    timer.start()
    side.requests.close()
    assert finished == [True]
    timer.join()
