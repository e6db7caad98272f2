"""A frame is for one life of a peer, and one that is not sent leaves nothing behind."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NoReturn

import pytest
import torch

from rpc.errors import CallCancelledError, DeviceMapError, WorkerLostError
from rpc.transports.base import Frame, FrameKind, Patience, Peer
from rpc.transports.flow import FlowWindow
from rpc.transports.tensorpipe.answers import Answers
from rpc.transports.tensorpipe.caller import PipeCaller
from rpc.transports.tensorpipe.closing import CloseGate
from rpc.transports.tensorpipe.device_readiness import Inquiry
from rpc.transports.tensorpipe.links import PeerLink
from rpc.transports.tensorpipe.peers import Peers
from rpc.transports.tensorpipe.sending import FrameSender
from rpc.transports.tensorpipe.shared_tensors import HostMemory, SharedTensors, nothing_shared
from rpc.transports.tensorpipe.torch_agent import PipeBrokenError
from rpc.transports.tensorpipe.wire import (
    TENSOR_PAYLOAD_MIN,
    VOID,
    Envelope,
    PlacedFrame,
    SenderId,
    call_pickle,
    unpack,
)
from rpc.worker_info import WorkerInfo
from tests.waiting import until

PEER = 1
REQUEST = 7
ROOM = 100_000
LIMIT = 64 << 20
LARGE = torch.ones(1 << 20)
"""Of a new segment, it takes a quarter."""
BESIDE = [torch.zeros(24_000, dtype=torch.uint8)] * 3
"""Tensors that go through torch, and take room there."""
Moves = Mapping[torch.device, torch.device]
NOWHERE: Moves = {}
TO_DEVICE: Moves = {torch.device("cpu"): torch.device("meta")}
CALL_TAIL = b"\x85R."
OFTEN = 20
"""More slots of the size of ``LARGE`` than there are."""


@dataclass
class StandIn:
    """For torch's agent; there are no threads and no pipes, and a call goes nowhere.

    Attributes:
        calls: those that were made.
        tensors: of each.
        futures: of each.
        before_a_call: done before one is.
    """

    calls: list[bytes] = field(default_factory=list)
    tensors: list[list[torch.Tensor]] = field(default_factory=list)
    futures: list[torch.futures.Future[Any]] = field(default_factory=list)
    before_a_call: Callable[[], object] = lambda: None

    @property
    def threads(self) -> StandIn:
        return self

    def is_here(self) -> bool:
        return False

    def tell(self, route: object, pickle: bytes, tensors: list[torch.Tensor]) -> Any:
        self.before_a_call()
        self.calls.append(pickle)
        self.tensors.append(tensors)
        self.futures.append(torch.futures.Future())
        return self.futures[-1]

    ask = tell

    def future_of(self, words: bytes) -> torch.futures.Future[Any]:
        """The future of the first call that says this."""
        return next(f for f, call in zip(self.futures, self.calls, strict=True) if words in call)


def link_to_peer(
    incarnation: int, shared: SharedTensors, requests: Moves = NOWHERE, replies: Moves = NOWHERE
) -> PeerLink:
    peer = Peer(WorkerInfo("peer", PEER), incarnation, b"")
    route: Any = "a route"
    link = PeerLink(peer, route, False, dict(requests), dict(replies), shared)
    link.reply_window = FlowWindow("peer", ROOM, gives_way=False)
    link.watched = True
    return link


@dataclass
class Bench:
    """The sending half of a transport, and the memory of the peer that it sends to."""

    agent: StandIn = field(default_factory=StandIn)
    lock: threading.Lock = field(default_factory=threading.Lock)
    peers: Peers = field(default_factory=Peers)
    memory: HostMemory = field(default_factory=lambda: HostMemory("test", LIMIT))
    broke: list[tuple[PeerLink, str]] = field(default_factory=list)
    failed: list[tuple[PeerLink, int, str]] = field(default_factory=list)
    patience: Patience = Patience.WAITS

    def __post_init__(self) -> None:
        agent: Any = self.agent
        sender = SenderId(0, 1)
        self.caller = PipeCaller(
            sender, self.lock, agent, self.note, lambda *what: self.failed.append(what)
        )
        self.outgoing = FrameSender(
            WorkerInfo("me", 0),
            self.lock,
            CloseGate(self.lock),
            self.peers,
            agent,
            self.caller,
            Answers(sender),
            agent,
            lambda _: self.patience,
            self.note,
        )
        self.theirs = self.share()
        self.link = link_to_peer(1, self.share())
        self.peers.add(self.link)
        self.link.shared.place(frame_of(FrameKind.REQUEST, LARGE))
        offer = self.link.shared.take_offer()
        assert offer is not None
        self.link.shared.answered(self.theirs.map(offer.payload).payload)

    def note(self, link: PeerLink, reason: str) -> None:
        self.broke.append((link, reason))

    def share(self) -> SharedTensors:
        return self.memory.shared_with("peer", self.memory.host)

    def send(self, frame: Frame) -> None:
        is_reply = frame.kind is FrameKind.REPLY
        (self.outgoing.reply if is_reply else self.outgoing.send)(PEER, frame)

    def is_asked(self, link: PeerLink) -> torch.futures.Future[Any]:
        """The peer asks; returns where the answer is to be."""
        request = Envelope(FrameKind.REQUEST, PEER, link.peer.incarnation, REQUEST, 1)
        future: torch.futures.Future[Any] = torch.futures.Future()
        assert link.take(request, future)
        return future

    def have_maps(self, requests: Moves, replies: Moves) -> None:
        """Another life of the peer takes the place of this one."""
        self.link.shared.close()
        self.link = link_to_peer(2, nothing_shared(), requests, replies)
        self.peers.add(self.link)

    def room(self) -> int:
        """Counts the slots there are for what is ``LARGE``."""
        slots = 0
        while type(self.link.shared.place(frame_of(FrameKind.NOTICE, LARGE))) is PlacedFrame:
            slots += 1
        return slots

    def close(self) -> None:
        self.link.shared.close()
        self.theirs.close()
        self.memory.close()


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.close()


def frame_of(kind: FrameKind, *tensors: torch.Tensor) -> Frame:
    return Frame(kind, REQUEST, b"header", b"value", tensors)


def carried_by(pickle: bytes) -> tuple[Envelope, Frame]:
    """Unpacks what a call to torch carries between the ends of its pickle."""
    ends = len(call_pickle(b""))
    return unpack(pickle[ends - len(CALL_TAIL) : -len(CALL_TAIL)], [])


def fail(error: BaseException) -> NoReturn:
    raise error


def without_memory(send: Callable[[torch.Tensor], object]) -> None:
    """Sends a tensor that torch cannot take apart."""
    with pytest.raises(RuntimeError, match="storage"):
        torch.vmap(send)(torch.ones(2, 3))


def test_a_reply_that_waited_for_room_is_not_given_to_a_later_life(bench: Bench) -> None:
    former, later = bench.link, link_to_peer(2, bench.share())
    bench.is_asked(former)
    bench.is_asked(later)
    assert former.reply_window.try_charge(99, ROOM)
    former.shared.stop_sending()  # else it would take no room
    reply = Frame(FrameKind.REPLY, REQUEST, b"", bytes(70_000))
    replying = threading.Thread(target=bench.send, args=(reply,))
    replying.start()
    until(lambda: former.reply_window.waiting == 1)
    with bench.lock:
        bench.peers.remove(PEER)
        bench.peers.add(later)
        former.close_windows()
    replying.join(10)
    assert not replying.is_alive()
    assert later.awaits(REQUEST)


class TestMemoryOfAMessageThatIsNotSent:
    """The peer never hears of it, so its slots are taken back."""

    def test_as_torch_does_not_make_the_call(self, bench: Bench) -> None:
        bench.agent.before_a_call = lambda: fail(RuntimeError("it cannot"))
        for kind in (FrameKind.REQUEST, FrameKind.NOTICE):
            for _ in range(OFTEN):
                with pytest.raises(RuntimeError, match="it cannot"):
                    bench.send(frame_of(kind, LARGE))
        assert bench.room() == 4

    def test_as_it_has_a_tensor_without_memory(self, bench: Bench) -> None:
        for _ in range(OFTEN):
            without_memory(lambda each: bench.send(frame_of(FrameKind.REQUEST, LARGE, each)))
        assert bench.room() == 4

    def test_as_its_lifeline_cannot_be_opened(self, bench: Bench) -> None:
        bench.agent.before_a_call = lambda: fail(RuntimeError("it cannot"))
        for _ in range(OFTEN):
            bench.link.watched = False
            with pytest.raises(RuntimeError, match="it cannot"):
                bench.send(frame_of(FrameKind.REQUEST, LARGE))
        assert bench.room() == 4

    def test_as_the_reply_has_a_tensor_without_memory(self, bench: Bench) -> None:
        answer = bench.is_asked(bench.link)
        for _ in range(OFTEN):
            without_memory(lambda each: bench.send(frame_of(FrameKind.REPLY, LARGE, each)))
        assert bench.room() == 4
        assert bench.link.reply_window.held == 0
        assert not answer.done()
        bench.send(Frame(FrameKind.REPLY, REQUEST, b"an error instead"))
        assert b"an error instead" in answer.value().data

    @pytest.mark.interpreted
    def test_as_whoever_waits_for_room_for_it_is_interrupted(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        bench.is_asked(bench.link)
        assert bench.link.reply_window.try_charge(99, ROOM)

        def wait(*_: object) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(bench.link.reply_window, "charge", wait)
        for _ in range(OFTEN):
            with pytest.raises(KeyboardInterrupt):
                bench.send(frame_of(FrameKind.REPLY, LARGE, *BESIDE))
        assert bench.room() == 4

    def test_as_its_request_does_not_wait_any_more(self, bench: Bench) -> None:
        window = bench.link.reply_window
        reply = frame_of(FrameKind.REPLY, LARGE, *BESIDE)
        for _ in range(OFTEN):
            bench.link.loose.add(REQUEST)
            assert window.try_charge(99, ROOM)
            replying = threading.Thread(target=bench.send, args=(reply,))
            replying.start()
            until(lambda: window.waiting == 1)
            with bench.lock:
                bench.link.take_asked()
            window.release(99)
            replying.join(10)
            assert not replying.is_alive()
            assert window.held == 0
        assert bench.room() == 4


class TestMemoryOfAMessageThatMayArrive:
    """It stays as it is, whatever becomes of the call."""

    def test_as_its_pipe_broke(self, bench: Bench) -> None:
        bench.agent.before_a_call = lambda: fail(PipeBrokenError("it broke"))
        bench.send(frame_of(FrameKind.REQUEST, LARGE))
        assert bench.broke == [(bench.link, "it broke")]
        assert bench.room() == 3

    def test_as_only_what_comes_after_it_cannot_be_sent(self, bench: Bench) -> None:
        bench.room()

        def made() -> None:
            if bench.agent.calls:
                fail(MemoryError("nothing is left"))

        bench.agent.before_a_call = made
        with pytest.raises(MemoryError):
            bench.send(frame_of(FrameKind.REQUEST, LARGE))
        assert bench.link.calls.came_back(1) == (FrameKind.REQUEST, REQUEST)

    def test_as_its_reply_was_given(self, bench: Bench) -> None:
        answer = bench.is_asked(bench.link)
        bench.send(frame_of(FrameKind.REPLY, LARGE))
        assert answer.done()
        assert bench.room() == 3


def test_a_request_that_lies_in_the_memory_of_a_former_life_is_not_sent_to_a_later_one(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    former, later = bench.link, link_to_peer(2, bench.share())
    place = former.shared.place

    def place_slowly(frame: Frame) -> Frame:
        placed = place(frame)
        with bench.lock:
            bench.peers.remove(PEER)
            bench.peers.add(later)
        return placed

    monkeypatch.setattr(former.shared, "place", place_slowly)
    with pytest.raises(WorkerLostError, match="peer"):
        bench.send(frame_of(FrameKind.REQUEST, LARGE))
    assert bench.agent.calls == []
    assert later.calls.sent == 0


class TestHostMemoryThatAMapMoves:
    """A payload must not be among what it moves."""

    PAYLOAD = bytes(TENSOR_PAYLOAD_MIN)

    def test_requests_and_batches(self, bench: Bench) -> None:
        bench.have_maps(TO_DEVICE, {})
        bench.link.readiness.answered("")
        bench.send(Frame(FrameKind.REQUEST, REQUEST, b"", self.PAYLOAD))
        with bench.lock:
            bench.link.batch_under_way = True
        for _ in range(20):
            bench.send(Frame(FrameKind.NOTICE, 0, b"", bytes(TENSOR_PAYLOAD_MIN // 16)))
        with bench.lock:
            bench.link.batch_under_way = False
        bench.send(Frame(FrameKind.NOTICE, 0, b"", b"the last one"))
        assert [len(pickle) > TENSOR_PAYLOAD_MIN for pickle in bench.agent.calls] == [True, True]
        assert bench.agent.tensors == [[], []]

    def test_replies(self, bench: Bench) -> None:
        bench.have_maps({}, TO_DEVICE)
        answer = bench.is_asked(bench.link)
        bench.send(Frame(FrameKind.REPLY, REQUEST, b"", self.PAYLOAD))
        assert answer.value().tensors == []

    def test_in_the_other_direction_nothing_changes(self, bench: Bench) -> None:
        bench.have_maps({}, TO_DEVICE)
        bench.send(Frame(FrameKind.REQUEST, REQUEST, b"", self.PAYLOAD))
        bench.have_maps(TO_DEVICE, {})
        answer = bench.is_asked(bench.link)
        bench.send(Frame(FrameKind.REPLY, REQUEST, b"", self.PAYLOAD))
        assert [len(bench.agent.tensors[0]), len(answer.value().tensors)] == [1, 1]


class TestDevicesThatAreNotReady:
    """The peer may not know of our device map yet."""

    @pytest.fixture
    def sending(self, bench: Bench) -> Iterator[Future[None]]:
        bench.have_maps(TO_DEVICE, {})
        with ThreadPoolExecutor(1) as pool:
            sending = pool.submit(bench.send, frame_of(FrameKind.REQUEST, LARGE))
            until(lambda: len(bench.agent.calls) == 1)
            yield sending
            bench.link.close_windows()

    def test_a_request_that_leads_to_them_waits_for_the_peer(
        self, bench: Bench, sending: Future[None]
    ) -> None:
        assert b"meta" in bench.agent.calls[0], "it is asked for the devices"
        assert bench.agent.tensors == [[]]
        assert not sending.done()
        bench.link.readiness.answered("")
        sending.result(10)
        bench.send(frame_of(FrameKind.REQUEST, LARGE)._replace(correlation=8))
        assert [len(tensors) for tensors in bench.agent.tensors] == [0, 1, 1]

    def test_it_fails_and_takes_no_room_if_they_cannot_be_used(
        self, bench: Bench, sending: Future[None]
    ) -> None:
        bench.link.readiness.answered("it has 0 CUDA devices")
        with pytest.raises(DeviceMapError, match="'peer' cannot take these tensors: it has 0"):
            sending.result(10)
        assert bench.link.window.held == 0
        assert len(bench.agent.calls) == 1

    def test_the_next_asks_again_as_what_was_in_the_way_may_have_passed(
        self, bench: Bench, sending: Future[None]
    ) -> None:
        bench.link.readiness.answered("CUDA error: out of memory")
        with pytest.raises(DeviceMapError, match="out of memory"):
            sending.result(10)
        with ThreadPoolExecutor(2) as pool:
            both = [pool.submit(bench.send, frame_of(FrameKind.REQUEST, LARGE)) for _ in range(2)]
            until(lambda: len(bench.agent.calls) == 2)
            bench.link.readiness.answered("")
            for each in both:
                each.result(10)
        assert [b"meta" in call for call in bench.agent.calls] == [True, True, False, False]

    def test_those_that_wait_fail_if_the_peer_cannot_be_asked(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        bench.have_maps(TO_DEVICE, {})
        others: list[Inquiry] = []

        def fail_when_another_waits(*_: object) -> None:
            inquiry, unasked = bench.link.readiness.ask()
            assert not unasked
            others.append(inquiry)
            raise MemoryError("nothing is left")

        monkeypatch.setattr(bench.caller, "ask_for_devices", fail_when_another_waits)
        with pytest.raises(MemoryError):
            bench.send(frame_of(FrameKind.REQUEST, LARGE))
        with pytest.raises(DeviceMapError, match="could not be asked: nothing is left"):
            others[0].wait("peer", frame_of(FrameKind.REQUEST), lambda _: Patience.WAITS)

    def test_it_fails_if_the_peer_is_lost(self, bench: Bench, sending: Future[None]) -> None:
        with bench.lock:
            bench.link.lose("it is gone")
        with pytest.raises(WorkerLostError, match="it is gone"):
            sending.result(10)

    def test_it_is_not_sent_if_its_call_ends(self, bench: Bench, sending: Future[None]) -> None:
        bench.patience = Patience.OVER
        with pytest.raises(CallCancelledError, match="to make its devices ready"):
            sending.result(10)

    def test_what_stays_in_host_memory_does_not_wait(self, bench: Bench) -> None:
        bench.have_maps({torch.device("meta"): torch.device("meta")}, TO_DEVICE)
        bench.send(frame_of(FrameKind.REQUEST, LARGE))
        assert [len(tensors) for tensors in bench.agent.tensors] == [1]


class TestRequestsThatTorchAnswersWithAnError:
    TEXT = "Response device mapping is not available for destination me"

    def test_the_call_fails_and_its_number_is_taken_all_the_same(self, bench: Bench) -> None:
        bench.send(frame_of(FrameKind.REQUEST))
        asked = bench.agent.future_of(b"header")
        asked.set_exception(RuntimeError(self.TEXT))
        assert bench.failed == [(bench.link, REQUEST, self.TEXT)]
        assert len(bench.agent.calls) == 2
        assert bench.link.calls.under_way == 1, "until VOID has come back"
        assert bench.link.calls.came_back(1) == (VOID, 0)

    def test_with_its_number_goes_what_it_had_in_shared_memory(self, bench: Bench) -> None:
        for _ in range(1, OFTEN):
            bench.send(frame_of(FrameKind.REQUEST, LARGE))
            bench.agent.futures[-1].set_exception(RuntimeError(self.TEXT))
            envelope, frame = carried_by(bench.agent.calls[-1])
            assert envelope.kind == VOID
            bench.theirs.give_back(bytes(frame.payload))
            bench.link.window.release(REQUEST)
        assert bench.room() == 4

    @pytest.mark.parametrize("answered", [False, True])
    def test_nothing_is_done_about_a_pipe_that_broke_or_a_call_that_was_answered(
        self, bench: Bench, answered: bool
    ) -> None:
        bench.send(frame_of(FrameKind.REQUEST))
        asked = bench.agent.future_of(b"header")
        if answered:
            assert bench.link.calls.came_back(1) is not None
            asked.set_exception(RuntimeError(self.TEXT))
        else:
            text = "EOF: end of file (this error originated at tensorpipe/x.cc:259)"
            asked.set_exception(RuntimeError(text))
        assert bench.failed == []
        assert len(bench.agent.calls) == 1
