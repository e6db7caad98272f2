"""The state of one peer of a TensorPipe transport, its close handshake included. Sans-IO.

Makes no calls and takes no locks. Futures are only stored and returned. The calls in both
directions are counted by ``outstanding``.

Close handshake: a worker that leaves sends CLOSE with the number of calls that it made. The
peer begins no call to it any more, and confirms when all those calls were taken and none of
its own is under way. When both leave at once their CLOSE calls cross, and each would wait for
the other: the worker with the lower id then confirms although its own CLOSE is not confirmed
yet, and says so, and the other stays until it has confirmed that one too. Lifelines are not
counted: the worker that leaves answers them last. If it gives up waiting for the peer, because
a handler does not end and so a call of the peer's is not answered, it says so with that answer,
and the peer does not wait for it either.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rpc.devices import DeviceMap
from rpc.ids import Life
from rpc.transports.base import Frame, Peer
from rpc.transports.flow import FlowWindow
from rpc.transports.loopback import Loopback
from rpc.transports.tensorpipe.device_readiness import Readiness
from rpc.transports.tensorpipe.outstanding import AnswerFuture, SentCalls, TakenCalls
from rpc.transports.tensorpipe.shared_tensors import SharedTensors, nothing_shared
from rpc.transports.tensorpipe.wire import LIFELINE, Envelope, lent_from

if TYPE_CHECKING:
    from torch._C import _distributed_rpc as torch_rpc

_CROWD = 4
_CLOSE_SECONDS = 300e-6
_BURST_FROM = 8
_BATCH_BYTES = 1 << 18

CROSSED = b"a close of mine is still to be confirmed"


@dataclass(slots=True, eq=False)
class PeerLink:
    """One life of a peer.

    Frames that need not leave at once wait in ``outbox`` while a batch of them is under
    way, so that the more there are, the more leave together: notices always, requests
    while many follow each other closely (:meth:`in_burst`). Such a request has no call of
    its own whose answer could carry the reply, which comes as a frame of the other side.

    Args:
        peer: name, id, incarnation and address.
        route: torch's name and id for it.
        precedes_me: its id is lower than ours.
        requests: our devices to its devices, for our requests.
        replies: our devices to its devices, for our replies.
        shared: large tensors, if it is on this host.
        window: bounds the requests to it that are under way.
        reply_window: bounds the large replies to it that no receipt has named yet.
        loopback: the way to it if it is this worker itself, and torch is not needed.
        calls: our calls to it.
        taken: its calls to us.
    """

    peer: Peer
    route: torch_rpc.WorkerInfo
    precedes_me: bool
    requests: DeviceMap
    replies: DeviceMap
    shared: SharedTensors = field(default_factory=nothing_shared)
    window: FlowWindow = field(default_factory=FlowWindow)
    reply_window: FlowWindow = field(default_factory=FlowWindow)
    loopback: Loopback | None = None
    calls: SentCalls = field(default_factory=SentCalls)
    taken: TakenCalls = field(default_factory=TakenCalls)

    life: Life = field(init=False)
    requests_lent_from: int = field(init=False)
    """The size from which payloads of our requests may travel as a tensor."""
    replies_lent_from: int = field(init=False)
    """The size from which payloads of our replies may travel as a tensor."""
    readiness: Readiness = field(default_factory=Readiness)
    """True if its devices can take the tensors of our requests."""
    lost: str | None = None
    """The reason why nothing can be sent to it; None while it can."""
    reported: bool = False
    """True if the receiver was told of its loss."""
    broken: bool = False
    """True if its pipe is gone too, so that nothing comes from it either."""
    watched: bool = False
    """True if our lifeline to it was opened."""
    lifeline_open: bool = False
    """True while our lifeline to it has not ended."""
    lifeline: AnswerFuture | None = None
    """Its lifeline to us, a call that we answer when we leave."""
    loose: set[int] = field(default_factory=set)
    """Its requests that came in batches and wait for our reply."""
    outbox: deque[Frame] = field(default_factory=deque)
    """Frames that wait for the batch before them to be taken."""
    batch_under_way: bool = False
    close_requests: int = 0
    """Our last requests of which each followed the one before it closely."""
    last_request: float = 0.0

    close_sent: bool = False
    """True if we told it that we leave."""
    close_confirmed: bool = False
    """True if it confirmed that."""
    crossed: bool = False
    """True if it confirmed, but its own CLOSE is still to be confirmed."""
    will_close: bool = False
    """True if it refused a call because it leaves."""
    close_request: AnswerFuture | None = None
    """Its CLOSE, not confirmed yet."""
    announced: int = 0
    """The number of calls it made before its CLOSE."""
    parted: bool = False
    """True if we confirmed its CLOSE."""
    left: bool = False
    """True if it closed, whether all was confirmed or not; it answers nothing any more."""

    def __post_init__(self) -> None:
        self.life = self.peer.life
        self.requests_lent_from = lent_from(self.requests)
        self.replies_lent_from = lent_from(self.replies)

    @property
    def name(self) -> str:
        """The peer's name."""
        return self.peer.info.name

    def take(self, envelope: Envelope, future: AnswerFuture | None) -> bool:
        """Takes a call of the peer; False if its number was taken before."""
        if envelope.kind == LIFELINE:
            self.lifeline = future
            return True
        return self.taken.take(envelope, None if self.broken else future)

    def take_asked(self) -> list[tuple[Envelope, AnswerFuture]]:
        """Removes its requests that wait for our reply; returns those that can be answered."""
        self.loose.clear()
        return self.taken.take_asked()

    def awaits(self, correlation: int) -> bool:
        """Returns whether a request of it waits for our reply."""
        return correlation in self.taken.asked or correlation in self.loose

    def close_windows(self) -> None:
        """Lets nobody wait for room any more, as nothing comes back."""
        self.window.close()
        self.reply_window.close()
        self.readiness.close()

    def take_loose(self, correlation: int) -> bool:
        """Returns whether a frame of ours is to answer a request that came in a batch; once."""
        owed = correlation in self.loose and self.lost is None
        self.loose.discard(correlation)
        return owed

    def in_burst(self, now: float) -> bool:
        """Returns whether a request of ours is one of many in a short time, which may wait.

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
        return [] if lifeline is None else [lifeline]

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
        """Notes that it answered our lifeline."""
        self.lifeline_open = False
        self.lose(reason)

    def lose(self, reason: str) -> None:
        """Notes that nothing can be sent to it any more."""
        if self.lost is None:
            self.lost = reason
            self.shared.stop_sending()
            self.close_windows()
        self.outbox.clear()

    def break_off(self, reason: str) -> None:
        """Notes that its pipe broke, and forgets all that was under way on it."""
        self.lose(reason)
        self.broken = True
        self.batch_under_way = False
        self.lifeline = None
        self.close_request = None
        self.calls.forget()
        self.take_asked()

    def send_close(self) -> None:
        """Notes that we leave. Only the worker with the higher id counts its CLOSE as under way."""
        self.close_sent = True
        if self.precedes_me:
            self.calls.under_way += 1

    def close_was_confirmed(self, message: bytes) -> None:
        """Takes its answer to our CLOSE."""
        self.close_confirmed = True
        self.crossed = message == CROSSED
        if self.precedes_me:
            self.calls.under_way -= 1

    def take_due_confirmation(self) -> tuple[AnswerFuture, bytes] | None:
        """Removes its CLOSE once it can be confirmed; returns it with what to say."""
        if self.close_request is None or self.calls.under_way > 0:
            return None
        if self.taken.delivered < self.announced:
            return None
        due, self.close_request, self.parted = self.close_request, None, True
        return due, CROSSED if self.close_sent and not self.close_confirmed else b""

    def is_finished(self) -> bool:
        """Returns whether neither side reads from the other any more, if one of them left."""
        if self.broken or self.left:
            return True
        if self.close_request is not None or (self.close_sent and not self.close_confirmed):
            return False
        if self.crossed and not self.parted:
            return False
        leaves = self.close_sent or self.parted or self.will_close
        return not (leaves and self.lifeline_open)
