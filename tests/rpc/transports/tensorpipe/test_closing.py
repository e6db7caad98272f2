"""Leaving waits for all that must be over first, and for nothing else."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from rpc.transports.base import FrameKind, Peer
from rpc.transports.tensorpipe import wire
from rpc.transports.tensorpipe.closing import CloseGate, CloseHandshake, Handlers
from rpc.transports.tensorpipe.links import CROSSED, PeerLink
from rpc.transports.tensorpipe.peers import SHUT_DOWN, Peers
from rpc.transports.tensorpipe.wire import Envelope
from rpc.worker_info import WorkerInfo
from tests.waiting import until

WAIT = 5.0
ME = 0


class Told:
    """Stands in for what answers, calls and reports; notes what it was told."""

    def __init__(self) -> None:
        self.notes: list[tuple[Any, ...]] = []

    def give_asked(self, asked: Any, kind: int, reason: str = "") -> None:
        self.notes += [("asked", future, kind, reason) for _, future in asked]

    def give(self, futures: Any, kind: int, reason: str = "") -> None:
        self.notes += [("given", future, kind, reason) for future in futures]

    def give_visibly(self, future: Any, kind: int, payload: bytes) -> None:
        self.notes.append(("visibly", future, kind, payload))

    def wait(self, deadline: float) -> None:
        self.notes.append(("waited",))

    def send_close(self, link: PeerLink) -> None:
        self.notes.append(("close", link.name))

    def report(self, link: PeerLink) -> None:
        self.notes.append(("reported", link.name, link.lost))


class Worker:
    """The parts of a transport that close it."""

    def __init__(self, sender_seconds: float = WAIT, told: Told | None = None) -> None:
        self.lock = threading.Lock()
        self.gate = CloseGate(self.lock, sender_seconds)
        self.told = told or Told()
        stand_in: Any = self.told
        self.closing = CloseHandshake(
            ME, self.lock, self.gate, stand_in, stand_in, self.told.report
        )
        self.peers = Peers()

    def add(self, worker_id: int, *, watched: bool = True) -> PeerLink:
        info = WorkerInfo(f"worker{worker_id}", worker_id)
        route: Any = object()
        link = PeerLink(Peer(info, 1, b""), route, worker_id < ME, {}, {})
        link.watched = link.lifeline_open = watched
        self.peers.add(link)
        return link

    def change(self, what: Callable[[], None]) -> None:
        with self.lock:
            what()
            self.gate.changed()


@pytest.fixture
def worker() -> Worker:
    return Worker()


@pytest.fixture
def leaving(worker: Worker) -> Iterator[threading.Thread]:
    deadline = time.monotonic() + WAIT
    handlers = Handlers(deadline, set)
    thread = threading.Thread(target=worker.closing.leave, args=(worker.peers, deadline, handlers))
    yield thread
    thread.join(2 * WAIT)
    assert not thread.is_alive()


def future() -> torch.futures.Future[Any]:
    return torch.futures.Future()


class TestCloseGate:
    def test_it_opens_once_everybody_has_sent(self) -> None:
        lock = threading.Lock()
        gate, order = CloseGate(lock), []
        with lock:
            gate.hold()
            gate.hold()

        def close() -> None:
            with lock:
                gate.wait_for_senders()
                order.append("open")

        closer = threading.Thread(target=close)
        closer.start()
        for number in range(2):
            with lock:
                order.append(f"sent {number}")
            gate.release()
        closer.join(WAIT)
        assert order == ["sent 0", "sent 1", "open"]

    def test_nobody_waits_longer_than_the_deadline(self) -> None:
        lock = threading.Lock()
        gate = CloseGate(lock)
        with lock:
            assert not gate.wait_until(lambda: False, time.monotonic() - 1.0)

    def test_a_thread_that_does_not_end_to_send_is_left_behind(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        lock = threading.Lock()
        gate = CloseGate(lock, seconds=0.0)
        with lock:
            gate.hold()
            gate.wait_for_senders()
        assert "1 messages are still being sent" in caplog.text

    def test_it_opens_although_an_answer_cannot_be_given(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        class Stopped(Told):
            def give_visibly(self, future: Any, kind: int, payload: bytes) -> None:
                raise RuntimeError("the agent has stopped")

        worker = Worker(0.0, Stopped())
        link = worker.add(1)
        link.lifeline = future()
        with pytest.raises(RuntimeError, match="has stopped"):
            worker.closing.take_close(None, 0, future())
        with pytest.raises(RuntimeError, match="has stopped"):
            worker.closing.take_close(link, 0, future())
        link.lifeline = future()
        with pytest.raises(RuntimeError, match="has stopped"):
            worker.closing.confirmed(link, b"")
        with worker.lock:
            worker.gate.wait_for_senders()
        assert "still being sent" not in caplog.text


class TestLeaving:
    def test_close_is_sent_to_those_that_are_connected(
        self, worker: Worker, leaving: threading.Thread
    ) -> None:
        connected, unconnected = worker.add(1), worker.add(2, watched=False)
        asked, lifeline = future(), future()
        connected.lifeline = lifeline
        request = Envelope(FrameKind.REQUEST, 1, 1, 7, 1)
        connected.take(request, asked)
        leaving.start()
        until(lambda: ("close", connected.name) in worker.told.notes)
        worker.change(lambda: connected.close_was_confirmed(b""))
        worker.change(lambda: connected.lifeline_ended(SHUT_DOWN))
        leaving.join(WAIT)
        assert worker.told.notes == [
            ("asked", asked, wire.REFUSED, SHUT_DOWN),
            ("close", connected.name),
            ("visibly", lifeline, wire.LEFT, SHUT_DOWN.encode()),
            ("waited",),
        ]
        assert not unconnected.close_sent

    def test_a_peer_whose_pipe_is_broken_is_not_waited_for(
        self, worker: Worker, leaving: threading.Thread
    ) -> None:
        worker.add(1).break_off("its connection broke")
        leaving.start()
        leaving.join(WAIT)
        assert worker.told.notes == [("waited",)]

    @pytest.mark.parametrize(("running", "seconds"), [({1}, 0.0), (set(), 0.2)])
    def test_a_peer_that_a_handler_keeps_waiting_is_waited_for_as_long_as_that(
        self, worker: Worker, running: set[int], seconds: float
    ) -> None:
        worker.add(1)
        began = time.monotonic()
        handlers = Handlers(began, lambda: running)
        worker.closing.leave(worker.peers, began + (WAIT if running else seconds), handlers)
        assert seconds <= time.monotonic() - began < WAIT

    def test_one_that_is_left_without_its_answer_hears_that_none_will_come(
        self, worker: Worker
    ) -> None:
        kept_waiting, lifeline = worker.add(1), future()
        kept_waiting.lifeline = lifeline
        began = time.monotonic()
        worker.closing.leave(worker.peers, began + WAIT, Handlers(began, lambda: {1}))
        assert not kept_waiting.close_confirmed
        assert ("visibly", lifeline, wire.LEFT, SHUT_DOWN.encode()) in worker.told.notes

    def test_that_a_close_was_confirmed_does_not_end_what_the_other_waits_for(
        self, worker: Worker
    ) -> None:
        peer, lifeline = worker.add(1), future()
        peer.lifeline = lifeline
        peer.send_close()
        worker.closing.confirmed(peer, CROSSED)
        assert worker.told.notes == [("visibly", lifeline, wire.LIFELINE, SHUT_DOWN.encode())]

    def test_calls_to_itself_are_waited_for(
        self, worker: Worker, leaving: threading.Thread
    ) -> None:
        itself = worker.add(ME, watched=False)
        itself.calls.under_way = 1
        leaving.start()

        def came_back() -> None:
            worker.told.notes.append(("came back",))
            itself.calls.under_way = 0

        worker.change(came_back)
        leaving.join(WAIT)
        assert worker.told.notes == [("came back",), ("waited",)]


class TestPeersThatLeave:
    def test_one_is_confirmed_when_its_frames_and_our_calls_are_through(
        self, worker: Worker
    ) -> None:
        peer, close = worker.add(1), future()
        peer.calls.under_way = 1
        worker.closing.take_close(peer, 2, close)
        assert worker.told.notes == []
        peer.taken.delivered = 2
        worker.closing.settle(peer)
        assert worker.told.notes == []
        peer.calls.under_way = 0
        worker.closing.settle(peer)
        worker.closing.settle(peer)
        assert worker.told.notes == [
            ("visibly", close, wire.CLOSE, b""),
            ("reported", peer.name, SHUT_DOWN),
        ]

    def test_its_requests_and_its_lifeline_are_let_go(self, worker: Worker) -> None:
        peer, close, lifeline, asked = worker.add(1), future(), future(), future()
        peer.lifeline = lifeline
        request = Envelope(FrameKind.REQUEST, 1, 1, 7, 1)
        peer.take(request, asked)
        worker.closing.take_close(peer, 1, close)
        assert worker.told.notes == [
            ("asked", asked, wire.DONE, ""),
            ("given", lifeline, wire.LIFELINE, ""),
        ]

    def test_one_that_is_not_known_any_more_is_confirmed_at_once(self, worker: Worker) -> None:
        close = future()
        worker.closing.take_close(None, 3, close)
        assert worker.told.notes == [("visibly", close, wire.CLOSE, b"")]

    def test_both_leave_at_once(self, worker: Worker, leaving: threading.Thread) -> None:
        peer, close = worker.add(1), future()
        leaving.start()
        worker.closing.take_close(peer, 0, close)
        worker.closing.confirmed(peer, b"")
        worker.change(lambda: peer.lifeline_ended(SHUT_DOWN))
        leaving.join(WAIT)
        assert ("close", peer.name) in worker.told.notes or not peer.close_sent
        assert peer.parted
