"""What a TensorPipe transport knows of one peer, and when two workers have parted.

Pure bookkeeping: no torch calls, no locks. Futures are only stored and returned.

Parting: a worker that leaves says farewell, and how many frames it sent before.
The other side starts no call to it any more, and confirms when all those frames
were taken and none of its own calls is under way. When both leave at once their
farewells cross, and each would wait for the other: the worker with the lower id
then confirms although its farewell is still out, and says so, and the other
stays until it has confirmed that one too. Lifelines are not counted: the leaver
answers them last.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from rpc.devices import DeviceMap
from rpc.transports.base import Frame, FrameKind, Peer
from rpc.transports.tensorpipe_wire import Answer

if TYPE_CHECKING:
    from torch._C import _distributed_rpc as torch_rpc

AnswerFuture = torch.futures.Future[Answer]

CROSSED = b"a farewell of mine is still to come"


@dataclass(slots=True, eq=False)
class Link:
    """One life of a peer.

    Args:
        peer: who it is.
        route: what torch calls it.
        precedes_me: its id is lower than ours.
        requests: our devices to its devices, for what we ask.
        replies: our devices to its devices, for what we answer.
    """

    peer: Peer
    route: torch_rpc.WorkerInfo
    precedes_me: bool
    requests: DeviceMap
    replies: DeviceMap

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
    sent: int = 0
    """Our calls to it that carry frames."""
    under_way: int = 0
    """Our calls to it that have not come back."""
    taken: int = 0
    """Its calls that carry frames and were taken."""
    asked: dict[int, AnswerFuture] = field(default_factory=dict)
    """Its requests that wait for our reply, by correlation."""
    lifelines: list[AnswerFuture] = field(default_factory=list)
    """Its calls that we answer when we leave."""
    notices: list[Frame] = field(default_factory=list)
    """Notices that wait for the batch before them to be taken."""
    batch_under_way: bool = False

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

    @property
    def name(self) -> str:
        """The peer's name."""
        return self.peer.info.name

    def hold(self, kind: int, correlation: int, future: AnswerFuture) -> None:
        """Keeps a call of the peer until it is answered."""
        if kind == FrameKind.REQUEST:
            self.asked[correlation] = future
        else:
            self.lifelines.append(future)

    def take_asked(self) -> list[AnswerFuture]:
        """Removes and returns its requests that wait for our reply."""
        asked = list(self.asked.values())
        self.asked.clear()
        return asked

    def take_lifelines(self) -> list[AnswerFuture]:
        """Removes and returns its lifelines."""
        lifelines, self.lifelines = self.lifelines, []
        return lifelines

    def begin_call(self) -> None:
        """A call with a frame begins."""
        self.sent += 1
        self.under_way += 1

    def take_back_call(self) -> None:
        """A call that began did not leave."""
        self.sent -= 1
        self.under_way -= 1

    def take_batch(self) -> list[Frame]:
        """Begins a call with the notices to send next; none while a batch is under way."""
        if self.batch_under_way or not self.notices:
            return []
        batch, self.notices = self.notices, []
        self.batch_under_way = True
        self.begin_call()
        return batch

    def lifeline_ended(self, reason: str) -> None:
        """It answered our lifeline."""
        self.lifeline_open = False
        self.lose(reason)

    def lose(self, reason: str) -> None:
        """Nothing can be sent to it any more."""
        if self.lost is None:
            self.lost = reason
        self.notices.clear()

    def break_off(self, reason: str) -> None:
        """The pipe is gone, and with it all that was under way on it."""
        self.lose(reason)
        self.broken = True
        self.under_way = 0
        self.batch_under_way = False
        self.asked.clear()
        self.lifelines.clear()
        self.farewell = None

    def say_farewell(self) -> None:
        """We leave. Only the worker with the higher id counts its farewell as under way."""
        self.said_farewell = True
        if self.precedes_me:
            self.under_way += 1

    def farewell_confirmed(self, message: bytes) -> None:
        """Its answer to our farewell arrived."""
        self.confirmed = True
        self.awaits_another = message == CROSSED
        if self.precedes_me:
            self.under_way -= 1

    def take_due_confirmation(self) -> tuple[AnswerFuture, bytes] | None:
        """Removes its farewell once it can be confirmed; returns it with what to say."""
        if self.farewell is None or self.under_way > 0 or self.taken < self.announced:
            return None
        due, self.farewell, self.parted = self.farewell, None, True
        return due, CROSSED if self.said_farewell and not self.confirmed else b""

    def is_finished(self) -> bool:
        """Whether neither side reads from the other any more, if one of them left."""
        if self.broken:
            return True
        if self.farewell is not None or (self.said_farewell and not self.confirmed):
            return False
        if self.awaits_another and not self.parted:
            return False
        leaves = self.said_farewell or self.parted or self.will_say_farewell
        return not (leaves and self.lifeline_open)
