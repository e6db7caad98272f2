"""Sends the frames of one TensorPipe transport: chooses how each travels, and when it may.

Owns no state: the links are the peers', calls the caller's. What comes back from a call, and
what peers send, is taken by ``transport``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Literal

from rpc.devices import check_devices, lands_on_device
from rpc.errors import AgentClosedError, UnknownWorkerError, WorkerLostError
from rpc.runtime.executor import in_handler
from rpc.runtime.text import says
from rpc.transports.base import Frame, FrameKind, Patience
from rpc.transports.flow import FlowWindow
from rpc.transports.host.segments import SHARED_FROM
from rpc.transports.loopback import Loopback
from rpc.transports.tensorpipe import wire
from rpc.transports.tensorpipe.answers import Answers
from rpc.transports.tensorpipe.caller import PipeCaller
from rpc.transports.tensorpipe.closing import CloseGate
from rpc.transports.tensorpipe.links import PeerLink
from rpc.transports.tensorpipe.outstanding import MOST_IN_BATCH, is_large, size
from rpc.transports.tensorpipe.peers import REPLACED, Peers
from rpc.transports.tensorpipe.torch_agent import PipeBrokenError, TorchAgent
from rpc.worker_info import WorkerInfo


class FrameSender:
    """The sending half of a transport.

    Args:
        info: this worker.
        lock: guards the peers and their links.
        gate: keeps the transport from closing while something is being sent.
        peers: whom it can send to.
        agent: torch's.
        caller: makes calls.
        answers: gives answers.
        loopback: the way to this worker itself.
        patience: the receiver's.
        broke: told of a link whose pipe broke, and why.
    """

    def __init__(
        self,
        info: WorkerInfo,
        lock: threading.Lock,
        gate: CloseGate,
        peers: Peers,
        agent: TorchAgent,
        caller: PipeCaller,
        answers: Answers,
        loopback: Loopback,
        patience: Callable[[int], Patience],
        broke: Callable[[PeerLink, str], None],
    ) -> None:
        self._info = info
        self._lock = lock
        self._gate = gate
        self._peers = peers
        self._agent = agent
        self._caller = caller
        self._answers = answers
        self._loopback = loopback
        self._patience = patience
        self._broke = broke

    def send(self, to: int, frame: Frame) -> None:
        """Hands a frame that is no reply to torch."""
        if frame.kind is FrameKind.NOTICE:
            self._call_or_queue(to, frame)
        else:
            window = self._admit(to, frame)
            try:
                self._call_or_queue(to, frame)
            except BaseException:
                if window is not None:
                    window.release(frame.correlation)
                raise

    def watch(self, worker_id: int) -> None:
        """Opens the lifeline to a peer, if need be; see ``TensorPipeTransport.watch``."""
        with self._lock:
            link = self._usable(worker_id)
            self._gate.hold()
        try:
            self.open_lifeline(link)
        finally:
            self._gate.release()

    def _admit(self, to: int, frame: Frame) -> FlowWindow | None:
        """Counts a request among those under way, and waits until it may be.

        None if it cannot be sent, which whoever sends it finds out with the lock held.
        """
        nbytes = size(frame) if frame.tensors else len(frame.header) + len(frame.payload)
        while self._peers.open:
            link = self._peers.links.get(to)
            if link is None or link.lost is not None:
                break
            window = link.window
            if window.try_charge(frame.correlation, nbytes) or window.charge(
                frame.correlation, nbytes, self._may_wait, self._patience
            ):
                return window
        return None

    def _may_wait(self) -> bool:
        """Returns whether the running thread may wait: of those that deliver, only handlers may."""
        return in_handler() or not (self._agent.threads.is_here() or self._loopback.is_here())

    def _call_or_queue(self, to: int, frame: Frame) -> None:
        if to == self._info.id and self._loop_back(frame, "Request"):
            return
        if self._caller.may_wait(self._peers.links.get(to), frame):
            self._queue(to, frame)
        else:
            self._call(to, frame)

    def _loop_back(self, frame: Frame, kind: Literal["Request", "Response"]) -> bool:
        """Takes a frame of this worker to itself; False if torch has to, or it cannot be sent."""
        link = self._peers.links.get(self._info.id)
        if link is None or link.loopback is None or not self._peers.open:
            return False
        check_devices(frame.tensors, {}, kind, link.name)
        return link.loopback.send(frame)

    def _call(self, to: int, frame: Frame) -> None:
        former: PeerLink | None = None
        if frame.tensors or len(frame.payload) >= SHARED_FROM:
            with self._lock:
                former = self._usable(to)
            check_devices(frame.tensors, former.requests, "Request", former.name)
            if lands_on_device(frame.tensors, former.requests):
                self._await_devices(former, frame)
            frame = former.shared.place(frame)
        with self._lock:
            known = self._peers.links.get(to)
            usable = known is not None and known.lost is None and self._peers.open
            link = known if known is not None and usable else self._usable(to)
            if former is not None and link is not former:
                raise WorkerLostError(former.name, former.peer.incarnation, former.lost or REPLACED)
            envelope = self._caller.begin(link, frame.kind, frame.correlation)
            self._gate.senders += 1
        try:
            if not link.watched:
                self.open_lifeline(link)
            self._caller.carry(link, envelope, frame)
        except PipeBrokenError as error:
            self._broke(link, str(error))
        except BaseException:
            self._caller.void(link, envelope, frame)
            raise
        else:
            if link.shared.untold is not None:
                self._caller.offer_segment(link)
        finally:
            self._gate.release()

    def _await_devices(self, link: PeerLink, frame: Frame) -> None:
        """Waits until the peer's devices are ready for a request."""
        if link.readiness.is_settled:
            return
        with self._lock:
            inquiry, unasked = link.readiness.ask()
            if unasked:
                self._gate.hold()
        if unasked:
            try:
                self.open_lifeline(link)
                self._caller.ask_for_devices(link)
            except BaseException as error:  # else all would wait for an answer to nothing
                link.readiness.answered(f"it could not be asked: {says(error)}")
                raise
            finally:
                self._gate.release()
        inquiry.wait(link.name, frame, self._patience)

    def _queue(self, to: int, frame: Frame) -> None:
        with self._lock:
            link = self._usable(to)
            link.outbox.append(frame)
            batch = link.take_batch()
            self._gate.hold()
        try:
            self.open_lifeline(link)
            self._caller.send_batch(link, batch)
        finally:
            self._gate.release()

    def reply(self, to: int, frame: Frame) -> None:
        """Hands a reply to torch; one to a worker that is gone is dropped."""
        if to == self._info.id and self._loop_back(frame, "Response"):
            return
        link = self._peers.links.get(to)
        if link is None:
            return
        room: FlowWindow | None = None
        if frame.tensors or len(frame.header) + len(frame.payload) > MOST_IN_BATCH:
            with self._lock:
                awaited = link.awaits(frame.correlation)
            if not awaited:
                return
            check_devices(frame.tensors, link.replies, "Response", link.name)
            frame = link.shared.place(frame)
            try:
                room = self._await_room(link, frame)
                if frame.tensors:
                    frame = wire.compact(frame)  # if it fails, another reply can be given
            except BaseException:
                _give_up(link, frame, room)
                raise
        with self._lock:
            if self._peers.links.get(to) is not link:  # a later life counts its requests anew
                _give_up(link, frame, room)
                return
            held = link.taken.asked.pop(frame.correlation, None)
            if held is None and not (link.take_loose(frame.correlation) and self._peers.open):
                _give_up(link, frame, room)
                return
            self._gate.senders += 1
        try:
            if held is None:
                self.open_lifeline(link)
                self._caller.reply_in_frame(link, frame)
            else:
                self._answers.give_reply(link, *held, frame)
            if link.shared.untold is not None:
                self._caller.offer_segment(link)
        except BaseException:
            if room is not None:
                room.release(frame.correlation)
            raise
        finally:
            self._gate.release()

    def _await_room(self, link: PeerLink, frame: Frame) -> FlowWindow | None:
        """Counts a reply that travels through torch, and waits until it may leave.

        The peer's receipts make room.

        Returns:
            Where it is counted; None if it is not.
        """
        if not is_large(frame):
            return None
        window, nbytes = link.reply_window, size(frame)
        if not window.try_charge(frame.correlation, nbytes):
            window.charge(frame.correlation, nbytes, self._may_wait)
        return window

    def acknowledge(self) -> None:
        """Tells peers which of their large replies have arrived."""
        with self._lock:
            links = self._peers.sendable()
        for link in links:
            self.send_receipt(link)

    def send_receipt(self, link: PeerLink) -> None:
        """Tells one peer what has arrived, if it has not been told."""
        with self._lock:
            if not self._peers.open or link.lost is not None:
                return
            receipt = self._caller.take_receipt(link)
            if receipt is None:
                return
            self._gate.hold()
        try:
            self._caller.carry_or_break(link, *receipt)
        finally:
            self._gate.release()

    def open_lifeline(self, link: PeerLink) -> None:
        """Makes the call to a peer by which its loss is noticed, unless it was made before."""
        if link.watched or link.peer.info.id == self._info.id:
            return
        with self._lock:
            if link.watched or link.lost is not None or not self._peers.open:
                return
            link.watched = link.lifeline_open = True
        self._caller.open_lifeline(link)

    def _usable(self, to: int) -> PeerLink:
        """Returns the link to a peer that can be sent to. Needs the lock."""
        if not self._peers.open:
            raise AgentClosedError("this worker's TensorPipe transport is not running")
        link = self._peers.links.get(to)
        if link is None:
            raise UnknownWorkerError(f"{self._info!r} could not find destination id {to}")
        if link.lost is not None:
            raise WorkerLostError(link.name, link.peer.incarnation, link.lost)
        return link


def _give_up(link: PeerLink, frame: Frame, room: FlowWindow | None) -> None:
    """Gives back the memory and the room of a reply that is not sent."""
    link.shared.take_back(frame)
    if room is not None:
        room.release(frame.correlation)
