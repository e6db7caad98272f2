"""A transport inside one process: queues instead of sockets, faults on request.

A :class:`MemoryHub` is the network; each worker has a :class:`MemoryTransport`
on it. One thread per worker delivers its frames in the order in which they
become due. What travels is copied on sending, so that sharing memory by
accident cannot hide a bug. With a script (:class:`NetworkScript`) and a virtual clock, frames
are delayed, dropped or reordered and workers cut off, deterministically.
"""

from __future__ import annotations

import heapq
import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol

from rpc.clock import Clock, MonotonicClock
from rpc.errors import UnknownWorkerError, WorkerLostError
from rpc.transports.base import Frame, Peer, Receiver
from rpc.worker_info import WorkerInfo


class NetworkScript(Protocol):
    """Decides the fate of each frame."""

    def delay(self, source: int, destination: int, frame: Frame) -> float | None:
        """Seconds until delivery; None drops the frame."""


class _Prompt:
    def delay(self, source: int, destination: int, frame: Frame) -> float | None:
        return 0.0


@dataclass(frozen=True, slots=True)
class _Link:
    peer: Peer
    lost: str | None = None


class MemoryHub:
    """The network that connects the memory transports of one process.

    Args:
        clock: whose time delays are measured in; default the machine's.
        script: delays and drops; default delivers everything at once.
    """

    def __init__(self, clock: Clock | None = None, script: NetworkScript | None = None) -> None:
        self.clock = clock or MonotonicClock()
        self.script = script or _Prompt()
        self._lock = threading.Lock()
        self._ends: dict[bytes, MemoryTransport] = {}
        self._addresses = itertools.count()

    def transport(self) -> MemoryTransport:
        """A new worker's end of this network."""
        return MemoryTransport(self)

    def cut(self, worker_id: int, reason: str = "cut off by the test") -> None:
        """Makes a worker vanish, as a crash would: its peers lose it, it hears nothing."""
        for end in self._attached():
            if end.worker_id == worker_id:
                self._detach(end)
        for end in self._attached():
            end.lose(worker_id, reason)

    def _attach(self, end: MemoryTransport) -> bytes:
        with self._lock:
            address = b"memory:%d" % next(self._addresses)
            self._ends[address] = end
            return address

    def _detach(self, end: MemoryTransport) -> None:
        with self._lock:
            self._ends = {address: e for address, e in self._ends.items() if e is not end}

    def _attached(self) -> list[MemoryTransport]:
        with self._lock:
            return list(self._ends.values())

    def _find(self, address: bytes) -> MemoryTransport | None:
        with self._lock:
            return self._ends.get(address)


class MemoryTransport:
    """One worker's end of a :class:`MemoryHub`; see ``base.Transport``."""

    inline_handlers: ClassVar[int] = 0

    def __init__(self, hub: MemoryHub) -> None:
        self.worker_id = -1
        self._hub = hub
        self._lock = threading.Lock()
        self._links: dict[int, _Link] = {}
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._woken = threading.Event()
        self._closing = False
        self._thread: threading.Thread | None = None

    def start(self, info: WorkerInfo, incarnation: int, receiver: Receiver) -> bytes:
        """Joins the hub; returns the address to publish to the other workers."""
        self.worker_id = info.id
        self._incarnation = incarnation
        self._receiver = receiver
        self._thread = threading.Thread(target=self._run, name=f"memory-{info.name}", daemon=True)
        self._thread.start()
        self.address = self._hub._attach(self)
        return self.address

    def add_peer(self, peer: Peer) -> None:
        """Makes ``peer`` known."""
        with self._lock:
            self._links[peer.info.id] = _Link(peer)

    def remove_peer(self, worker_id: int) -> None:
        """Forgets a peer."""
        with self._lock:
            self._links.pop(worker_id, None)

    def send(self, to: int, frame: Frame) -> None:
        """Queues a copy of ``frame`` at the peer."""
        with self._lock:
            link = self._links.get(to)
        if link is None:
            raise UnknownWorkerError(f"could not find destination id {to}")
        if link.lost is not None:
            raise WorkerLostError(link.peer.info.name, link.peer.incarnation, link.lost)
        end = self._hub._find(link.peer.address)
        if end is None:
            reason = "it is no longer connected"
            self.lose(to, reason)
            raise WorkerLostError(link.peer.info.name, link.peer.incarnation, reason)
        delay = self._hub.script.delay(self.worker_id, to, frame)
        if delay is not None:
            end._accept(self.worker_id, self._incarnation, _copy(frame), delay)

    def wait(self, done: Callable[[], bool], block: Callable[[], None]) -> None:
        """Sleeps; the hub's threads deliver meanwhile."""
        block()

    def wake(self) -> None:
        """Nothing to do: who waits sleeps in a way of its own."""

    def close(self, flush_seconds: float) -> None:
        """Leaves the hub after what was sent to it so far is delivered to others."""
        self._hub._detach(self)
        with self._lock:
            self._closing = True
        self._woken.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        for end in self._hub._attached():
            end.lose(self.worker_id, "it closed its connection", self._incarnation)

    def lose(self, worker_id: int, reason: str, incarnation: int | None = None) -> None:
        """Marks a peer as lost and tells the receiver, after frames already under way."""
        with self._lock:
            link = self._links.get(worker_id)
            if link is None or link.lost is not None:
                return
            if incarnation is not None and link.peer.incarnation != incarnation:
                return
            self._links[worker_id] = replace(link, lost=reason)
        self._schedule(0.0, lambda: self._receiver.peer_lost(worker_id, reason))

    def _accept(self, sender: int, incarnation: int, frame: Frame, delay: float) -> None:
        self._schedule(delay, lambda: self._deliver(sender, incarnation, frame))

    def _deliver(self, sender: int, incarnation: int, frame: Frame) -> None:
        with self._lock:
            link = self._links.get(sender)
        if link is not None and link.peer.incarnation == incarnation:
            self._receiver.deliver(sender, frame)

    def _schedule(self, delay: float, event: Callable[[], None]) -> None:
        due = self._hub.clock.now() + delay if delay else 0.0
        with self._lock:
            heapq.heappush(self._due, (due, next(self._order), event))
        self._woken.set()

    def _run(self) -> None:
        while True:
            self._woken.clear()
            with self._lock:
                if self._closing:
                    return
                deadline = self._due[0][0] if self._due else None
                ready = deadline is not None and deadline <= self._hub.clock.now()
                event = heapq.heappop(self._due)[2] if ready else None
            if event is not None:
                event()
            else:
                self._hub.clock.wait(self._woken, deadline)


def _copy(frame: Frame) -> Frame:
    tensors = tuple(t.clone() for t in frame.tensors)
    return frame._replace(payload=bytes(frame.payload), tensors=tensors)
