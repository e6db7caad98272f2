"""The in-process network: what all transports promise, and what its scripts do.

Times are those of a virtual clock; an *arrival* is waited for, never slept for.
"""

from __future__ import annotations

import gc
import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
import torch

from rpc.errors import AgentClosedError, UnknownWorkerError, WorkerLostError
from rpc.ids import Life
from rpc.runtime.clock import VirtualClock
from rpc.testing.memory import MemoryHub, MemoryTransport
from rpc.transports.base import Frame, FrameKind, Patience, Peer, Transport
from rpc.worker_info import WorkerInfo
from tests.rpc.transports.conformance import TransportConformance

SECONDS = 10.0


def notice(name: str, *tensors: torch.Tensor) -> Frame:
    return Frame(FrameKind.NOTICE, 0, name.encode(), b"", tensors)


class Script:
    """Delays by the name of a frame, in seconds; None drops it."""

    def __init__(self, **delays: float | None) -> None:
        self.delays = delays
        self.seen: list[tuple[int, int, str]] = []

    def delay(self, source: int, destination: int, frame: Frame) -> float | None:
        name = frame.header.decode()
        self.seen.append((source, destination, name))
        return self.delays.get(name, 0.0)


@dataclass(eq=False)
class Worker:
    """One end, and what it was told, in order."""

    hub: MemoryHub
    id: int
    incarnation: int = 0
    told: list[str] = field(default_factory=list)
    frames: list[Frame] = field(default_factory=list)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def __post_init__(self) -> None:
        self.transport: MemoryTransport = self.hub.transport()
        info = WorkerInfo(f"w{self.id}", self.id)
        address = self.transport.start(info, self.incarnation, self)
        self.peer = Peer(info, self.incarnation, address)

    def deliver(self, sender: Life, frame: Frame, in_batch: bool = False) -> None:
        self._tell(f"{frame.header.decode()} from {sender.worker}", frame)

    take_request = take_reply = deliver

    def patience(self, correlation: int) -> Patience:
        return Patience.WAITS

    def peer_lost(self, life: Life, reason: str) -> None:
        self._tell(f"lost {life.worker}: {reason}")

    def _tell(self, what: str, *frames: Frame) -> None:
        with self.changed:
            self.told.append(what)
            self.frames += frames
            self.changed.notify_all()

    def send(self, to: Worker, *names: str) -> None:
        for name in names:
            self.transport.send(to.id, notice(name))

    def hears(self, *expected: str) -> None:
        """All it was told, once what it was told last has come."""
        with self.changed:
            self.changed.wait_for(lambda: len(self.told) >= len(expected), SECONDS)
            assert self.told == [*expected]
            self.told.clear()

    def hears_nothing_more(self) -> None:
        """Checks that a message to itself comes next: all that is due already would come before."""
        self.send(self, "last")
        self.hears(f"last from {self.id}")


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
def closing() -> Iterator[list[Worker]]:
    workers: list[Worker] = []
    yield workers
    for worker in workers:
        worker.transport.close(0)


@pytest.fixture
def group(
    clock: VirtualClock, closing: list[Worker]
) -> Callable[..., tuple[MemoryHub, list[Worker]]]:
    def make(count: int, **delays: float | None) -> tuple[MemoryHub, list[Worker]]:
        hub = MemoryHub(clock, Script(**delays))
        workers = [Worker(hub, number) for number in range(count)]
        closing.extend(workers)
        for worker in workers:
            for other in workers:
                worker.transport.add_peer(other.peer)
        return hub, workers

    return make


# --- Frames


def test_frames_arrive_in_order_when_nothing_is_scripted(group):
    _, (a, b) = group(2)
    a.send(b, "x", "y", "z")
    b.hears("x from 0", "y from 0", "z from 0")


def test_frames_to_oneself_take_the_same_path(group):
    hub, (a,) = group(1)
    a.send(a, "x")
    a.hears("x from 0")
    assert hub.script.seen == [(0, 0, "x")]


def test_what_travels_is_copied(group):
    _, (a, b) = group(2)
    payload, tensor = bytearray(b"abc"), torch.arange(6.0).reshape(2, 3).t()
    weight = torch.ones(2, requires_grad=True)
    a.transport.send(1, Frame(FrameKind.NOTICE, 0, b"x", payload, (tensor, weight)))
    payload[:] = b"xyz"
    tensor.zero_()
    b.hears("x from 0")
    (frame,) = b.frames
    assert frame.payload == b"abc"
    assert torch.equal(frame.tensors[0], torch.arange(6.0).reshape(2, 3).t())
    assert frame.tensors[0].stride() == tensor.stride()
    assert not frame.tensors[1].requires_grad


def test_a_delivered_frame_is_not_kept(group):
    _, (a, b) = group(2)
    a.transport.send(1, notice("x", torch.ones(3)))
    b.hears("x from 0")
    dead = weakref.ref(b.frames.pop().tensors[0])
    a.send(b, "y")
    b.hears("y from 0")
    assert dead() is None


def test_an_unknown_destination_is_refused(group):
    _, (a,) = group(1)
    with pytest.raises(UnknownWorkerError, match="id 7"):
        a.transport.send(7, notice("x"))


def test_a_receiver_that_fails_does_not_stop_delivery(group, caplog: pytest.LogCaptureFixture):
    _, (a, b) = group(2)
    normal = b.deliver

    def fail(sender: int, frame: Frame) -> None:
        b.deliver = normal  # type: ignore[method-assign]
        raise ValueError("no")

    b.deliver = fail  # type: ignore[method-assign]
    with caplog.at_level(logging.ERROR, logger="rpc"):
        a.send(b, "x", "y")
        b.hears("y from 0")
    assert "worker 1 failed to take a message" in caplog.text


# --- Scripts


def test_a_delayed_frame_arrives_when_the_clock_says_so(group, clock: VirtualClock):
    _, (a, b) = group(2, late=2.0)
    a.send(b, "late", "x")
    b.hears("x from 0")
    clock.advance(1.9)
    b.hears_nothing_more()
    clock.advance(0.2)
    b.hears("late from 0")


def test_delays_reorder_frames(group, clock: VirtualClock):
    _, (a, b) = group(2, first=3.0, second=1.0, third=2.0)
    a.send(b, "first", "second", "third")
    for name in ("second", "third", "first"):
        clock.advance(1.0)
        b.hears(f"{name} from 0")


def test_frames_that_are_due_at_once_come_in_the_order_in_which_they_became_due(
    group, clock: VirtualClock
):
    _, (a, b) = group(2, first=3.0, second=1.0, third=2.0)
    a.send(b, "first", "second", "third")
    clock.advance(10)
    b.hears("second from 0", "third from 0", "first from 0")


def test_a_dropped_frame_never_arrives(group, clock: VirtualClock):
    _, (a, b) = group(2, dropped=None)
    a.send(b, "dropped", "x")
    b.hears("x from 0")
    clock.advance(1e9)
    b.hears_nothing_more()


def test_a_script_sees_every_frame_once(group):
    hub, (a, b) = group(2)
    a.send(b, "x")
    b.send(a, "y")
    a.hears("y from 1")
    assert hub.script.seen == [(0, 1, "x"), (1, 0, "y")]


# --- Closing


def test_peers_hear_all_that_was_sent_before_they_hear_of_the_close(group, clock: VirtualClock):
    _, (a, b, c) = group(3, late=5.0)
    a.send(b, "late", "x")
    a.transport.close(1.0)
    b.hears("x from 0")
    c.hears("lost 0: it closed its connection")
    clock.advance(5)
    b.hears("late from 0", "lost 0: it closed its connection")


def test_a_closed_transport_is_told_nothing_and_sends_nothing(group):
    _, (a, b) = group(2)
    a.transport.close(1.0)
    with pytest.raises(AgentClosedError):
        a.send(b, "x")
    b.hears("lost 0: it closed its connection")
    with pytest.raises(WorkerLostError, match="w0"):
        b.send(a, "x")
    a.hears()
    a.transport.close(1.0)
    b.hears_nothing_more()


def test_a_transport_may_be_closed_by_what_it_delivers(group):
    _, (a, b) = group(2)
    a.deliver = lambda *_: a.transport.close(0)  # type: ignore[method-assign]
    b.send(a, "x")
    b.hears("lost 0: it closed its connection")


def test_a_peer_that_was_added_after_it_closed_is_lost_at_once(group):
    hub, (a,) = group(1)
    b = Worker(hub, 1)
    b.transport.close(0)
    a.transport.add_peer(b.peer)
    a.hears("lost 1: it is no longer connected")


def test_closing_what_never_started_is_fine():
    hub = MemoryHub()
    hub.transport().close(0)


# --- Cutting off


def test_a_worker_that_is_cut_off_is_lost_to_all_and_hears_and_says_nothing(
    group, clock: VirtualClock
):
    hub, (a, b, c) = group(3, late=5.0)
    b.send(a, "late")
    c.send(b, "late")
    hub.cut(1, "the test cut it")
    a.hears("lost 1: the test cut it")
    c.hears("lost 1: the test cut it")
    b.send(a, "x")
    b.send(b, "x")
    with pytest.raises(WorkerLostError, match="the test cut it"):
        a.send(b, "x")
    clock.advance(10)
    a.hears_nothing_more()
    b.hears()
    hub.cut(1)
    a.send(c, "y")
    c.hears("y from 0")


def test_frames_that_were_due_before_the_cut_arrive_before_the_loss(group, clock: VirtualClock):
    hub, (a, b) = group(2, soon=1.0, late=2.0)
    proceed = threading.Event()
    normal = a.deliver

    def hold(sender: int, frame: Frame) -> None:
        assert proceed.wait(SECONDS)
        normal(sender, frame)

    a.deliver = hold  # type: ignore[method-assign]
    b.send(a, "x", "soon", "late")
    clock.advance(1.5)
    hub.cut(1, "cut")
    proceed.set()
    a.hears("x from 1", "soon from 1", "lost 1: cut")
    clock.advance(10)
    a.hears_nothing_more()


# --- Who is who


def test_frames_that_come_before_their_sender_is_known_wait_for_it(
    clock: VirtualClock, closing: list[Worker]
):
    hub = MemoryHub(clock)
    a, b = Worker(hub, 0), Worker(hub, 1)
    closing += [a, b]
    a.transport.add_peer(a.peer)
    b.transport.add_peer(a.peer)
    b.send(a, "x", "y")
    a.hears_nothing_more()
    a.transport.add_peer(b.peer)
    a.hears("x from 1", "y from 1")


def test_a_removed_peer_is_unknown_and_loses_who_removed_it(group):
    _, (a, b) = group(2)
    a.transport.remove_peer(1)
    with pytest.raises(UnknownWorkerError):
        a.send(b, "x")
    b.send(a, "x")
    b.hears("lost 0: it takes no more messages from here")
    a.hears_nothing_more()
    a.transport.remove_peer(1)


def test_a_peer_that_is_removed_before_its_loss_is_told_is_not_reported(group, clock: VirtualClock):
    _, (a, b) = group(2, late=1.0)
    b.send(a, "late")
    b.transport.close(0)
    a.transport.remove_peer(1)
    clock.advance(2)
    a.hears_nothing_more()


def test_a_worker_that_comes_back_is_heard_and_its_former_life_is_not(
    group, clock: VirtualClock, closing: list[Worker]
):
    hub, (a, b) = group(2, late=5.0)
    b.send(a, "late")
    again = Worker(hub, 1, incarnation=1)
    closing.append(again)
    a.transport.add_peer(again.peer)
    again.transport.add_peer(a.peer)
    clock.advance(5)
    b.hears("lost 0: it takes no more messages from here")
    again.send(a, "back")
    a.hears("back from 1")
    a.send(again, "hello")
    again.hears("hello from 0")
    b.transport.close(0)
    a.hears_nothing_more()


def test_what_a_new_life_says_before_it_is_known_waits_although_the_old_one_is_known(
    group, closing: list[Worker]
):
    hub, (a, b) = group(2)
    again = Worker(hub, 1, incarnation=1)
    closing.append(again)
    again.transport.add_peer(a.peer)
    again.send(a, "early")
    a.hears_nothing_more()
    b.transport.close(0)
    a.hears("lost 1: it closed its connection")
    a.transport.add_peer(again.peer)
    a.hears("early from 1")


def test_a_network_is_freed_after_its_workers_closed():
    hub = MemoryHub()
    worker = Worker(hub, 0)
    worker.transport.add_peer(worker.peer)
    worker.send(worker, "x")
    worker.hears("x from 0")
    worker.transport.close(0)
    dead = weakref.ref(hub)
    del hub, worker
    gc.collect()
    assert dead() is None


# --- What all transports promise


class TestMemory(TransportConformance):
    @pytest.fixture
    def transports(self) -> Callable[[], Transport]:
        return MemoryHub().transport
