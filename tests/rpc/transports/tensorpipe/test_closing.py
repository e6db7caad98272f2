"""Leaving waits for all that must be over first, and for nothing else."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from rpc.transports.base import Frame, FrameKind, Peer
from rpc.transports.tensorpipe import closing as tensorpipe_parting
from rpc.transports.tensorpipe import wire as wire
from rpc.transports.tensorpipe.closing import Exit, Handlers, Parting
from rpc.transports.tensorpipe.ledger import Calls, Served
from rpc.transports.tensorpipe.links import CROSSED, Link
from rpc.transports.tensorpipe.peers import SHUT_DOWN, Roster
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

    def say_farewell(self, link: Link) -> None:
        self.notes.append(("farewell", link.name))

    def report(self, link: Link) -> None:
        self.notes.append(("reported", link.name, link.lost))


class Worker:
    """The parts of a transport that part."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.exit = Exit(self.lock)
        self.told = Told()
        stand_in: Any = self.told
        self.parting = Parting(ME, self.lock, self.exit, stand_in, stand_in, self.told.report)
        self.roster = Roster("life")

    def add(self, worker_id: int, *, watched: bool = True) -> Link:
        info = WorkerInfo(f"worker{worker_id}", worker_id)
        route: Any = object()
        calls, served = Calls(remembers=True), Served(keeps=True)
        link = Link(Peer(info, 1, b""), route, worker_id < ME, {}, {}, calls, served, 5.0)
        link.watched = link.lifeline_open = watched
        self.roster.add(link)
        return link

    def change(self, what: Callable[[], None]) -> None:
        with self.lock:
            what()
            self.exit.look()


@pytest.fixture
def worker() -> Worker:
    return Worker()


@pytest.fixture
def leaving(worker: Worker) -> Iterator[threading.Thread]:
    deadline = time.monotonic() + WAIT
    handlers = Handlers(deadline, set)
    thread = threading.Thread(target=worker.parting.leave, args=(worker.roster, deadline, handlers))
    yield thread
    thread.join(2 * WAIT)
    assert not thread.is_alive()


def future() -> torch.futures.Future[Any]:
    return torch.futures.Future()


class TestExit:
    def test_it_opens_once_everybody_has_sent(self) -> None:
        lock = threading.Lock()
        exit_, order = Exit(lock), []
        with lock:
            exit_.hold()
            exit_.hold()

        def close() -> None:
            with lock:
                exit_.wait_for_senders()
                order.append("open")

        closer = threading.Thread(target=close)
        closer.start()
        for number in range(2):
            with lock:
                order.append(f"sent {number}")
            exit_.release()
        closer.join(WAIT)
        assert order == ["sent 0", "sent 1", "open"]

    def test_nobody_waits_longer_than_the_deadline(self) -> None:
        lock = threading.Lock()
        exit_ = Exit(lock)
        with lock:
            assert not exit_.wait_until(lambda: False, time.monotonic() - 1.0)

    def test_who_does_not_end_to_send_is_left_behind(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(tensorpipe_parting, "_SENDERS_SECONDS", 0.0)
        lock = threading.Lock()
        exit_ = Exit(lock)
        with lock:
            exit_.hold()
            exit_.wait_for_senders()
        assert "1 messages are still being sent" in caplog.text

    def test_it_opens_although_an_answer_cannot_be_given(
        self, worker: Worker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        def fail(*_: object) -> None:
            raise RuntimeError("the agent has stopped")

        monkeypatch.setattr(tensorpipe_parting, "_SENDERS_SECONDS", 0.0)
        monkeypatch.setattr(worker.told, "give_visibly", fail)
        link = worker.add(1)
        link.lifeline = 0, future()
        with pytest.raises(RuntimeError, match="has stopped"):
            worker.parting.take_farewell(None, 0, future())
        with pytest.raises(RuntimeError, match="has stopped"):
            worker.parting.take_farewell(link, 0, future())
        link.lifeline = 0, future()
        with pytest.raises(RuntimeError, match="has stopped"):
            worker.parting.confirmed(link, b"")
        with worker.lock:
            worker.exit.wait_for_senders()
        assert "still being sent" not in caplog.text


class TestLeaving:
    def test_farewell_is_said_to_those_that_are_connected(
        self, worker: Worker, leaving: threading.Thread
    ) -> None:
        connected, stranger = worker.add(1), worker.add(2, watched=False)
        asked, lifeline = future(), future()
        connected.lifeline = 0, lifeline
        request = Envelope(FrameKind.REQUEST, 1, 1, 7, 1)
        connected.take(request, Frame(FrameKind.REQUEST, 7, b""), asked)
        leaving.start()
        until(lambda: ("farewell", connected.name) in worker.told.notes)
        worker.change(lambda: connected.farewell_confirmed(b""))
        worker.change(lambda: connected.lifeline_ended(SHUT_DOWN))
        leaving.join(WAIT)
        assert worker.told.notes == [
            ("asked", asked, wire.REFUSED, SHUT_DOWN),
            ("farewell", connected.name),
            ("visibly", lifeline, wire.LEFT, SHUT_DOWN.encode()),
            ("waited",),
        ]
        assert not stranger.said_farewell

    def test_a_peer_whose_pipe_is_broken_is_not_waited_for(
        self, worker: Worker, leaving: threading.Thread
    ) -> None:
        broken = worker.add(1)
        broken.route = None
        leaving.start()
        leaving.join(WAIT)
        assert broken.broken
        assert worker.told.notes == [("waited",)]

    @pytest.mark.parametrize(("running", "seconds"), [({1}, 0.0), (set(), 0.2)])
    def test_a_peer_that_a_handler_keeps_waiting_is_waited_for_as_long_as_that(
        self, worker: Worker, running: set[int], seconds: float
    ) -> None:
        worker.add(1)
        began = time.monotonic()
        handlers = Handlers(began, lambda: running)
        worker.parting.leave(worker.roster, began + (WAIT if running else seconds), handlers)
        assert seconds <= time.monotonic() - began < WAIT

    def test_one_that_is_left_without_its_answer_hears_that_none_will_come(
        self, worker: Worker
    ) -> None:
        kept_waiting, lifeline = worker.add(1), future()
        kept_waiting.lifeline = 0, lifeline
        began = time.monotonic()
        worker.parting.leave(worker.roster, began + WAIT, Handlers(began, lambda: {1}))
        assert not kept_waiting.confirmed
        assert ("visibly", lifeline, wire.LEFT, SHUT_DOWN.encode()) in worker.told.notes

    def test_that_a_farewell_was_confirmed_does_not_end_what_the_other_waits_for(
        self, worker: Worker
    ) -> None:
        peer, lifeline = worker.add(1), future()
        peer.lifeline = 0, lifeline
        peer.say_farewell()
        worker.parting.confirmed(peer, CROSSED)
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
        peer, farewell = worker.add(1), future()
        peer.calls.under_way = 1
        worker.parting.take_farewell(peer, 2, farewell)
        assert worker.told.notes == []
        peer.served.delivered = 2
        worker.parting.settle(peer)
        assert worker.told.notes == []
        peer.calls.under_way = 0
        worker.parting.settle(peer)
        worker.parting.settle(peer)
        assert worker.told.notes == [
            ("visibly", farewell, wire.FAREWELL, b""),
            ("reported", peer.name, SHUT_DOWN),
        ]

    def test_its_requests_and_its_lifeline_are_let_go(self, worker: Worker) -> None:
        peer, farewell, lifeline, asked = worker.add(1), future(), future(), future()
        peer.lifeline = 0, lifeline
        request = Envelope(FrameKind.REQUEST, 1, 1, 7, 1)
        peer.take(request, Frame(FrameKind.REQUEST, 7, b""), asked)
        worker.parting.take_farewell(peer, 1, farewell)
        assert worker.told.notes == [
            ("asked", asked, wire.DONE, ""),
            ("given", lifeline, wire.LIFELINE, ""),
        ]

    def test_one_that_is_not_known_any_more_is_confirmed_at_once(self, worker: Worker) -> None:
        farewell = future()
        worker.parting.take_farewell(None, 3, farewell)
        assert worker.told.notes == [("visibly", farewell, wire.FAREWELL, b"")]

    def test_both_leave_at_once(self, worker: Worker, leaving: threading.Thread) -> None:
        peer, farewell = worker.add(1), future()
        leaving.start()
        worker.parting.take_farewell(peer, 0, farewell)
        worker.parting.confirmed(peer, b"")
        worker.change(lambda: peer.lifeline_ended(SHUT_DOWN))
        leaving.join(WAIT)
        assert ("farewell", peer.name) in worker.told.notes or not peer.said_farewell
        assert peer.parted
