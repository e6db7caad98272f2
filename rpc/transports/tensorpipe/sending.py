"""What one TensorPipe transport sends: which frame takes which way, and when it may.

Owns no state of its own: links are the roster's, calls the caller's. What comes
back from a call, and what peers send, is taken by ``tensorpipe``.
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
from rpc.transports.tensorpipe import wire as wire
from rpc.transports.tensorpipe.answers import Answers
from rpc.transports.tensorpipe.caller import Caller, is_large
from rpc.transports.tensorpipe.closing import Exit
from rpc.transports.tensorpipe.ledger import size
from rpc.transports.tensorpipe.links import Link
from rpc.transports.tensorpipe.peers import REPLACED, Roster
from rpc.transports.tensorpipe.torch_agent import PipeBrokenError, TorchAgent
from rpc.worker_info import WorkerInfo


class Outgoing:
    """The sending half of a transport.

    Args:
        info: this worker.
        lock: guards the roster and its links.
        leaving: holds up an exit while something is being sent.
        roster: whom it can send to.
        agent: torch's.
        caller: makes calls.
        answers: gives answers.
        loopback: the way to this worker itself.
        patience: the receiver's.
        broke: takes a link whose pipe broke, which attempt at one it was, and why.
    """

    def __init__(
        self,
        info: WorkerInfo,
        lock: threading.Lock,
        leaving: Exit,
        roster: Roster,
        agent: TorchAgent,
        caller: Caller,
        answers: Answers,
        loopback: Loopback,
        patience: Callable[[int], Patience],
        broke: Callable[[Link, int, str], None],
    ) -> None:
        self._info = info
        self._lock = lock
        self._exit = leaving
        self._roster = roster
        self._agent = agent
        self._caller = caller
        self._answers = answers
        self._loopback = loopback
        self._patience = patience
        self._broke = broke

    def send(self, to: int, frame: Frame) -> None:
        """Hands a frame to torch; a reply to a worker that is gone is dropped."""
        if frame.kind is FrameKind.REPLY:
            self._reply(to, frame)
        elif frame.kind is FrameKind.NOTICE:
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
            self._exit.hold()
        try:
            self.open_lifeline(link)
        finally:
            self._exit.release()

    def _admit(self, to: int, frame: Frame) -> FlowWindow | None:
        """Counts a request among those under way, and waits until it may be.

        None if it cannot be sent, which whoever sends it finds out with the lock held.
        """
        nbytes = size(frame)
        while self._roster.open:
            link = self._roster.links.get(to)
            if link is None or link.lost is not None:
                break
            window = link.window
            if window.try_charge(frame.correlation, nbytes) or window.charge(
                frame.correlation, nbytes, self._may_wait, self._patience
            ):
                return window
        return None

    def _may_wait(self) -> bool:
        """Whether the running thread may; of those that deliver, only those that are lent may."""
        return in_handler() or not (self._agent.threads.is_here() or self._loopback.is_here())

    def _call_or_queue(self, to: int, frame: Frame) -> None:
        if to == self._info.id and self._loop_back(frame, "Request"):
            return
        if self._caller.may_wait(self._roster.links.get(to), frame):
            self._queue(to, frame)
        else:
            self._call(to, frame)

    def _loop_back(self, frame: Frame, kind: Literal["Request", "Response"]) -> bool:
        """Takes a frame of this worker to itself; False if torch has to, or it cannot be sent."""
        link = self._roster.links.get(self._info.id)
        if link is None or link.loopback is None or not self._roster.open:
            return False
        check_devices(frame.tensors, {}, kind, link.name)
        return link.loopback.send(frame)

    def _call(self, to: int, frame: Frame) -> None:
        former: Link | None = None
        if frame.tensors or len(frame.payload) >= SHARED_FROM:
            with self._lock:
                former = self._usable(to)
            check_devices(frame.tensors, former.requests, "Request", former.name)
            if lands_on_device(frame.tensors, former.requests):
                self._await_devices(former, frame)
            frame = former.shared.place(frame)
        with self._lock:
            link = self._usable(to)
            if former is not None and link is not former:
                raise WorkerLostError(former.name, former.peer.incarnation, former.lost or REPLACED)
            begun = self._caller.begin(link, frame.kind, frame)
            self._exit.hold()
        try:
            self.open_lifeline(link)
            self._caller.carry(link, begun, frame)
        except PipeBrokenError as error:
            self._broke(link, begun[0].attempt, str(error))
        except BaseException:
            self._caller.void(link, begun, frame)
            raise
        else:
            if link.shared.has_offer:
                self._caller.offer_segment(link)
        finally:
            self._exit.release()

    def _await_devices(self, link: Link, frame: Frame) -> None:
        """Waits until the peer's devices are ready for a request."""
        if link.readiness.is_settled:
            return
        with self._lock:
            inquiry, unasked = link.readiness.ask()
            if unasked:
                self._exit.hold()
        if unasked:
            try:
                self.open_lifeline(link)
                self._caller.ask_for_devices(link)
            except BaseException as error:  # else all would wait for an answer to nothing
                link.readiness.answered(f"it could not be asked: {says(error)}")
                raise
            finally:
                self._exit.release()
        inquiry.wait(link.name, frame, self._patience)

    def _queue(self, to: int, frame: Frame) -> None:
        with self._lock:
            link = self._usable(to)
            link.outbox.append(frame)
            batch = link.take_batch()
            self._exit.hold()
        try:
            self.open_lifeline(link)
            self._caller.send_batch(link, batch)
        finally:
            self._exit.release()

    def _reply(self, to: int, frame: Frame) -> None:
        if to == self._info.id and self._loop_back(frame, "Response"):
            return
        link = self._roster.links.get(to)
        if link is None:
            return
        room: tuple[FlowWindow, int] | None = None
        if is_large(frame):
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
            if self._roster.links.get(to) is not link:  # a later life counts its requests anew
                _give_up(link, frame, room)
                return
            held = link.served.reply(frame)
            if held is None and not (link.take_loose(frame.correlation) and self._roster.open):
                _give_up(link, frame, room)
                return
            self._exit.hold()
        try:
            if held is None:
                self.open_lifeline(link)
                self._caller.reply_in_frame(link, frame)
            else:
                self._answers.give_reply(link, *held, frame)
            if link.shared.has_offer:
                self._caller.offer_segment(link)
        except BaseException:
            _release(room)
            raise
        finally:
            self._exit.release()

    def _await_room(self, link: Link, frame: Frame) -> tuple[FlowWindow, int] | None:
        """Counts a reply that travels through torch, and waits until it may leave.

        The peer's receipts make room. Without them, where its pipe is not to be replaced,
        nothing is counted.

        Returns:
            Where it is counted, and as what.
        """
        if not link.seconds or not is_large(frame):
            return None
        nbytes = size(frame)
        with self._lock:
            key = link.key_of_reply(frame.correlation)
        if not link.reply_window.try_charge(key, nbytes):
            link.reply_window.charge(key, nbytes, self._may_wait)
        return link.reply_window, key

    def acknowledge(self) -> None:
        """Tells peers which of their replies, and of their large requests, have arrived."""
        with self._lock:
            links = self._roster.sendable()
        for link in links:
            self.send_receipt(link)

    def send_receipt(self, link: Link) -> None:
        """Tells one peer what has arrived, if it has not been told."""
        with self._lock:
            if not self._roster.open or link.lost is not None or not link.seconds:
                return
            receipt = self._caller.take_receipt(link)
            if receipt is None:
                return
            self._exit.hold()
        try:
            self._caller.carry_or_break(link, *receipt)
        finally:
            self._exit.release()

    def open_lifeline(self, link: Link) -> None:
        """Makes the call to a peer by which its loss is noticed, unless it was made before."""
        if link.watched or link.peer.info.id == self._info.id:
            return
        with self._lock:
            if link.watched or link.lost is not None or not self._roster.open:
                return
            link.watched = link.lifeline_open = True
            route, attempt = link.route, link.epoch.attempt
        if route is not None:
            self._caller.open_lifeline(link, route, attempt)

    def _usable(self, to: int) -> Link:
        """The link to a peer that can be sent to. Needs the lock."""
        if not self._roster.open:
            raise AgentClosedError("this worker's TensorPipe transport is not running")
        link = self._roster.links.get(to)
        if link is None:
            raise UnknownWorkerError(f"{self._info!r} could not find destination id {to}")
        if link.lost is not None:
            raise WorkerLostError(link.name, link.peer.incarnation, link.lost)
        return link


def _give_up(link: Link, frame: Frame, room: tuple[FlowWindow, int] | None) -> None:
    """A reply will not be sent, and nobody has kept it to be sent again."""
    link.shared.take_back(frame)
    _release(room)


def _release(room: tuple[FlowWindow, int] | None) -> None:
    """A reply does not count any more, if it was counted."""
    if room is not None:
        window, key = room
        window.release(key)
