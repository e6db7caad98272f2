"""What lets calls over TensorPipe outlive the pipe that they were made on. Sans-IO.

Each worker's calls to another are numbered from 1. The caller remembers each until
it is answered (:class:`Calls`); the other side knows which numbers it has taken,
and keeps each reply until the caller says that it has it (:class:`Served`). When
the pipe breaks, the caller opens another (:class:`Mending`), hears which numbers
were taken, calls again with those that were not, and asks again for the replies
that it lacks. So nothing is lost, and as a number is taken once, nothing runs twice.

The two directions between two workers are two pipes and know nothing of each
other. A call also says on which attempt at a pipe it was made: what was read from
a broken pipe may still come out of torch's threads long after what came over the
next one, and must not take the place of that.

Memory: what a request carried is forgotten when its reply comes; a large one, which
may wait long for that, soon after it has arrived. Replies are kept until the caller
says that it has them: after many, after many bytes, or soon. Both say so in a call
of its own kind, a receipt. Beyond a bound the oldest replies are forgotten; should
the caller ask for one of those, the peer is lost to it.
"""

from __future__ import annotations

import enum
import struct
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from rpc.protocol.resumption import ReconnectEpoch
from rpc.transports.base import Frame, FrameKind
from rpc.transports.tensorpipe.wire import AGAIN, VOID, Answer, Envelope, Payload

AnswerFuture = torch.futures.Future[Answer]

MOST_REPLIES_KEPT = 1 << 16
MOST_BYTES_KEPT = 256 << 20
RECEIPT_AFTER = 1024
RECEIPT_AFTER_BYTES = 8 << 20
LARGE = 64 * 1024
"""Bytes from which a request is not remembered for longer than it takes to arrive."""

FIRST_PAUSE_SECONDS = 0.01
LONGEST_PAUSE_SECONDS = 0.5
PATIENCE_SECONDS = 1.0
"""How long one attempt may say nothing before another is made beside it."""

_NOTHING = Frame(FrameKind.NOTICE, 0, b"")


Call = tuple[int, Frame]
"""A call that is under way: what it is to the transport, and what it carries."""


def size(frame: Frame) -> int:
    """About how much memory a frame takes, in bytes."""
    nbytes = len(frame.header) + len(frame.payload)  # small tensors are in the header
    if frame.tensors:
        nbytes += sum(tensor.nbytes for tensor in frame.tensors)
    return nbytes


class Calls:
    """One worker's calls to another.

    Args:
        remembers: whether what they carry is kept to be sent again.
        receipt_after: the bytes of replies after which a receipt is due at once.

    Attributes:
        sent: how many there were.
        under_way: how many have not come back, or not all the way.
        unanswered: those that have not come back, by number and in its order.
    """

    __slots__ = (
        "_receipt_after",
        "_received",
        "_received_bytes",
        "remembers",
        "sent",
        "unanswered",
        "under_way",
    )

    def __init__(self, remembers: bool, receipt_after: int = RECEIPT_AFTER_BYTES) -> None:
        self.remembers = remembers
        self._receipt_after = receipt_after
        self.sent = 0
        self.under_way = 0
        self.unanswered: dict[int, Call] = {}
        self._received: list[int] = []
        self._received_bytes = 0

    def begin(self, kind: int, frame: Frame) -> int:
        """A call begins; returns its number."""
        self.sent = number = self.sent + 1
        self.under_way += 1
        self.unanswered[number] = kind, frame if self.remembers else _NOTHING
        return number

    def void(self, number: int, instead: Frame = _NOTHING) -> bool:
        """A call could not be made; True if ``instead`` is to be sent under its number."""
        if number not in self.unanswered:
            return False
        self.unanswered[number] = VOID, instead
        return True

    def failed(self, number: int, instead: Frame) -> bool:
        """A request ended without a reply; True if ``instead`` is to be sent under its number.

        There may be one that could not be sent, and is kept: the next receipt names it.
        """
        kind, _ = self.unanswered.get(number, (VOID, _NOTHING))
        if kind not in (FrameKind.REQUEST, AGAIN):
            return False
        if self.remembers:
            self._received.append(number)
        return self.void(number, instead)

    def came_back(self, number: int) -> Call | None:
        """An answer came; the call if it is the first, which stays under way until told."""
        return self.unanswered.pop(number, None)

    def received(self, number: int, frame: Frame) -> bool:
        """The answer was a reply; True if a receipt is due at once."""
        self._received.append(number)
        self._received_bytes += size(frame)
        return len(self._received) >= RECEIPT_AFTER or self._received_bytes >= self._receipt_after

    def take_received(self) -> list[int]:
        """The replies that no receipt has named yet, to be named in one."""
        received, self._received, self._received_bytes = self._received, [], 0
        return received

    def arrived(self, numbers: Iterable[int]) -> None:
        """The other side took these requests; what they carried need not be sent again."""
        for number in numbers:
            call = self.unanswered.get(number)
            if call is not None and call[0] == FrameKind.REQUEST:
                self.unanswered[number] = _reminder(call)

    def after(self, number: int) -> list[tuple[int, Call]]:
        """The unanswered calls after one, in order."""
        return [each for each in self.unanswered.items() if each[0] > number]

    def settle(self, taken: Taken) -> list[Call]:
        """Sorts what was under way on a pipe that broke.

        A request that was taken becomes a question for its reply; another call that was taken
        has come back, and only its answer was lost.

        Returns:
            The calls that have come back.
        """
        back = []
        for number, call in list(self.unanswered.items()):
            if number not in taken:
                continue
            if call[0] in (FrameKind.REQUEST, AGAIN):
                self.unanswered[number] = _reminder(call)
            else:
                back.append(self.unanswered.pop(number))
        return back

    def forget(self) -> None:
        """Nothing will come back any more."""
        self.under_way = 0
        self.unanswered.clear()
        self._received.clear()

    def forget_contents(self) -> None:
        """What is under way will not be sent again."""
        self.remembers = False
        for number, (kind, _) in self.unanswered.items():
            self.unanswered[number] = kind, _NOTHING


def _reminder(call: Call) -> Call:
    return AGAIN, Frame(FrameKind.REQUEST, call[1].correlation, b"")


class Taken:
    """Which numbers were taken: all below one, and some after it."""

    __slots__ = ("_ahead", "_next")

    def __init__(self, next_number: int = 1, ahead: Iterable[int] = ()) -> None:
        self._next = next_number
        self._ahead = set(ahead)

    def __contains__(self, number: int) -> bool:
        return number < self._next or number in self._ahead

    def take(self, number: int) -> bool:
        """Takes a number; False if it was taken before."""
        if number == self._next:
            self._next += 1
            while self._next in self._ahead:
                self._ahead.remove(self._next)
                self._next += 1
            return True
        if number in self:
            return False
        self._ahead.add(number)
        return True

    def encode(self) -> bytes:
        """To be sent."""
        return encode_numbers([self._next, *sorted(self._ahead)])

    @classmethod
    def decode(cls, data: Payload) -> Taken:
        """The inverse of ``encode``."""
        first, *ahead = decode_numbers(data)
        return cls(first, ahead)


class Again(enum.Enum):
    """What becomes of a request that was taken before."""

    HELD = enum.auto()
    """Its handler still runs, and will answer this one."""
    STALE = enum.auto()
    """Its handler still runs, and will answer another, which came later than this."""
    ANSWERED = enum.auto()
    """Its reply is kept."""
    FORGOTTEN = enum.auto()
    """It was answered, and the reply is kept no more."""


class Served:
    """Another worker's calls to this one.

    Args:
        keeps: whether replies are kept until the caller has them.

    Attributes:
        delivered: how many calls were taken, all the way.
        asked: its requests that wait for our reply, by correlation.
        taken: the numbers of its calls that were taken.
        arrived: its large requests that no receipt has named yet.
        kept_bytes: how much memory the replies take that are kept.
    """

    __slots__ = ("_kept", "arrived", "asked", "delivered", "keeps", "kept_bytes", "taken")

    def __init__(self, keeps: bool) -> None:
        self.keeps = keeps
        self.delivered = 0
        self.asked: dict[int, tuple[Envelope, AnswerFuture]] = {}
        self.taken = Taken()
        self._kept: OrderedDict[int, Frame] = OrderedDict()
        self.kept_bytes = 0
        self.arrived: list[int] = []

    def take(self, envelope: Envelope, frame: Frame, future: AnswerFuture | None) -> bool:
        """Takes a call, and holds it until it is answered; False if it was taken before."""
        if not self.taken.take(envelope.number):
            return False
        if future is None:
            return True
        self.asked[envelope.correlation] = envelope, future
        if self.keeps and size(frame) >= LARGE:
            self.arrived.append(envelope.number)
        return True

    def ask_again(self, envelope: Envelope, future: AnswerFuture) -> tuple[Again, Frame | None]:
        """A request that was taken came again, on another pipe; the reply is kept or None."""
        held = self.asked.get(envelope.correlation)
        if held is not None and held[0].number == envelope.number:
            if held[0].attempt >= envelope.attempt:
                return Again.STALE, None
            self.asked[envelope.correlation] = envelope, future
            return Again.HELD, None
        reply = self._kept.get(envelope.number)
        return (Again.FORGOTTEN, None) if reply is None else (Again.ANSWERED, reply)

    def reply(self, frame: Frame) -> tuple[Envelope, AnswerFuture] | None:
        """Takes out the request that ``frame`` answers, if it still waits."""
        held = self.asked.pop(frame.correlation, None)
        if held is not None and self.keeps:
            self._kept[held[0].number] = frame
            self.kept_bytes += size(frame)
            while self.kept_bytes > MOST_BYTES_KEPT or len(self._kept) > MOST_REPLIES_KEPT:
                self.kept_bytes -= size(self._kept.popitem(last=False)[1])
        return held

    def acknowledged(self, numbers: Iterable[int]) -> None:
        """The caller has these replies."""
        for number in numbers:
            frame = self._kept.pop(number, None)
            if frame is not None:
                self.kept_bytes -= size(frame)

    def take_arrived(self) -> list[int]:
        """The large requests that still wait and that no receipt has named yet."""
        if not self.arrived:
            return []
        arrived, self.arrived = self.arrived, []
        waiting = {envelope.number for envelope, _ in self.asked.values()}
        return [number for number in arrived if number in waiting]

    def take_asked(self) -> list[tuple[Envelope, AnswerFuture]]:
        """Takes out all requests that wait for our reply."""
        asked = list(self.asked.values())
        self.asked.clear()
        return asked

    def forget(self) -> None:
        """Forgets all that was for a later pipe."""
        self.keeps = False
        self._kept.clear()
        self.kept_bytes = 0
        self.arrived.clear()


def encode_receipt(received: list[int], arrived: list[int]) -> bytes:
    """The payload of a receipt.

    Args:
        received: the sender's calls whose replies it has.
        arrived: the receiver's requests that the sender took.
    """
    return encode_numbers([len(received), *received, *arrived])


def decode_receipt(data: Payload) -> tuple[list[int], list[int]]:
    """The inverse of ``encode_receipt``."""
    count, *numbers = decode_numbers(data)
    return numbers[:count], numbers[count:]


def encode_numbers(numbers: list[int]) -> bytes:
    """Numbers as bytes, eight each."""
    return struct.pack(f"<{len(numbers)}Q", *numbers)


def decode_numbers(data: Payload) -> list[int]:
    """The inverse of ``encode_numbers``."""
    return list(struct.unpack(f"<{len(data) // 8}Q", data))


# A pipe that broke


class Step(enum.Enum):
    """What to do next about a broken pipe."""

    TRY = enum.auto()
    """Open another, and ask the peer to go on there."""
    GO_ON = enum.auto()
    """The peer agreed: call again."""
    GIVE_UP = enum.auto()
    """The peer is lost."""
    WAIT = enum.auto()


@dataclass(slots=True, eq=False)
class Mending:
    """Attempts to replace a broken pipe.

    Args:
        epoch: which attempt is in place, and since when it is broken.
        seconds: how long it may stay broken.
        due: when to try next, in seconds on the owner's clock.

    Attributes:
        hopeless: why it cannot be replaced; empty while it may be.
        agreed: the attempt that the peer agreed to, and what it had taken then.
    """

    epoch: ReconnectEpoch
    seconds: float
    due: float
    hopeless: str = ""
    agreed: tuple[int, Taken] | None = None
    _pending: set[int] = field(default_factory=set)
    _pause: float = FIRST_PAUSE_SECONDS
    _problem: str = ""

    def step(self, now: float) -> Step:
        """What to do now."""
        if self.hopeless:
            return Step.GIVE_UP
        if self.agreed is not None:
            return Step.GO_ON
        if self.epoch.left(now, self.seconds) <= 0:
            problem = f": {self._problem}" if self._problem else ""
            self.hopeless = f"it was not opened again within {self.seconds:g} s{problem}"
            return Step.GIVE_UP
        return Step.TRY if now >= self.due else Step.WAIT

    def patience(self, now: float) -> float:
        """How long to wait for something to happen, in seconds."""
        return max(0.0, min(self.due - now, self.epoch.left(now, self.seconds)))

    def begin(self, now: float) -> int:
        """An attempt is made; returns its number."""
        attempt = self.epoch.next_attempt()
        self._pending.add(attempt)
        self.due = now + PATIENCE_SECONDS
        return attempt

    def agree(self, attempt: int, taken: Taken) -> bool:
        """The peer answered an attempt; False if another one came first."""
        if attempt not in self._pending or self.agreed is not None:
            return False
        self.agreed = attempt, taken
        return True

    def failed(self, attempt: int, now: float, problem: str) -> None:
        """An attempt came to nothing; the next is made after a pause."""
        if attempt not in self._pending:
            return
        self._pending.remove(attempt)
        self._problem = problem
        if not self._pending:
            self.due = now + self._pause
            self._pause = min(2 * self._pause, LONGEST_PAUSE_SECONDS)

    def is_pending(self, attempt: int) -> bool:
        """Whether an attempt has not failed, and no other was agreed to."""
        return self.agreed is None and attempt in self._pending

    def end(self, reason: str) -> None:
        """It cannot be replaced."""
        self.hopeless = self.hopeless or reason
