"""Lets two workers go on where a broken connection stopped. Sans-IO.

A connection carries messages in order, numbered from 0 in each direction by
counting. What was sent is remembered (:class:`SentMessages`) until the other end
acknowledges it, now and then, many messages at once (:class:`Receipts`). When the
connection breaks and another takes its place, each end says how many messages it
has received whole, and the other sends again what comes after them: nothing is
lost, and as the numbers go on, nothing can be taken twice.

:class:`ReconnectEpoch` decides which connection takes the place of which. Only the end that
opened the first one opens others, and numbers its attempts: an attempt that comes
late, behind a newer one, changes nothing.

What is remembered is bounded. By count, here. By bytes, because the other end
acknowledges after a bounded number of bytes it received, and what it has not
received is held back by the sockets' own buffers. Should the bound be hit all the
same, the connection cannot be resumed.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from rpc.errors import FrameError

MOST_MESSAGES = 1 << 18
MOST_IN_VAIN = 32
"""Connections in a row on which a message is sent again, if none gets further than it."""

Message = TypeVar("Message")


class CannotResumeError(Exception):
    """Messages that the other end lacks are not remembered any more, or never arrive."""


class SentMessages(Generic[Message]):
    """The messages that one end sent and the other has not acknowledged.

    The owner counts: it passes how many messages it has ever sent, and appends each to
    :attr:`messages` itself, which is all that a message costs.

    Args:
        most: how many to remember; 0 for a connection that is not to be resumed.
    """

    __slots__ = ("_arrived", "_in_vain", "messages")

    def __init__(self, most: int = MOST_MESSAGES) -> None:
        self.messages: deque[Message] = deque(maxlen=most)
        self._arrived = -1
        self._in_vain = 0

    def acknowledged(self, sent: int, received: int) -> list[Message]:
        """Forgets what the other end has, and returns it.

        Args:
            sent: how many messages were ever sent.
            received: how many of them, from the first on, the other end has.

        Raises:
            FrameError: the other end claims what was never sent.
        """
        if received > sent:
            raise FrameError(f"{received} messages are acknowledged, but {sent} were sent")
        surplus = len(self.messages) - (sent - received)
        return [self.messages.popleft() for _ in range(surplus)]

    def missing(self, sent: int, received: int) -> list[Message]:
        """Returns what to send again on a new connection, in order, and keeps it.

        To be followed by :meth:`sent_again` when it was: what does not get through on many
        connections is given up.

        Args:
            sent: how many messages were ever sent.
            received: how many of them the other end has.

        Raises:
            CannotResumeError: some of it is not remembered, was never sent, or does not
                get through.
        """
        lacking = sent - received
        if not 0 <= lacking <= len(self.messages):
            raise CannotResumeError(
                f"the other end has {received} messages of {sent}, and the last "
                f"{len(self.messages)} are remembered"
            )
        if not lacking or received != self._arrived:
            self._in_vain = 0
        self._arrived = received
        if self._in_vain >= MOST_IN_VAIN:
            raise CannotResumeError(
                f"message {received} did not arrive on any of {self._in_vain} connections"
            )
        return list(self.messages)[len(self.messages) - lacking :]

    def sent_again(self) -> None:
        """Notes that what was missing has been sent on another connection."""
        self._in_vain += 1

    def forget(self) -> list[Message]:
        """Forgets everything; returns it."""
        forgotten = list(self.messages)
        self.messages.clear()
        return forgotten


class Receipts:
    """Decides when to acknowledge what arrived: at once after much, late after little.

    The owner adds to :attr:`owed` what arrived, in whatever unit, and calls :meth:`due`
    when it has reached :attr:`limit`.

    Args:
        soon: from here on, late.
        now: from here on, at once.
        late: told that an acknowledgement is to be sent some time.
    """

    __slots__ = ("_late", "_now", "_soon", "limit", "owed")

    def __init__(self, soon: int, now: int, late: Callable[[], None]) -> None:
        self._soon = soon
        self._now = now
        self._late = late
        self.owed = 0
        self.limit = soon

    def due(self) -> bool:
        """Returns whether all that arrived is to be acknowledged at once."""
        if self.owed >= self._now:
            return True
        self.limit = self._now
        self._late()
        return False

    def paid(self) -> None:
        """Notes that it was acknowledged."""
        self.owed = 0
        self.limit = self._soon


class Replacement(enum.Enum):
    """Verdicts on a new connection."""

    TAKE = enum.auto()
    """It replaces the broken connection."""
    BREAK_FIRST = enum.auto()
    """The present connection is to be read to its end first: the other end gave it up."""
    STALE = enum.auto()
    """A newer connection came before it."""


@dataclass(slots=True)
class ReconnectEpoch:
    """Numbers the connections of one channel, of which each replaces the one before it.

    Attributes:
        attempt: number of the present connection; the first has 0.
        since: when it broke, in seconds on the owner's clock; None while it is whole.
        reason: why it broke.
    """

    attempt: int = 0
    since: float | None = None
    reason: str = ""
    _newest: int = 0

    def broke(self, now: float, reason: str) -> None:
        """Notes that the present connection ended, and has been read to its end."""
        if self.since is None:
            self.since = now
            self.reason = reason

    def next_attempt(self) -> int:
        """Returns the number of a connection that this end is about to open."""
        self._newest += 1
        return self._newest

    def offered(self, attempt: int) -> Replacement:
        """Decides about a connection that the other end opened."""
        if attempt <= self._newest:
            return Replacement.STALE
        self._newest = attempt
        return Replacement.BREAK_FIRST if self.since is None else Replacement.TAKE

    def joined(self, attempt: int) -> None:
        """Notes that a new connection is in place."""
        self.attempt = attempt
        self.since = None
        self.reason = ""

    def reconnect_requested(self, attempt: int) -> bool:
        """Returns whether to break the present connection, as the other end asks for a new one.

        It is not if it is broken already, or is not the one that the other end lost.
        """
        return self.since is None and attempt == self.attempt

    def left(self, now: float, seconds: float) -> float:
        """Returns how much of ``seconds`` since the break is left; all while it is whole."""
        return seconds if self.since is None else max(0.0, self.since + seconds - now)
