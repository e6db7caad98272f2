"""torch's TensorPipe agent as a bus for our frames.

Owns the links to peers and what is under way on each. Every frame is one
asynchronous Python call of torch's (``tensorpipe_wire`` makes and takes them,
``tensorpipe_torch`` carries them); a reply completes the call its request came
with. Handlers and deadlines are the agent's.

How the loss of a peer is noticed: each pipe carries one call, its lifeline,
that the other side answers only when it leaves. A lifeline that breaks is a
lost worker. How a worker leaves: it answers every call and lifeline it holds
and parts from each peer (``tensorpipe_links``), so that no pipe closes while
someone reads from it.

Identity is ours, not torch's: it numbers peers as they come, and as it never
reopens a pipe that broke, a worker that returns is a new peer to it.
"""

from __future__ import annotations

import atexit
import enum
import json
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import torch

from rpc.devices import (
    DeviceInfo,
    DeviceMap,
    check_devices,
    local_device_info,
    reverse,
    used_devices,
)
from rpc.errors import AgentClosedError, BringUpError, UnknownWorkerError, WorkerLostError
from rpc.transports import tensorpipe_wire as wire
from rpc.transports.base import Frame, FrameKind, Peer, Receiver
from rpc.transports.tensorpipe_links import AnswerFuture, Link
from rpc.transports.tensorpipe_torch import POOL_THREADS, TorchAgent, available
from rpc.transports.tensorpipe_wire import Answer, Envelope
from rpc.worker_info import WorkerInfo

if TYPE_CHECKING:
    from rpc.options import TensorPipeRpcBackendOptions

__all__ = ["TensorPipeTransport", "available"]

_log = logging.getLogger(__name__)

_EARLY_LIMIT = 65_536
_ANSWERED_LATER = frozenset({FrameKind.REQUEST, wire.LIFELINE, wire.FAREWELL})
_SHUT_DOWN = "it shut down"
_REMOVED = "it no longer counts this worker as a member"
_OLD_LIFE = "it knows a later life of this worker"
_OVERRUN = "it was sent too much before it knew this worker"


class _State(enum.Enum):
    NEW = enum.auto()
    OPEN = enum.auto()
    CLOSING = enum.auto()
    CLOSED = enum.auto()


class TensorPipeTransport:
    """One worker's end of torch's TensorPipe; see ``base.Transport``.

    torch allows one per process.

    Args:
        options: transports, channels and device maps for torch.
    """

    inline_handlers: ClassVar[int] = POOL_THREADS // 3  # two executors; a third is free
    inline_completions: ClassVar[int] = inline_handlers
    delivers_while_waiting: ClassVar[bool] = True

    _agent: TorchAgent
    _info: WorkerInfo
    _incarnation: int
    _receiver: Receiver

    def __init__(self, options: TensorPipeRpcBackendOptions) -> None:
        self._options = options
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._state = _State.NEW
        self._links: dict[int, Link] = {}
        self._removed: dict[int, Link] = {}
        self._early: list[tuple[Envelope, Frame, AnswerFuture | None]] = []
        self._senders = 0
        self._unwritten: set[threading.Event] = set()

    def start(self, info: WorkerInfo, incarnation: int, receiver: Receiver) -> bytes:
        """Starts torch's agent; returns its address and device maps, for the other workers.

        Raises:
            BringUpError: if this build of torch lacks TensorPipe, or torch already runs
                an RPC agent in this process.
        """
        if not available():
            raise BringUpError("this build of torch has no TensorPipe; use another backend")
        self._info, self._incarnation, self._receiver = info, incarnation, receiver
        devices = local_device_info(self._options.device_maps, self._options.devices)
        used = used_devices(devices)
        if used and torch.cuda.is_available():
            torch.cuda.init()  # type: ignore[no-untyped-call]
        self._agent = TorchAgent(info.name, self._options, used)
        wire.attach(self, self._agent.tensor_tables)
        self._state = _State.OPEN
        atexit.register(self._abandon)
        try:
            self._agent.prime(self._pickle(wire.PRIMER))
        except BaseException:
            self._abandon()
            raise
        address = {"url": self._agent.url.decode(), "devices": devices.to_json()}
        return json.dumps(address).encode()

    def add_peer(self, peer: Peer) -> None:
        """Makes ``peer`` known, and takes what it sent before that."""
        self._check_open()
        known = self._links.get(peer.info.id)
        if known is not None and known.lost is None and known.peer == peer:
            return
        address = json.loads(peer.address)
        maps = DeviceInfo.from_json(address["devices"]).maps
        replies = reverse(maps.get(self._info.name, {}))
        requests = self._options.device_maps.get(peer.info.name, {})
        if peer.info.id == self._info.id:
            route = self._agent.myself()
        else:
            route = self._agent.reach(peer.info.name, address["url"].encode(), replies)
        link = Link(peer, route, peer.info.id < self._info.id, requests, replies)
        with self._lock:
            self._links[peer.info.id] = link
            self._removed.pop(peer.info.id, None)
            early = [each for each in self._early if each[0].sender == peer.info.id]
            self._early = [each for each in self._early if each[0].sender != peer.info.id]
        for envelope, frame, future in early:
            self._take(envelope, frame, future)

    def remove_peer(self, worker_id: int) -> None:
        """Forgets a peer; what it still sends is refused.

        torch offers no way to close its pipe, which stays until either process ends.
        """
        with self._lock:
            link = self._links.pop(worker_id, None)
            if link is None or self._state is not _State.OPEN:
                return
            self._removed[worker_id] = link
            asked, lifelines = link.take_asked(), link.take_lifelines()
            self._senders += 1
        try:
            self._answer_all(asked, wire.REFUSED, _REMOVED)
            self._answer_all(lifelines, wire.LIFELINE, _REMOVED)
        finally:
            self._sent()

    def device_map(self, worker_id: int) -> DeviceMap:
        """See :meth:`rpc.transports.base.MapsDevices.device_map`."""
        with self._lock:
            link = self._links.get(worker_id)
        return {} if link is None else dict(link.requests)

    def send(self, to: int, frame: Frame) -> None:
        """Hands ``frame`` to torch; see ``base.Transport.send``.

        A reply to a worker that is gone is dropped.
        """
        if frame.kind is FrameKind.REPLY:
            self._reply(to, frame)
        elif frame.kind is FrameKind.NOTICE and not frame.tensors:
            self._notify(to, frame)
        else:
            self._call(to, frame)

    def watch(self, worker_id: int) -> None:
        """Connects to a peer, if need be, so that its loss is noticed without traffic.

        Raises:
            WorkerLostError: the peer was lost.
            UnknownWorkerError: the peer was never added.
        """
        with self._lock:
            link = self._usable(worker_id)
            self._senders += 1
        try:
            self._open_lifeline(link)
        finally:
            self._sent()

    def wait(self, done: Callable[[], bool], block: Callable[[], None]) -> None:
        """Sleeps; torch's threads deliver meanwhile."""
        block()

    def wake(self) -> None:
        """Nothing to do: who waits sleeps in a way of its own."""

    def close(self, flush_seconds: float) -> None:
        """Leaves the group and joins torch's threads. Requests not replied to are dropped.

        Args:
            flush_seconds: how long to wait for peers to take what was sent, and to part.
        """
        deadline = time.monotonic() + flush_seconds
        with self._lock:
            if self._state is not _State.OPEN:
                return
            self._state = _State.CLOSING
            self._wait_until(lambda: self._senders == 0, None)
            self._wait_until(lambda: not any(each.notices for each in self._sendable()), deadline)
        self._part(deadline)
        self._agent.stop()
        wire.detach(self)
        with self._lock:
            self._state = _State.CLOSED
            self._links.clear()
            self._early.clear()
        atexit.unregister(self._abandon)

    # Sending

    def _call(self, to: int, frame: Frame) -> None:
        with self._lock:
            link = self._usable(to)
            link.begin_call()
            self._senders += 1
        try:
            if frame.tensors:
                check_devices(frame.tensors, link.requests, "Request", link.name)
            self._open_lifeline(link)
            data, tensors = wire.pack(self._envelope(frame.kind, frame.correlation), frame)
            if frame.kind is FrameKind.REQUEST:
                self._agent.ask(link.route, wire.call_pickle(data), tensors)
            else:
                self._agent.tell(link.route, wire.call_pickle(data), tensors)
        except BaseException:
            with self._lock:
                link.take_back_call()
            self._settle(link)
            raise
        finally:
            self._sent()

    def _notify(self, to: int, frame: Frame) -> None:
        with self._lock:
            link = self._usable(to)
            link.notices.append(frame)
            batch = link.take_batch()
            self._senders += 1
        try:
            self._open_lifeline(link)
            self._send_batch(link, batch)
        finally:
            self._sent()

    def _send_batch(self, link: Link, batch: list[Frame]) -> None:
        if not batch:
            return
        frame = Frame(FrameKind.NOTICE, 0, b"", wire.join_notices(batch))
        data, tensors = wire.pack(self._envelope(wire.BATCH), frame)
        try:
            self._agent.tell(link.route, wire.call_pickle(data), tensors)
        except RuntimeError as error:
            self._broke(link, f"torch cannot send to it: {error}")

    def _reply(self, to: int, frame: Frame) -> None:
        if frame.tensors:
            with self._lock:
                link = self._links.get(to)
            if link is None:
                return
            check_devices(frame.tensors, link.replies, "Response", link.name)
        with self._lock:
            link = self._links.get(to)
            future = link.asked.pop(frame.correlation, None) if link else None
            if future is None:
                return
            self._senders += 1
        try:
            data, tensors = wire.pack(self._envelope(FrameKind.REPLY, frame.correlation), frame)
            future.set_result(Answer(data, tensors))
        finally:
            self._sent()

    def _open_lifeline(self, link: Link) -> None:
        if link.watched or link.peer.info.id == self._info.id:
            return
        with self._lock:
            if link.watched or link.lost is not None or self._state is not _State.OPEN:
                return
            link.watched = link.lifeline_open = True
        future = self._agent.ask(link.route, self._pickle(wire.LIFELINE), [])
        future.add_done_callback(partial(self._ended, link))

    def _ended(self, link: Link, future: torch.futures.Future[None]) -> None:
        """Looks for the error in a call that is kept to notice the end of its pipe."""
        try:
            future.value()
        except RuntimeError as error:
            self._broke(link, f"its connection broke: {str(error).partition(' (this error')[0]}")

    def _envelope(self, kind: int, correlation: int = 0) -> Envelope:
        return Envelope(kind, self._info.id, self._incarnation, correlation)

    def _pickle(self, kind: int) -> bytes:
        empty = Frame(FrameKind.NOTICE, 0, b"")
        return wire.call_pickle(wire.pack(self._envelope(kind), empty)[0])

    def _usable(self, to: int) -> Link:
        """The link to a peer that can be sent to. Needs the lock."""
        self._check_open()
        link = self._links.get(to)
        if link is None:
            raise UnknownWorkerError(f"{self._info!r} could not find destination id {to}")
        if link.lost is not None:
            raise WorkerLostError(link.name, link.peer.incarnation, link.lost)
        return link

    def _check_open(self) -> None:
        if self._state is not _State.OPEN:
            raise AgentClosedError("this worker's TensorPipe transport is not running")

    def _sent(self) -> None:
        with self._lock:
            self._senders -= 1
            self._tell_closer()

    # Receiving: torch's threads come in here, through ``tensorpipe_wire``.

    def question(self, envelope: Envelope, frame: Frame) -> AnswerFuture | Answer:
        """Takes a peer's call."""
        kind = envelope.kind
        if kind in _ANSWERED_LATER:
            future: AnswerFuture = self._agent.future()
            self._take(envelope, frame, future)
            return future
        refusal = None if kind == wire.PRIMER else self._take(envelope, frame, None)
        if refusal is not None:
            return self._answer(wire.REFUSED, refusal)
        return self._answer(wire.BATCH if kind == wire.BATCH else wire.DONE)

    def answer(self, envelope: Envelope, frame: Frame) -> None:
        """Takes what came back from one of our calls."""
        link = self._of_sender(envelope)
        if link is None or link.broken:
            return
        kind = envelope.kind
        if kind == wire.LIFELINE:
            with self._lock:
                link.lifeline_ended(bytes(frame.payload).decode())
                self._tell_closer()
            self._report(link)
        elif kind == wire.FAREWELL:
            self._farewell_confirmed(link, bytes(frame.payload))
        else:
            if kind == FrameKind.REPLY:
                self._deliver(envelope.sender, frame)
            elif kind == wire.REFUSED:
                self._refused(link, bytes(frame.payload).decode())
            self._came_back(link, kind)

    def _came_back(self, link: Link, kind: int) -> None:
        batch = []
        with self._lock:
            link.under_way -= 1
            if kind == wire.BATCH:
                link.batch_under_way = False
                batch = link.take_batch()
            parting = link.farewell is not None
            self._tell_closer()
        self._send_batch(link, batch)
        if parting:
            self._settle(link)

    def _take(self, envelope: Envelope, frame: Frame, future: AnswerFuture | None) -> str | None:
        """Acts on a call, answers it if it has a future; returns why it is refused, if it is."""
        if envelope.kind == wire.FAREWELL and future is not None:
            self._take_farewell(envelope, frame, future)
            return None
        with self._lock:
            link = self._links.get(envelope.sender)
            refusal = self._refusal(link, envelope)
            if refusal is None and (link is None or link.peer.incarnation < envelope.incarnation):
                self._early.append((envelope, frame, future))
                return None
            if link is not None and future is not None and refusal is None and not link.broken:
                link.hold(envelope.kind, envelope.correlation, future)
        if link is None or refusal is not None:
            kind = wire.LIFELINE if envelope.kind == wire.LIFELINE else wire.REFUSED
            self._answer_all([future] if future else [], kind, refusal or "")
        elif envelope.kind == wire.BATCH:
            for notice in wire.split_notices(frame.payload):
                self._deliver(envelope.sender, notice)
        elif envelope.kind == wire.LIFELINE:
            self._open_lifeline(link)
        else:
            self._deliver(envelope.sender, frame)
        if envelope.kind != wire.LIFELINE:
            self._taken(envelope)
        return refusal

    def _taken(self, envelope: Envelope) -> None:
        with self._lock:
            link = self._of_sender(envelope)
            if link is None:
                return
            link.taken += 1
            parting = link.farewell is not None
        if parting:
            self._settle(link)

    def _of_sender(self, envelope: Envelope) -> Link | None:
        """The link to the very life that sent this, removed or not."""
        link = self._links.get(envelope.sender)
        if link is None or link.peer.incarnation != envelope.incarnation:
            link = self._removed.get(envelope.sender)
        if link is None or link.peer.incarnation != envelope.incarnation:
            return None
        return link

    def _refusal(self, link: Link | None, envelope: Envelope) -> str | None:
        """Why nothing is taken from a sender. Needs the lock."""
        if self._state is not _State.OPEN:
            return _SHUT_DOWN
        if link is not None and link.peer.incarnation > envelope.incarnation:
            return _OLD_LIFE
        if link is not None and link.peer.incarnation == envelope.incarnation:
            return None
        removed = self._removed.get(envelope.sender)
        if removed is not None and removed.peer.incarnation >= envelope.incarnation:
            return _REMOVED
        return _OVERRUN if len(self._early) >= _EARLY_LIMIT else None

    def _take_farewell(self, envelope: Envelope, frame: Frame, future: AnswerFuture) -> None:
        with self._lock:
            link = self._of_sender(envelope)
            if link is not None:
                link.lose(_SHUT_DOWN)
                link.farewell, link.announced = future, int(bytes(frame.payload))
                asked, lifelines = link.take_asked(), link.take_lifelines()
            self._senders += 1
        if link is None:
            self._answer_visibly(future, wire.FAREWELL, b"")
        else:
            self._answer_all(asked, wire.DONE)
            self._answer_all(lifelines, wire.LIFELINE)
            self._settle(link)
        self._sent()

    def _farewell_confirmed(self, link: Link, message: bytes) -> None:
        with self._lock:
            link.farewell_confirmed(message)
            lifelines = link.take_lifelines()
            self._senders += 1
        for lifeline in lifelines:
            self._answer_visibly(lifeline, wire.LIFELINE, _SHUT_DOWN.encode())
        self._settle(link)
        self._sent()

    def _answer(self, kind: int, payload: str | bytes = b"") -> Answer:
        data = payload.encode() if isinstance(payload, str) else payload
        return Answer(*wire.pack(self._envelope(kind), Frame(FrameKind.NOTICE, 0, b"", data)))

    def _answer_all(self, futures: Iterable[AnswerFuture], kind: int, reason: str = "") -> None:
        for future in futures:
            future.set_result(self._answer(kind, reason))

    def _answer_visibly(self, future: AnswerFuture, kind: int, payload: bytes) -> None:
        """Answers, and lets ``close`` see when the answer has left.

        The only sign of that which torch gives is that it lets go of a tensor.
        """
        written, sign = threading.Event(), torch.zeros(1)
        weakref.finalize(sign, written.set).atexit = False
        with self._lock:
            self._unwritten = {each for each in self._unwritten if not each.is_set()} | {written}
        answer = self._answer(kind, payload)
        answer.tensors.append(sign)
        future.set_result(answer)

    def _deliver(self, sender: int, frame: Frame) -> None:
        try:
            self._receiver.deliver(sender, frame)
        except Exception:
            _log.exception("%r could not take a frame from worker %d", self._info, sender)

    # Losing peers, and leaving

    def _settle(self, link: Link) -> None:
        """Confirms a peer's farewell, and reports its loss, if now is the time."""
        with self._lock:
            due = link.take_due_confirmation()
            self._senders += due is not None
            self._tell_closer()
        if due is not None:
            future, message = due
            self._answer_visibly(future, wire.FAREWELL, message)
            self._sent()
            self._report(link)

    def _refused(self, link: Link, reason: str) -> None:
        """A peer that leaves is reported when it says so, after the frames that it sent."""
        leaving = reason == _SHUT_DOWN
        with self._lock:
            link.lose(reason)
            link.will_say_farewell = leaving
        if not leaving:
            self._report(link)

    def _lose(self, link: Link, reason: str) -> None:
        with self._lock:
            link.lose(reason)
        self._report(link)

    def _broke(self, link: Link, reason: str) -> None:
        with self._lock:
            link.break_off(reason)
            self._tell_closer()
        self._report(link)

    def _report(self, link: Link) -> None:
        worker_id = link.peer.info.id
        with self._lock:
            current = self._links.get(worker_id) is link and self._state is _State.OPEN
            if link.reported or not current:
                return
            link.reported = True
        try:
            self._receiver.peer_lost(worker_id, link.lost or "")
        except Exception:
            _log.exception("%r could not take the loss of %r", self._info, link.peer.info)

    def _part(self, deadline: float) -> None:
        """Answers everything, says farewell, and waits until nobody reads from us."""
        with self._lock:
            asked = [future for _, _, future in self._early if future is not None]
            links = [*self._links.values(), *self._removed.values()]
            asked += [future for link in links for future in link.take_asked()]
            parting = [link for link in self._sendable() if link.watched]
            for link in parting:
                link.say_farewell()
        self._answer_all(asked, wire.REFUSED, _SHUT_DOWN)
        for link in parting:
            frame = Frame(FrameKind.NOTICE, 0, b"", str(link.sent).encode())
            farewell, _ = wire.pack(self._envelope(wire.FAREWELL), frame)
            said = self._agent.ask(link.route, wire.call_pickle(farewell), [])
            said.add_done_callback(partial(self._ended, link))
        with self._lock:
            self._wait_until(lambda: all(link.is_finished() for link in links), deadline)
            self._wait_until(lambda: not any(map(self._calls_itself, links)), deadline)
            lifelines = [lifeline for link in links for lifeline in link.take_lifelines()]
        for lifeline in lifelines:
            self._answer_visibly(lifeline, wire.LIFELINE, _SHUT_DOWN.encode())
        with self._lock:
            self._wait_until(lambda: self._senders == 0, None)
            unwritten = list(self._unwritten)
        for written in unwritten:
            written.wait(max(0.0, deadline - time.monotonic()))

    def _calls_itself(self, link: Link) -> bool:
        return link.peer.info.id == self._info.id and link.under_way > 0

    def _sendable(self) -> list[Link]:
        """Needs the lock."""
        return [link for link in self._links.values() if link.lost is None]

    def _wait_until(self, holds: Callable[[], bool], deadline: float | None) -> None:
        """Waits for a change that makes it so. Needs the lock, which it lets go meanwhile."""
        while not holds():
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                return
            self._changed.wait(left)

    def _tell_closer(self) -> None:
        """Needs the lock."""
        if self._state is _State.CLOSING:
            self._changed.notify_all()

    def _abandon(self) -> None:
        """The process ends without ``close``, or ``start`` failed half-way."""
        self.close(0.0)
