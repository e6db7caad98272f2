"""Values: packets of the simulated network, and the calls and requests of simulated workers."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

from rpc.ids import GlobalId, Life
from rpc.protocol.reference_terms import Handle
from rpc.protocol.retry import RequestId
from rpc.transports.base import Frame
from rpc.wire.control import ControlMessage, Passage, Passed, Register
from tests.simulation.group.steps import Name, short

Causes: TypeAlias = frozenset[Life]
"""The lives without which something would not have happened."""


@dataclass(frozen=True, slots=True)
class SimRequest:
    """A call; at most one of ``creates`` and ``fetches``."""

    call: Name
    correlation: int
    table: tuple[Passed, ...]
    creates: Passed | None
    fetches: GlobalId | None
    patient: bool
    once: RequestId | None


@dataclass(frozen=True, slots=True)
class SimReply:
    """The answer of ``answers``; ``served_by`` is its result."""

    answers: Name
    correlation: int
    table: tuple[Passed, ...]
    served_by: Life
    for_life: Life
    ran: Name | None
    """The job that produced the result; None if the request came too late to run."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Control messages that were queued for one worker, and the frame that carries them."""

    sequence: int
    messages: tuple[ControlMessage, ...]
    frame: Frame = field(repr=False)


Body: TypeAlias = SimRequest | SimReply | Batch


@dataclass(frozen=True, slots=True)
class Packet:
    """Something on its way from one life to another; copies have the name of their origin."""

    name: Name
    origin: Name
    source: Life
    to: Life
    body: Body
    causes: Causes

    def __str__(self) -> str:
        if isinstance(self.body, SimRequest):
            what = f"request {short(self.body.call)}"
        elif isinstance(self.body, SimReply):
            what = f"reply to {short(self.body.answers)}"
        else:
            what = ", ".join(map(str, self.body.messages))
        passed = [f"{each.passage.name} of {each.fork}" for each in self.references()]
        carries = f" with {', '.join(passed)}" if passed else ""
        return f"{short(self.source)} -> {short(self.to)} {what}{carries}"

    def references(self) -> Iterator[Passed]:
        """The references that live in it until it arrives."""
        if isinstance(self.body, SimRequest):
            yield from self.body.table
            creates = self.body.creates
            if creates is not None and creates.passage is not Passage.LOOPBACK:
                yield creates
        elif isinstance(self.body, SimReply):
            yield from self.body.table
        else:
            for message in self.body.messages:
                if isinstance(message, Register):
                    yield Passed(message.reference, message.fork, Passage.CHILD)


class NewsKind(enum.Enum):
    """Kinds of news about another worker."""

    JOINED = "joined"
    LOST = "lost"
    EXPELLED = "declared lost by the others"
    """Told to the worker itself."""


@dataclass(frozen=True, slots=True)
class News:
    """News that one worker will hear of another."""

    name: Name
    listener: Life
    about: Life
    kind: NewsKind
    after_its_packets: bool = False
    """The worker closed in good order: what it sent arrives first."""


class CallOutcome(enum.Enum):
    """Outcomes of a call, for the program that made it."""

    RESULT = "result"
    TIMEOUT = "RpcTimeoutError"
    CANCELLED = "CallCancelledError"
    LOST = "WorkerLostError"
    NOT_SENT = "the error of sending"


@dataclass(slots=True, eq=False)
class OpenCall:
    """A call, as its caller keeps it, and what its program knows of it."""

    name: Name
    to: Life
    table: tuple[Passed, ...]
    creates: Passed | None
    opened_at: float
    deadline: float | None
    job: Job | None
    causes: Causes
    once: int | None = None
    correlation: int = 0
    leaves: bool = True
    outcome: CallOutcome | None = None
    answered: bool = False
    """The request is known not to be under way any more."""


@dataclass(slots=True, eq=False)
class Job:
    """A request being served."""

    name: Name
    sender: Life
    request: SimRequest
    handles: dict[Name, Handle]
    causes: Causes
    waits_for: set[Name] = field(default_factory=set)
    cancelled: bool = False
    runs: bool = True
    """False for a request whose like runs already: it gets the same outcome."""


class Value(enum.Enum):
    """A value at its owner."""

    AWAITED = "awaited"
    READY = "ready"
    FAILED = "failed"


def passed_in(packets: Iterable[Packet], rref: GlobalId) -> Iterator[tuple[Packet, Passed]]:
    """The references to one value that are under way."""
    for packet in packets:
        for passed in packet.references():
            if passed.reference.rref == rref:
                yield packet, passed
