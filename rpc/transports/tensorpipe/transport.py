"""torch's TensorPipe agent as a bus for our frames.

Owns the peers and takes what comes from them; ``sending`` sends. A frame is one
asynchronous Python call of torch's (``wire`` makes and takes them, ``torch_agent``
carries them), and a reply completes the call its request came with; but small frames
that would only crowd each other share a call, and so do the replies (``links``).
Handlers and deadlines are the agent's.

How a broken pipe is noticed: each carries one call, its lifeline, that the other side
answers only when it leaves. torch never opens a pipe again that broke, so a worker whose
pipe breaks is lost at once. How a worker leaves: it answers every call and lifeline it
holds and completes a close handshake with each peer (``closing``), so that no pipe closes
while someone reads from it.

Identity is ours, not torch's (``peers``): torch numbers peers as they come, and a worker
that returns is a new peer to it.
"""

from __future__ import annotations

import enum
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar

from rpc.devices import (
    DeviceMap,
    local_device_info,
    moves_host,
    note_host_moves,
    reverse,
    used_devices,
)
from rpc.errors import AgentClosedError, BringUpError, FrameError
from rpc.runtime import streams
from rpc.runtime.executor import SECONDS_TO_END
from rpc.transports.base import Frame, FrameKind, Peer, Receiver, Unreceived
from rpc.transports.late_receipts import LateReceipts
from rpc.transports.loopback import Loopback
from rpc.transports.tensorpipe import torch_names, wire
from rpc.transports.tensorpipe.address import TensorPipeAddress
from rpc.transports.tensorpipe.answers import Answers
from rpc.transports.tensorpipe.caller import PipeCaller
from rpc.transports.tensorpipe.closing import CloseGate, CloseHandshake, Handlers
from rpc.transports.tensorpipe.device_readiness import make_ready
from rpc.transports.tensorpipe.links import PeerLink
from rpc.transports.tensorpipe.outstanding import (
    MOST_IN_BATCH,
    AnswerFuture,
    decode_receipt,
    size,
)
from rpc.transports.tensorpipe.peers import REMOVED, SHUT_DOWN, Peers
from rpc.transports.tensorpipe.sending import FrameSender
from rpc.transports.tensorpipe.shared_tensors import HostMemory
from rpc.transports.tensorpipe.torch_agent import POOL_THREADS, TorchAgent, available
from rpc.transports.tensorpipe.wire import Envelope, SenderId, TorchAnswer
from rpc.wire.messages import Reply, Status
from rpc.worker_info import WorkerInfo

if TYPE_CHECKING:
    from rpc.options import TensorPipeRpcBackendOptions

__all__ = ["TensorPipeTransport", "available"]

_log = logging.getLogger(__name__)

_ANSWERED_LATER = frozenset({FrameKind.REQUEST, wire.LIFELINE, wire.CLOSE})
_ABOUT_SEGMENTS = frozenset({wire.SEGMENT, wire.SEGMENT_ANSWER, wire.VOID})
_FROM_OURSELVES = frozenset({wire.PRIMER, wire.LET_GO})
_FAILED = Reply(Status.ERROR).encode()
"""The header of the reply that fails an accepted request of which nothing will come."""


class _Lifecycle(enum.Enum):
    NEW = enum.auto()
    OPEN = enum.auto()
    CLOSING = enum.auto()
    CLOSED = enum.auto()


class TensorPipeTransport:
    """One worker's end of torch's TensorPipe; see ``base.Transport``.

    torch allows one per process.

    Args:
        options: transports, channels and device maps for torch.
        over_tcp: torch carries frames over TCP unless the options say otherwise. So where
            peers come and go: what torch takes for a peer in shared memory (two dozen
            descriptors) it never gives back, and its connections there can fail when another
            worker is killed. And where workers share cores: torch's thread polls
            for what comes through shared memory without a pause.
    """

    inline_handlers: ClassVar[int] = POOL_THREADS // 3  # two executors; a third is free
    inline_completions: ClassVar[int] = inline_handlers
    delivers_while_waiting: ClassVar[bool] = True

    _agent: TorchAgent
    _info: WorkerInfo
    _incarnation: int
    _receiver: Receiver
    _sender: SenderId
    _answers: Answers
    _caller: PipeCaller
    _late: LateReceipts
    _loopback: Loopback
    _memory: HostMemory
    _frames: FrameSender
    _closing: CloseHandshake

    def __init__(self, options: TensorPipeRpcBackendOptions, over_tcp: bool = False) -> None:
        self._options = options
        self._transports = options._transports or (["uv"] if over_tcp else None)
        self._lock = threading.Lock()
        self._gate = CloseGate(self._lock)
        self._state = _Lifecycle.NEW
        self.peers = Peers()
        self.host_moves: set[tuple[int, bool]] = set()

    def start(self, info: WorkerInfo, incarnation: int, receiver: Receiver) -> bytes:
        """Starts torch's agent; returns its address and device maps, for the other workers.

        Raises:
            BringUpError: if this build of torch lacks TensorPipe, or torch already runs
                an RPC agent in this process.
        """
        with torch_names.restored():
            return self._start(info, incarnation, receiver)

    def _start(self, info: WorkerInfo, incarnation: int, receiver: Receiver) -> bytes:
        if not available():
            raise BringUpError("this build of torch has no TensorPipe; use another backend")
        self._info, self._incarnation, self._receiver = info, incarnation, receiver
        devices = local_device_info(self._options.device_maps, self._options.devices)
        back = reverse(self._options.device_maps.get(info.name, {}))
        used = used_devices(devices, [back])
        self._agent = TorchAgent(info.name, self._options, self._transports, used, back)
        self._late = LateReceipts(f"tensorpipe-receipts-{info.name}")
        self._loopback = Loopback(f"tensorpipe-loopback-{info.name}", self._take_own)
        sender = self._sender = SenderId(info.id, incarnation)
        self._answers = Answers(sender)
        self._memory = HostMemory(f"tensorpipe-{info.name}", self._options.shared_memory)
        self._caller = PipeCaller(sender, self._lock, self._agent, self._broke, self._failed)
        self._frames = FrameSender(
            info,
            self._lock,
            self._gate,
            self.peers,
            self._agent,
            self._caller,
            self._answers,
            self._loopback,
            lambda correlation: receiver.patience(correlation),
            self._broke,
        )
        self._closing = CloseHandshake(
            info.id, self._lock, self._gate, self._answers, self._caller, self._report
        )
        wire.attach(self, self._agent.tensor_tables)
        self._state = _Lifecycle.OPEN
        self._process = os.getpid()
        self._at_exit = weakref.finalize(self, _abandon, weakref.ref(self))
        try:
            self._agent.prime(self._caller.pickle(sender.envelope(wire.PRIMER)))
        except BaseException:
            self.close(0.0)
            raise
        return TensorPipeAddress(self._agent.url.decode(), devices, self._memory.host).encode()

    def add_peer(self, peer: Peer) -> None:
        """Makes ``peer`` known, and takes what it sent before that."""
        if self._state is not _Lifecycle.OPEN:
            raise AgentClosedError("this worker's TensorPipe transport is not running")
        known = self.peers.links.get(peer.info.id)
        if known is not None and known.lost is None and known.peer == peer:
            return
        link = self._caller.link_to(
            peer, self._info.name, self._options, self._memory, self._loopback
        )
        note_host_moves(
            self.host_moves,
            peer.info.id,
            in_requests=moves_host(link.requests),
            in_replies=moves_host(link.replies),
        )
        with self._lock:
            early = self.peers.add(link)
        for envelope, frame, future in early:
            self._take(envelope, frame, future, in_batch=True)

    def remove_peer(self, worker_id: int) -> None:
        """Forgets a peer; what it still sends is refused."""
        with self._lock:
            link = self.peers.links.get(worker_id)
            if link is None or self._state is not _Lifecycle.OPEN:
                self.peers.links.pop(worker_id, None)
                return
            self.peers.remove(worker_id)
            link.close_windows()
            asked, lifelines = link.take_asked(), link.take_lifelines()
            route = link.route if link.watched and not link.broken else None
            self._gate.hold()
        try:
            if route is not None:
                self._agent.abandon(route)
            self._answers.refuse(asked, lifelines, REMOVED)
        finally:
            link.shared.close()
            self._gate.release()

    def device_map(self, worker_id: int) -> DeviceMap:
        """See :meth:`rpc.transports.base.MapsDevices.device_map`."""
        with self._lock:
            link = self.peers.links.get(worker_id)
        return {} if link is None else dict(link.requests)

    def send(self, to: int, frame: Frame) -> None:
        """Hands ``frame`` to torch; see ``base.Transport.send``.

        A reply to a worker that is gone is dropped.
        """
        if frame.kind is FrameKind.REPLY:
            self._frames.reply(to, frame)
        else:
            self._frames.send(to, frame)

    def lend_memory(self, to: int, kind: FrameKind, nbytes: int) -> object | None:
        """See ``base.LendsMemory.lend_memory``."""
        link = self.peers.links.get(to)
        return None if link is None else link.shared.lend(nbytes)

    def look_again(self, to: int) -> None:
        """See ``base.Transport.look_again``."""
        link = self.peers.links.get(to)
        if link is not None:
            link.window.look_again()

    def watch(self, worker_id: int) -> None:
        """Connects to a peer, if need be, so that its loss is noticed without traffic.

        Raises:
            WorkerLostError: the peer was lost.
            UnknownWorkerError: the peer was never added.
        """
        self._frames.watch(worker_id)

    def attend(self) -> None:
        """Does nothing: torch's threads deliver in any case."""

    def wait(self, done: Callable[[], object], block: Callable[[], None]) -> None:
        """Sleeps; torch's threads deliver meanwhile."""
        block()

    def wake(self) -> None:
        """Does nothing: whoever waits sleeps in a way of its own."""

    def close(self, flush_seconds: float, handler_seconds: float = SECONDS_TO_END) -> None:
        """Leaves the group and joins torch's threads. Requests not replied to are dropped.

        Args:
            flush_seconds: how long to wait for peers to take what was sent, and to confirm.
            handler_seconds: what handlers that run on torch's threads get to end in; they
                are abandoned then.
        """
        began = time.monotonic()
        deadline = began + flush_seconds
        with self._lock:
            if self._state is not _Lifecycle.OPEN:
                return
            handlers = Handlers(began + handler_seconds, self._agent.threads.in_python)
            self._state = _Lifecycle.CLOSING
            self.peers.open = False
            for link in self.peers.everyone():
                link.close_windows()
            self._gate.wait_for_senders()
            self._gate.wait_until(self.peers.is_flushed, deadline)
        self._loopback.close(deadline)
        self._late.close()
        self._closing.leave(self.peers, deadline, handlers)
        if flush_seconds:  # otherwise the process ends, or never began to take calls
            self._agent.let_threads_go(self._caller.pickle(self._sender.envelope(wire.LET_GO)))
        self._agent.stop(handlers.until)
        wire.detach(self)
        with self._lock:
            self._state = _Lifecycle.CLOSED
            links = self.peers.clear()
        for link in links:
            link.shared.close()
        self._memory.close()
        self._at_exit.detach()

    # Receiving: torch's threads come in here, through ``wire``.

    def question(self, envelope: Envelope, frame: Frame) -> AnswerFuture | TorchAnswer:
        """Takes a peer's call."""
        self._agent.threads.keep()
        if frame.tensors:
            streams.leave_tensors(frame.tensors)  # torch copies them on streams of its own
        kind = envelope.kind
        if kind in _ANSWERED_LATER:
            future: AnswerFuture = self._agent.future()
            self._take(envelope, frame, future)
            return future
        if kind == wire.LET_GO:
            self._agent.threads.let_go()
        refusal = None if kind in _FROM_OURSELVES else self._take(envelope, frame, None)
        if refusal is not None:
            return self._answers.make(wire.REFUSED, refusal, envelope.number)
        if kind == wire.DEVICES:
            problem = make_ready(self._agent, frame.payload)
            return self._answers.make(wire.READY, problem, envelope.number)
        done = wire.BATCH if kind == wire.BATCH else wire.DONE
        return self._answers.make(done, b"", envelope.number)

    def answer(self, envelope: Envelope, frame: Frame) -> None:
        """Takes what came back from one of our calls."""
        self._agent.threads.keep()
        if frame.tensors:
            streams.leave_tensors(frame.tensors)
        link = self.peers.of_sender(envelope)
        if link is None or link.broken:
            return
        if not envelope.number:
            self._take_uncounted(link, envelope, bytes(frame.payload))
        elif (call := link.calls.came_back(envelope.number)) is not None:
            if call[0] == FrameKind.REPLY:  # one that came as a call has arrived
                link.reply_window.release(call[1])
            kind = envelope.kind
            if kind == FrameKind.REPLY:
                self._deliver(link, frame)
            elif kind == wire.REFUSED:
                self._refused(link, bytes(frame.payload).decode())
            elif kind == wire.READY:
                link.readiness.answered(bytes(frame.payload).decode())
            self._came_back(link, envelope, frame)

    def _take_uncounted(self, link: PeerLink, envelope: Envelope, payload: bytes) -> None:
        """Takes what came back from a call that carried no frame."""
        kind, lifeline = envelope.kind, envelope.kind in (wire.LIFELINE, wire.LEFT)
        with self._lock:
            if lifeline:
                link.lifeline_ended(payload.decode())
                link.left |= kind == wire.LEFT
            self._gate.changed()
        if lifeline:
            self._report(link)
        elif kind == wire.CLOSE:
            self._closing.confirmed(link, payload)

    def _came_back(self, link: PeerLink, envelope: Envelope, frame: Frame) -> None:
        batch: list[Frame] = []
        is_large = bool(frame.tensors) or len(frame.header) + len(frame.payload) > MOST_IN_BATCH
        reply = envelope.kind == FrameKind.REPLY and is_large
        with self._lock:
            link.calls.under_way -= 1
            due = reply and link.calls.received(envelope.correlation, size(frame))
            if envelope.kind == wire.BATCH:
                link.batch_under_way = False
                batch = link.take_batch()
            closing = link.close_request is not None
            if self._gate.waiting:
                self._gate.changed()
        if batch:
            self._caller.send_batch(link, batch)
        if closing:
            self._closing.settle(link)
        if due:
            self._frames.send_receipt(link)
        elif reply:
            self._late.add(self._frames)

    def _take(
        self,
        envelope: Envelope,
        frame: Frame,
        future: AnswerFuture | None,
        in_batch: bool = False,
    ) -> str | None:
        """Acts on a call, answers it if it has a future; returns why it is refused, if it is."""
        if envelope.kind == wire.CLOSE and future is not None:
            with self._lock:
                leaver = self.peers.of_sender(envelope)
            self._closing.take_close(leaver, int(bytes(frame.payload)), future)
            return None
        fresh, refusal = False, None
        with self._lock:
            link = self.peers.member(envelope)
            if link is None or self._state is not _Lifecycle.OPEN:
                refusal = self.peers.refusal(envelope)
            if refusal is not None:
                link = None
            elif link is None:
                self.peers.early.append((envelope, frame, future))
            else:
                fresh = link.take(envelope, future)
        if link is not None and fresh:
            self._act(link, envelope, frame, in_batch)
        elif refusal is not None and future is not None:
            kind = wire.LIFELINE if envelope.kind == wire.LIFELINE else wire.REFUSED
            self._answers.give_asked([(envelope, future)], kind, refusal)
        return refusal

    def _act(self, link: PeerLink, envelope: Envelope, frame: Frame, in_batch: bool) -> None:
        """Acts on a call that was taken."""
        kind = envelope.kind
        if kind < wire.LIFELINE:
            self._deliver(link, frame, in_batch)
        elif kind == wire.LIFELINE:
            self._frames.open_lifeline(link)
            return
        elif kind == wire.BATCH:
            batch = wire.split(frame.payload)
            with self._lock:
                link.loose.update(f.correlation for f in batch if f.kind is FrameKind.REQUEST)
            for each in batch:
                self._deliver(link, each, in_batch=True)
        elif kind in _ABOUT_SEGMENTS:
            self._take_segment(link, kind, frame.payload)
        elif kind == wire.RECEIPT:
            link.reply_window.release_all(decode_receipt(frame.payload))
        with self._lock:
            link.taken.delivered += 1
            closing = link.close_request is not None
        if closing:
            self._closing.settle(link)

    def _take_own(self, frame: Frame) -> None:
        """Takes a frame that this worker sent to itself."""
        link = self.peers.links.get(self._info.id)
        if link is not None and (self.peers.open or frame.kind is FrameKind.REPLY):
            self._deliver(link, frame, in_batch=True)

    def _take_segment(self, link: PeerLink, kind: int, payload: wire.Payload) -> None:
        with self._lock:
            if self._state is not _Lifecycle.OPEN:
                return
            self._gate.hold()
        try:
            if kind == wire.SEGMENT:
                self._caller.answer_offer(link, payload)
            elif kind == wire.SEGMENT_ANSWER:
                link.shared.answered(payload)
            else:
                link.shared.give_back(bytes(payload))
        except FrameError as error:
            self._refuse(link, error)
        finally:
            self._gate.release()

    def _deliver(self, link: PeerLink, frame: Frame, in_batch: bool = False) -> None:
        if type(frame) is wire.PlacedFrame:
            try:
                frame = link.shared.open(frame)
            except FrameError as error:
                if self.peers.links.get(link.peer.info.id) is link:  # else it was removed
                    self._refuse(link, error)
                return
        receiver, kind = self._receiver, frame.kind
        if kind is FrameKind.REPLY:
            link.window.release(frame.correlation)
        try:
            if kind is FrameKind.REQUEST:
                receiver.take_request(link.life, frame, in_batch)
            elif kind is FrameKind.REPLY:
                receiver.take_reply(link.life, frame, in_batch)
            else:
                receiver.deliver(link.life, frame, in_batch)
        except Exception:
            _log.exception("%r could not take a frame from %s", self._info, link.life)

    # Losing peers, and leaving

    def _failed(self, link: PeerLink, correlation: int, problem: str) -> None:
        """Fails a request of ours to which no reply will come."""
        self._late.add(self._frames)
        why = Unreceived(f"worker {link.name!r} answered with an error: {problem}".encode())
        self._deliver(link, Frame(FrameKind.REPLY, correlation, _FAILED, why))

    def _refuse(self, link: PeerLink, error: FrameError) -> None:
        """Gives up a peer that sent what cannot be read, and tells it why."""
        with self._lock:
            asked, lifelines = link.take_asked(), link.take_lifelines()
            self._gate.hold()
        try:
            reason = f"it cannot read what this worker sent: {error}"
            self._answers.refuse(asked, lifelines, reason)
        finally:
            self._gate.release()
            self._give_up(link, f"what it sent cannot be read: {error}")

    def _refused(self, link: PeerLink, reason: str) -> None:
        """Takes a refusal; a peer that leaves is reported when it says so, after its frames."""
        leaving = reason == SHUT_DOWN
        with self._lock:
            link.lose(reason)
            link.will_close = leaving
        if not leaving:
            self._report(link)

    def _broke(self, link: PeerLink, reason: str) -> None:
        """Gives up a peer whose pipe broke."""
        if not link.broken:
            self._give_up(link, f"its connection broke: {reason}")

    def _give_up(self, link: PeerLink, reason: str) -> None:
        with self._lock:
            link.break_off(reason)
            self._gate.changed()
        self._report(link)

    def _report(self, link: PeerLink) -> None:
        life = link.life
        with self._lock:
            current = self.peers.links.get(life.worker) is link and self._state is _Lifecycle.OPEN
            if link.reported or not current:
                return
            link.reported = True
        try:
            self._receiver.peer_lost(life, link.lost or "")
        except Exception:
            _log.exception("%r could not take the loss of %r", self._info, link.peer.info)


def _abandon(transport: weakref.ref[TensorPipeTransport]) -> None:
    """Abandons torch's agent, as the process ends without ``close``.

    A finalizer, as these run where the first one of the process was made, by torch's
    import: after the program's own exit hooks, which may still call and shut down. What a
    forked child has of torch is not its to end.
    """
    open_still = transport()
    if open_still is not None and open_still._process == os.getpid():
        open_still.close(0.0)
