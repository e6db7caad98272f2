"""A transport inside one process: queues instead of sockets, faults on request.

A :class:`MemoryHub` is the network; each worker has a :class:`MemoryTransport`
on it. One thread per worker delivers its frames in the order in which they
become due. Values are copied on sending, so that sharing memory by
accident cannot hide a bug. With a script (:class:`NetworkScript`) and a virtual
clock, frames are delayed, dropped or reordered and workers cut off,
deterministically.

Frames of a worker that is not known here yet wait until it is; those of a life
that is over are refused, and their sender loses this worker.
"""

from __future__ import annotations

import enum
import heapq
import itertools
import logging
import threading
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Protocol

from rpc.errors import AgentClosedError, UnknownWorkerError, WorkerLostError
from rpc.group.probes import Answer
from rpc.ids import Life
from rpc.runtime.clock import Alarm, Clock, MonotonicClock
from rpc.runtime.threads import Thread
from rpc.transports.base import Frame, Peer, Receiver
from rpc.transports.loopback import copy
from rpc.worker_info import WorkerInfo

_logger = logging.getLogger("rpc")


class NetworkScript(Protocol):
    """Decides the fate of each frame; an object of yours with this method will do."""

    def delay(self, source: int, destination: int, frame: Frame) -> float | None:
        """Returns the seconds until ``frame`` is delivered, or None to drop it.

        Args:
            source: id of the worker that sends it.
            destination: id of the worker that it is for.
            frame: what is sent, with ``header``, ``payload`` and ``tensors``.
        """


class _Prompt:
    def delay(self, source: int, destination: int, frame: Frame) -> float | None:
        return 0.0


@dataclass(slots=True)
class _MemoryLink:
    """A peer as one end sees it; ``over`` once its loss was reported."""

    peer: Peer
    lost: str | None = None
    over: bool = False


@dataclass(frozen=True, slots=True)
class _Arrival:
    """A frame from ``origin`` is due."""

    origin: MemoryTransport
    frame: Frame


@dataclass(frozen=True, slots=True)
class _Parked:
    """A frame that waits while one of its two ends is frozen."""

    source: MemoryTransport
    end: MemoryTransport
    arrival: _Arrival
    delay: float


_Event = _Arrival | _MemoryLink
"""An event at one end; a link stands for its loss."""


class _Fate(enum.Enum):
    """Verdicts on a frame that arrives."""

    TAKEN = enum.auto()
    EARLY = enum.auto()
    REFUSED = enum.auto()


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
        self._probers: dict[str, MemoryProber] = {}
        self._frozen: set[int] = set()
        self._parked: list[_Parked] = []

    def transport(self) -> MemoryTransport:
        """A new worker's end of this network."""
        return MemoryTransport(self)

    def prober(self) -> MemoryProber:
        """Makes the prober with which a new worker on this network asks for signs of life."""
        return MemoryProber(self)

    def freeze(self, worker_id: int) -> None:
        """Makes a worker as silent as a stopped process: what it sends and is sent waits."""
        with self._lock:
            self._frozen.add(worker_id)

    def thaw(self, worker_id: int) -> None:
        """Ends :meth:`freeze`; what waited arrives."""
        with self._lock:
            self._frozen.discard(worker_id)
            parked, self._parked = self._parked, []
        for each in parked:
            self._carry(each.source, each.end, each.arrival, each.delay)

    def cut(self, worker_id: int, reason: str = "cut off by the test") -> None:
        """Makes a worker vanish, as a crash would.

        Its peers lose it at once, with what is still on the way; it hears nothing
        any more, and what it says is lost.
        """
        ends = self._attached()
        with self._lock:
            probers = [p for p in self._probers.values() if p._worker_id != worker_id]
            self._probers = {prober._address: prober for prober in probers}
        for end in ends:
            if end.worker_id == worker_id:
                self._detach(end)
                end._vanish()
        for end in ends:
            if end.worker_id != worker_id:
                end._lose_abruptly(worker_id, reason)

    def _attach(self, end: MemoryTransport) -> bytes:
        with self._lock:
            address = b"memory:%d" % next(self._addresses)
            self._ends[address] = end
            return address

    def _detach(self, end: MemoryTransport) -> None:
        with self._lock:
            self._ends = {address: e for address, e in self._ends.items() if e is not end}
            self._parked = [each for each in self._parked if end not in (each.source, each.end)]

    def _carry(
        self, source: MemoryTransport, end: MemoryTransport, arrival: _Arrival, delay: float
    ) -> None:
        with self._lock:
            parked = not self._frozen.isdisjoint((source.worker_id, end.worker_id))
            if parked:
                self._parked.append(_Parked(source, end, arrival, delay))
        if not parked:
            end._accept(arrival, delay)

    def _attached(self) -> list[MemoryTransport]:
        with self._lock:
            return list(self._ends.values())

    def _find(self, address: bytes) -> MemoryTransport | None:
        with self._lock:
            return self._ends.get(address)


class MemoryTransport:
    """One worker's connection to the others through memory.

    Args:
        hub: the network that it belongs to; ``hub.transport()`` makes one.
    """

    inline_handlers: ClassVar[int] = 0
    inline_completions: ClassVar[int] = 0
    delivers_while_waiting: ClassVar[bool] = False

    def __init__(self, hub: MemoryHub) -> None:
        self.worker_id = -1
        self._incarnation = -1
        self._hub = hub
        self._lock = threading.Lock()
        self._links: dict[int, _MemoryLink] = {}
        self._past: dict[int, int] = {}
        self._early: defaultdict[tuple[int, int], list[_Arrival]] = defaultdict(list)
        self._due: list[tuple[float, int, _Event]] = []
        self._order = itertools.count()
        self._alarm = Alarm()
        self._vanished = False
        self._closing = False
        self._thread: threading.Thread | None = None

    def start(self, info: WorkerInfo, incarnation: int, receiver: Receiver) -> bytes:
        """Joins the hub; returns the address to publish to the other workers."""
        self.worker_id = info.id
        self._incarnation = incarnation
        self._receiver = receiver
        self._thread = Thread(target=self._run, name=f"memory-{info.name}", daemon=True)
        self._thread.start()
        return self._hub._attach(self)

    def add_peer(self, peer: Peer) -> None:
        """Makes ``peer`` known, and delivers what it sent before."""
        worker_id, incarnation = peer.info.id, peer.incarnation
        with self._lock:
            self._links[worker_id] = _MemoryLink(peer)
            for arrival in self._early.pop((worker_id, incarnation), ()):
                self._push(0.0, arrival)
        self._alarm.set()
        if self._hub._find(peer.address) is None:
            self._lose(worker_id, "it is no longer connected")

    def remove_peer(self, worker_id: int) -> None:
        """Forgets a peer, which loses this worker if it speaks to it again."""
        with self._lock:
            link = self._links.pop(worker_id, None)
            if link is not None:
                self._past[worker_id] = link.peer.incarnation

    def send(self, to: int, frame: Frame) -> None:
        """Queues a copy of ``frame`` at the peer."""
        with self._lock:
            link = self._links.get(to)
            closing, vanished = self._closing, self._vanished
        if closing:
            raise AgentClosedError("this worker's transport is closed")
        if link is None:
            raise UnknownWorkerError(f"could not find destination id {to}")
        if vanished:
            return
        end = self._hub._find(link.peer.address)
        if end is None:
            self._lose(to, "it is no longer connected")
        if link.lost is not None:
            raise WorkerLostError(link.peer.info.name, link.peer.incarnation, link.lost)
        delay = self._hub.script.delay(self.worker_id, to, frame)
        if end is not None and delay is not None:
            self._hub._carry(self, end, _Arrival(self, copy(frame)), delay)

    def look_again(self, to: int) -> None:
        """Does nothing: nothing waits to be sent."""

    def attend(self) -> None:
        """Does nothing: the hub's threads deliver in any case."""

    def wait(self, done: Callable[[], object], block: Callable[[], None]) -> None:
        """Sleeps; the hub's threads deliver meanwhile."""
        block()

    def wake(self) -> None:
        """Does nothing: whoever waits sleeps in a way of its own."""

    def close(self, flush_seconds: float, handler_seconds: float = 0.0) -> None:
        """Leaves the hub; peers learn of it after what was sent to them so far."""
        self._hub._detach(self)
        with self._lock:
            self._closing = True
        self._alarm.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        for end in self._hub._attached():
            end._lose(self.worker_id, "it closed its connection", self._incarnation)

    # --- What the hub and the other ends do to this one

    def _vanish(self) -> None:
        """Hears and says nothing any more."""
        with self._lock:
            self._vanished = True
            self._due.clear()

    def _lose(self, worker_id: int, reason: str, incarnation: int | None = None) -> None:
        """Marks a peer as lost and tells the receiver, after the frames that are on the way."""
        with self._lock:
            link = self._links.get(worker_id)
            if link is None or link.lost is not None or self._vanished:
                return
            if incarnation is not None and link.peer.incarnation != incarnation:
                return
            link.lost = reason
            self._push(
                max((d for d, _, e in self._due if _is_from(worker_id, e)), default=0.0), link
            )
        self._alarm.set()

    def _lose_abruptly(self, worker_id: int, reason: str) -> None:
        """Loses a peer like :meth:`_lose`, and with it the frames that are not due yet."""
        now = self._hub.clock.now()
        with self._lock:
            self._due = [e for e in self._due if e[0] <= now or not _is_from(worker_id, e[2])]
            heapq.heapify(self._due)
        self._lose(worker_id, reason)

    def _accept(self, arrival: _Arrival, delay: float) -> None:
        due = self._hub.clock.now() + delay if delay else 0.0
        with self._lock:
            if not (self._vanished or self._closing):
                self._push(due, arrival)
        self._alarm.set()

    def _push(self, due: float, event: _Event) -> None:
        heapq.heappush(self._due, (due, next(self._order), event))

    # --- What happens on the thread

    def _report(self, link: _MemoryLink) -> None:
        life = link.peer.life
        with self._lock:
            current = self._links.get(life.worker) is link
            link.over = True
        if current and link.lost is not None:
            self._receiver.peer_lost(life, link.lost)

    def _deliver(self, arrival: _Arrival) -> None:
        origin = arrival.origin
        with self._lock:
            fate = self._fate(origin.worker_id, origin._incarnation)
            if fate is _Fate.EARLY:
                self._early[origin.worker_id, origin._incarnation].append(arrival)
        if fate is _Fate.TAKEN:
            self._receiver.deliver(Life(origin.worker_id, origin._incarnation), arrival.frame)
        elif fate is _Fate.REFUSED:
            origin._lose(self.worker_id, "it takes no more messages from here", self._incarnation)

    def _fate(self, sender: int, incarnation: int) -> _Fate:
        """The fate of a frame that arrives. Called with the lock held."""
        link = self._links.get(sender)
        known = self._past.get(sender, -1) if link is None else link.peer.incarnation
        if incarnation > known:
            return _Fate.EARLY
        current = link is not None and incarnation == known and not link.over
        return _Fate.TAKEN if current else _Fate.REFUSED

    def _run(self) -> None:
        while not self._closing:
            deadline, event = self._next()
            if event is None:
                self._hub.clock.wait(self._alarm, deadline)
                continue
            try:
                if isinstance(event, _Arrival):
                    self._deliver(event)
                else:
                    self._report(event)
            except Exception:
                _logger.exception("worker %d failed to take a message", self.worker_id)
            del event

    def _next(self) -> tuple[float | None, _Event | None]:
        """The event that is due, or when the next one will be."""
        now = self._hub.clock.now()
        with self._lock:
            if not self._due:
                return None, None
            due, _, event = self._due[0]
            if due > now:
                return due, None
            heapq.heappop(self._due)
            return None, event


class MemoryProber:
    """Signs of life on a :class:`MemoryHub`; see ``rpc.group.probes.Prober``."""

    def __init__(self, hub: MemoryHub) -> None:
        self._hub = hub
        self._address = ""
        self._worker_id = -1
        self._asked: dict[Life, str] = {}
        self._expelled: set[str] = set()
        self._note: str | None = None

    def start(self, me: Life) -> str:
        """Begins to give signs of life."""
        self._worker_id = me.worker
        with self._hub._lock:
            self._address = f"memory:{next(self._hub._addresses)}"
            self._hub._probers[self._address] = self
        return self._address

    def ask(self, life: Life, address: str) -> None:
        """Asks a peer."""
        self._asked[life] = address

    def collect(self) -> list[Answer]:
        """The answers of those who are there; a worker that is frozen itself asks in vain."""
        answers = []
        for life, address in list(self._asked.items()):
            peer = self._hub._probers.get(address)
            if self._frozen() or (peer is not None and not peer._frozen()):
                del self._asked[life]
                expelled = peer is not None and self._address in peer._expelled
                answers.append(Answer(life, expelled and not self._frozen()))
        return answers

    def forget(self, life: Life) -> None:
        """A peer will not be asked for a while."""
        self._asked.pop(life, None)

    def expel(self, address: str, reason: str) -> None:
        """Leaves a note for a worker that was declared lost."""
        self._expelled.add(address)
        peer = self._hub._probers.get(address)
        if peer is not None:
            peer._note = reason

    def verdict(self) -> str | None:
        """The note that somebody left."""
        return None if self._frozen() else self._note

    def close(self) -> None:
        """Stops giving signs of life."""
        with self._hub._lock:
            self._hub._probers.pop(self._address, None)

    def _frozen(self) -> bool:
        return self._worker_id in self._hub._frozen


def _is_from(worker_id: int, event: _Event) -> bool:
    return isinstance(event, _Arrival) and event.origin.worker_id == worker_id
