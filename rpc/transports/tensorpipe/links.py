"""What a TensorPipe transport knows of one peer, and when two workers have parted.

Pure bookkeeping: no torch calls, no locks. Futures are only stored and returned.
The calls in both directions, and how they outlive a pipe, are ``tensorpipe_ledger``'s.

Parting: a worker that leaves says farewell, and how many frames it sent before.
The other side starts no call to it any more, and confirms when all those frames
were taken and none of its own calls is under way. When both leave at once their
farewells cross, and each would wait for the other: the worker with the lower id
then confirms although its farewell is still out, and says so, and the other
stays until it has confirmed that one too. Lifelines are not counted: the leaver
answers them last. If it has given up waiting for the other by then, as a handler of
its own does not end and so a call of the other's is not answered, it says so with
that answer, and the other does not wait for it either.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rpc.devices import DeviceMap
from rpc.ids import Life
from rpc.protocol.resumption import ReconnectEpoch
from rpc.transports.base import Frame, FrameKind, Peer
from rpc.transports.flow import FlowWindow
from rpc.transports.loopback import Loopback
from rpc.transports.tensorpipe.device_readiness import Readiness
from rpc.transports.tensorpipe.ledger import AnswerFuture, Call, Calls, Mending, Served
from rpc.transports.tensorpipe.shared_tensors import SharedTensors, nothing_shared
from rpc.transports.tensorpipe.wire import AGAIN, LIFELINE, Envelope, lent_from

if TYPE_CHECKING:
    from torch._C import _distributed_rpc as torch_rpc

_CROWD = 4
_CLOSE_SECONDS = 300e-6
_BURST_FROM = 8
_BATCH_BYTES = 1 << 18

CROSSED = b"a farewell of mine is still to come"


@dataclass(slots=True, eq=False)
class Link:
    """One life of a peer.

    Frames that need not leave at once wait in ``outbox`` while a batch of them is under
    way, so that the more there are, the more leave together: notices always, requests
    while many follow each other closely (:meth:`in_burst`). Such a request has no call of
    its own whose answer could carry the reply, which comes as a frame of the other side.

    Args:
        peer: who it is.
        route: what torch calls it; None while its pipe is broken, and calls wait.
        precedes_me: its id is lower than ours.
        requests: our devices to its devices, for what we ask.
        replies: our devices to its devices, for what we answer.
        calls: what we call it with.
        served: what it calls us with.
        seconds: how long its pipe may be broken; 0 if it may not.
        shared: large tensors, if it is on this host.
        window: bounds the requests to it that are under way.
        reply_window: bounds the replies to it that no receipt has named yet.
        loopback: the way to it if it is this worker itself, and torch is not needed.
    """

    peer: Peer
    route: torch_rpc.WorkerInfo | None
    precedes_me: bool
    requests: DeviceMap
    replies: DeviceMap
    calls: Calls
    served: Served
    seconds: float = 0.0
    shared: SharedTensors = field(default_factory=nothing_shared)
    window: FlowWindow = field(default_factory=FlowWindow)
    reply_window: FlowWindow = field(default_factory=FlowWindow)
    loopback: Loopback | None = None

    life: Life = field(init=False)
    requests_lent_from: int = field(init=False)
    """The size from which what we call it with may travel as a tensor."""
    replies_lent_from: int = field(init=False)
    """And what we answer."""
    readiness: Readiness = field(default_factory=Readiness)
    """Whether its devices can take what we ask."""
    lost: str | None = None
    """Why nothing can be sent to it; None while it can."""
    reported: bool = False
    """The receiver knows that it is lost."""
    broken: bool = False
    """Its pipe is gone too, so that nothing comes from it either."""
    watched: bool = False
    """Our lifeline to it was opened."""
    lifeline_open: bool = False
    """And it did not end yet."""
    epoch: ReconnectEpoch = field(default_factory=ReconnectEpoch)
    """Which attempt at a pipe is in place."""
    mending: Mending | None = None
    """How its broken pipe is being replaced."""
    lifeline: tuple[int, AnswerFuture] | None = None
    """Its call that we answer when we leave, and the attempt at a pipe that it came by."""
    loose: set[int] = field(default_factory=set)
    """Its requests that came in batches and wait for our reply."""
    outbox: deque[Frame] = field(default_factory=deque)
    """Frames that wait for the batch before them to be taken."""
    batch_under_way: bool = False
    close_requests: int = 0
    """Our last requests of which each followed the one before it closely."""
    last_request: float = 0.0

    said_farewell: bool = False
    confirmed: bool = False
    """It confirmed our farewell."""
    awaits_another: bool = False
    """It confirmed, but a farewell of its own is still to come."""
    will_say_farewell: bool = False
    """It refused a call because it is leaving."""
    farewell: AnswerFuture | None = None
    """Its farewell, not confirmed yet."""
    announced: int = 0
    """How many frames it sent before its farewell."""
    parted: bool = False
    """Its farewell was confirmed."""
    left: bool = False
    """It closed, whether all was confirmed or not; nothing is answered any more."""

    def __post_init__(self) -> None:
        self.life = self.peer.life
        self.requests_lent_from = lent_from(self.requests)
        self.replies_lent_from = lent_from(self.replies)

    @property
    def name(self) -> str:
        """The peer's name."""
        return self.peer.info.name

    def take(self, envelope: Envelope, frame: Frame, future: AnswerFuture | None) -> bool:
        """Takes a call of the peer; False if it was taken before, or asks for an old reply."""
        kind = envelope.kind
        if kind == LIFELINE:
            if future is not None and (
                self.lifeline is None or self.lifeline[0] <= envelope.attempt
            ):
                self.lifeline = envelope.attempt, future
            return True
        if kind == AGAIN:
            return False
        return self.served.take(envelope, frame, None if self.broken else future)

    def take_asked(self) -> list[tuple[Envelope, AnswerFuture]]:
        """Removes its requests that wait for our reply; returns those that can be answered."""
        self.loose.clear()
        return self.served.take_asked()

    def awaits(self, correlation: int) -> bool:
        """Whether a request of it waits for our reply."""
        return correlation in self.served.asked or correlation in self.loose

    def key_of_reply(self, correlation: int) -> int:
        """What a reply counts under: the number of its request, which a receipt will name.

        A request that came in a batch has none. Its reply is a call of our own, and counts
        until that has come back.
        """
        held = self.served.asked.get(correlation)
        return ~correlation if held is None else held[0].number

    def took(self, call: Call) -> None:
        """It took a call of ours."""
        kind, frame = call
        if kind == FrameKind.REPLY:
            self.reply_window.release(~frame.correlation)

    def close_windows(self) -> None:
        """Nothing comes back any more: nobody is to wait for it."""
        self.window.close()
        self.reply_window.close()
        self.readiness.close()

    def take_loose(self, correlation: int) -> bool:
        """Whether a frame of ours is to answer a request; at most once."""
        owed = correlation in self.loose and self.lost is None
        self.loose.discard(correlation)
        return owed

    def in_burst(self, now: float) -> bool:
        """Whether a request of ours is one of many in a short time, which may wait for company.

        Args:
            now: seconds on any steady clock.
        """
        crowded = self.batch_under_way or self.calls.under_way >= _CROWD
        is_close = crowded and now - self.last_request < _CLOSE_SECONDS
        self.last_request = now
        self.close_requests = self.close_requests + 1 if is_close else 0
        return self.close_requests >= _BURST_FROM and not (self.requests or self.replies)

    def take_lifelines(self) -> list[AnswerFuture]:
        """Removes and returns its lifeline."""
        lifeline, self.lifeline = self.lifeline, None
        return [] if lifeline is None else [lifeline[1]]

    def take_batch(self) -> list[Frame]:
        """Takes the frames to send next, under way from now on; none while others are."""
        if self.batch_under_way or not self.outbox:
            return []
        batch, size = [], 0
        while self.outbox and size < _BATCH_BYTES:
            frame = self.outbox.popleft()
            batch.append(frame)
            size += len(frame.header) + len(frame.payload)
        self.batch_under_way = True
        self.calls.under_way += 1
        return batch

    def lifeline_ended(self, reason: str) -> None:
        """It answered our lifeline."""
        self.lifeline_open = False
        self.lose(reason)

    def lose(self, reason: str) -> None:
        """Nothing can be sent to it any more."""
        if self.lost is None:
            self.lost = reason
            self.shared.stop_sending()
            self.close_windows()
        self.outbox.clear()

    def break_off(self, reason: str) -> None:
        """The pipe is gone, and with it all that was under way on it."""
        self.lose(reason)
        self.broken = True
        self.mending = None
        self.batch_under_way = False
        self.lifeline = None
        self.farewell = None
        self.calls.forget()
        self.take_asked()
        self.served.forget()

    def mend(self, now: float, reason: str) -> Mending | None:
        """Its pipe broke; returns how it is to be replaced, if it may be."""
        if not self.seconds or self.lost is not None or self.said_farewell:
            return None
        self.epoch.broke(now, reason)
        self.route = None
        self.lifeline_open = False
        self.mending = Mending(self.epoch, self.seconds, now)
        return self.mending

    def is_whole(self, attempt: int) -> bool:
        """Whether that attempt's pipe is in place."""
        return self.epoch.attempt == attempt and self.epoch.since is None

    def begin_pipe(self, attempt: int) -> None:
        """Another pipe is in place; calls wait until those before them have been made on it."""
        self.epoch.joined(attempt)
        self.mending = None
        self.watched = self.lifeline_open = True

    def abandon_pipe(self) -> None:
        """It leaves while its pipe is broken: what was under way to it there is dropped."""
        self.mending = None
        self.batch_under_way = self.lifeline_open = False
        self.calls.forget()

    def forget_contents(self) -> None:
        """It is no peer any more; what was kept for another pipe is not needed."""
        self.close_windows()
        self.mending = None
        self.seconds = 0.0
        self.calls.forget_contents()
        self.served.forget()

    def say_farewell(self) -> None:
        """We leave. Only the worker with the higher id counts its farewell as under way."""
        self.said_farewell = True
        if self.precedes_me:
            self.calls.under_way += 1

    def farewell_confirmed(self, message: bytes) -> None:
        """Its answer to our farewell arrived."""
        self.confirmed = True
        self.awaits_another = message == CROSSED
        if self.precedes_me:
            self.calls.under_way -= 1

    def take_due_confirmation(self) -> tuple[AnswerFuture, bytes] | None:
        """Removes its farewell once it can be confirmed; returns it with what to say."""
        if self.farewell is None or self.calls.under_way > 0:
            return None
        if self.served.delivered < self.announced:
            return None
        due, self.farewell, self.parted = self.farewell, None, True
        return due, CROSSED if self.said_farewell and not self.confirmed else b""

    def is_finished(self) -> bool:
        """Whether neither side reads from the other any more, if one of them left."""
        if self.broken or self.left:
            return True
        if self.farewell is not None or (self.said_farewell and not self.confirmed):
            return False
        if self.awaits_another and not self.parted:
            return False
        leaves = self.said_farewell or self.parted or self.will_say_farewell
        return not (leaves and self.lifeline_open)
