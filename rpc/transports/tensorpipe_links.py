"""What a TensorPipe transport knows of one peer, and when two workers have parted.

Pure bookkeeping: no torch calls, no locks. Futures are only stored and returned.

Parting: a worker that leaves says farewell; the other side confirms when none
of its own calls to the leaver is under way, and starts none after that. When
both leave at once their farewells cross, and each would wait for the other: the
worker with the lower id then confirms although its farewell is still out, and
says so, and the other stays until it has confirmed that one too.
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
    broken: bool = False
    """Its pipe is gone too, so that nothing comes from it either."""
    watched: bool = False
    """Our lifeline to it was opened."""
    under_way: int = 0
    """Our calls to it that have not come back."""
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
    farewell: AnswerFuture | None = None
    """Its farewell, not confirmed yet."""
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

    def take_held(self) -> list[AnswerFuture]:
        """Removes and returns all its calls that wait for an answer, farewells apart."""
        held = [*self.asked.values(), *self.lifelines]
        self.asked.clear()
        self.lifelines.clear()
        return held

    def take_batch(self) -> list[Frame]:
        """Removes and returns the notices to send next; none while a batch is under way."""
        if self.batch_under_way or not self.notices:
            return []
        batch, self.notices = self.notices, []
        self.batch_under_way = True
        self.under_way += 1
        return batch

    def break_off(self) -> None:
        """The pipe is gone, and with it all that was under way on it."""
        self.broken = True
        self.under_way = 0
        self.batch_under_way = False
        self.notices.clear()
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
        if self.farewell is None or self.under_way > 0:
            return None
        due, self.farewell, self.parted = self.farewell, None, True
        return due, CROSSED if self.said_farewell and not self.confirmed else b""

    def is_finished(self) -> bool:
        """Whether neither side will read from the other any more."""
        return self.broken or (self.confirmed and (self.parted or not self.awaits_another))
