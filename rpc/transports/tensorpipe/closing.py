"""Carries out the close handshakes of a TensorPipe transport, when it or a peer leaves.

``links`` decides when a handshake is complete; this sends and confirms CLOSE, and waits.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from rpc.transports.tensorpipe import wire
from rpc.transports.tensorpipe.peers import SHUT_DOWN

if TYPE_CHECKING:
    from rpc.transports.tensorpipe.answers import Answers
    from rpc.transports.tensorpipe.caller import PipeCaller
    from rpc.transports.tensorpipe.links import PeerLink
    from rpc.transports.tensorpipe.outstanding import AnswerFuture
    from rpc.transports.tensorpipe.peers import Peers

_SENDERS_SECONDS = 10.0

_log = logging.getLogger(__name__)


class CloseGate:
    """Makes the thread that closes a transport wait for those that are sending.

    Args:
        lock: guards what is waited for; waiting lets it go meanwhile.
        seconds: how long senders are waited for.

    Attributes:
        senders: how many threads hold the gate; changed with the lock.
        waiting: a thread waits for a change.
    """

    def __init__(self, lock: threading.Lock, seconds: float = _SENDERS_SECONDS) -> None:
        self._lock = lock
        self._seconds = seconds
        self._changed = threading.Condition(lock)
        self.senders = 0
        self.waiting = False

    def hold(self) -> None:
        """Keeps the gate shut: this thread is about to send. Needs the lock."""
        self.senders += 1

    def release(self) -> None:
        """Lets the gate open again: this thread has sent."""
        with self._lock:
            self.senders -= 1
            if self.waiting:
                self._changed.notify_all()

    def changed(self) -> None:
        """Tells the waiting thread that something changed. Needs the lock."""
        if self.waiting:
            self._changed.notify_all()

    def wait_until(self, holds: Callable[[], bool], deadline: float) -> bool:
        """Waits until a condition holds. Needs the lock.

        Args:
            holds: the condition.
            deadline: how long to wait, in seconds of the monotonic clock.

        Returns:
            Whether it holds.
        """
        self.waiting = True
        try:
            return self._changed.wait_for(holds, max(0.0, deadline - time.monotonic()))
        finally:
            self.waiting = False

    def wait_for_senders(self) -> None:
        """Waits until no thread holds the gate, which takes no time. Needs the lock."""
        deadline = time.monotonic() + self._seconds
        if not self.wait_until(lambda: self.senders == 0, deadline):
            _log.error("%d messages are still being sent; leaving all the same", self.senders)


class Handlers(NamedTuple):
    """The handlers on torch's threads.

    The answer to a call leaves with its thread, and a peer that waits for an answer does not
    complete the close handshake.

    Args:
        until: how long they are waited for, in seconds of the monotonic clock.
        run: returns whether there are some.
    """

    until: float
    run: Callable[[], object]


class CloseHandshake:
    """The close handshakes with all peers of one transport.

    Args:
        worker_id: this worker's.
        lock: the transport's.
        gate: the transport's.
        answers: gives the answers that peers wait for.
        caller: sends our own CLOSE.
        report: told of a peer that has left.
    """

    def __init__(
        self,
        worker_id: int,
        lock: threading.Lock,
        gate: CloseGate,
        answers: Answers,
        caller: PipeCaller,
        report: Callable[[PeerLink], None],
    ) -> None:
        self._worker_id = worker_id
        self._lock = lock
        self._gate = gate
        self._answers = answers
        self._caller = caller
        self._report = report

    def leave(self, peers: Peers, deadline: float, handlers: Handlers) -> None:
        """Answers everything, sends CLOSE, and waits until no peer reads from this worker.

        Args:
            peers: to take leave of; they are closed for new ones.
            deadline: how long to wait, in seconds of the monotonic clock.
            handlers: those on torch's threads.
        """
        with self._lock:
            asked = [(each[0], each[2]) for each in peers.early if each[2] is not None]
            links = peers.everyone()
            asked += [each for link in links for each in link.take_asked()]
            connected = [link for link in peers.sendable() if link.watched]
            for link in connected:
                link.send_close()
        self._answers.give_asked(asked, wire.REFUSED, SHUT_DOWN)
        for link in connected:
            self._caller.send_close(link)
        with self._lock:
            self._await_peers(links, deadline, handlers)
            itself = [link for link in links if link.peer.info.id == self._worker_id]
            self._gate.wait_until(lambda: not any(own.calls.under_way for own in itself), deadline)
            lifelines = [lifeline for link in links for lifeline in link.take_lifelines()]
        self._end_lifelines(lifelines, wire.LEFT)
        with self._lock:
            self._gate.wait_for_senders()
        self._answers.wait(deadline)

    def _await_peers(self, links: list[PeerLink], deadline: float, handlers: Handlers) -> None:
        """Waits until all peers are finished, or have had their time. Needs the lock."""

        def are_finished() -> bool:
            return all(link.is_finished() for link in links)

        early = self._gate.wait_until(are_finished, min(deadline, handlers.until))
        if not (early or handlers.run()):
            self._gate.wait_until(are_finished, deadline)

    def take_close(self, link: PeerLink | None, announced: int, future: AnswerFuture) -> None:
        """Sends nothing more to a peer that leaves, and confirms once all its calls are taken.

        Args:
            link: the peer; None if it is not known any more.
            announced: how many calls it made.
            future: to confirm with.
        """
        with self._lock:
            if link is not None:
                link.lose(SHUT_DOWN)
                link.close_request, link.announced = future, announced
                asked, lifelines = link.take_asked(), link.take_lifelines()
            self._gate.hold()
        try:
            if link is None:
                self._answers.give_visibly(future, wire.CLOSE, b"")
            else:
                self._answers.give_asked(asked, wire.DONE)
                self._answers.give(lifelines, wire.LIFELINE)
                self.settle(link)
        finally:
            self._gate.release()

    def confirmed(self, link: PeerLink, message: bytes) -> None:
        """Takes a peer's confirmation of our CLOSE."""
        with self._lock:
            link.close_was_confirmed(message)
            lifelines = link.take_lifelines()
            self._gate.hold()
        try:
            self._end_lifelines(lifelines, wire.LIFELINE)
            self.settle(link)
        finally:
            self._gate.release()

    def settle(self, link: PeerLink) -> None:
        """Confirms a peer's CLOSE, and reports its loss, if now is the time."""
        with self._lock:
            due = link.take_due_confirmation()
            if due is not None:
                self._gate.hold()
            self._gate.changed()
        if due is not None:
            future, message = due
            try:
                self._answers.give_visibly(future, wire.CLOSE, message)
            finally:
                self._gate.release()
            self._report(link)

    def _end_lifelines(self, lifelines: list[AnswerFuture], kind: int) -> None:
        for lifeline in lifelines:
            self._answers.give_visibly(lifeline, kind, SHUT_DOWN.encode())
