"""Decides what the servers of a chain send each other, and when a record is safe.

Every input of a shard's clock is a record with a position. The head appends it and hands it to
the next server of the chain, which appends it and hands it on. So each server has a beginning of
what its predecessor has. A record is *durable* at a server when all behind it have it; the tail's
are at once. What the head answers to trainers and coordinators waits for that.

A new backup, the *heir*, gets a copy of the state, and every record since the copy was begun.
Once the copy is there it is *bound*: records are durable only if it has them, too. The view names
it only when it also has what was durable before that, so that it is still so if the others are lost
just then.

Records carry the version of the chain in which they were sent. A server refuses those of an
earlier version than it has heard of: a head that was replaced, but lives, gets nothing
acknowledged. What came too early in an earlier version is forgotten, as another may be sent in its
place. An acknowledgement counts only in the version in which its record was sent; whoever learns of
a later one sends again what is not acknowledged.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Generic, TypeVar

from tensorwire.parameter_server.decisions.views import Server

Record = TypeVar("Record")


@dataclass(frozen=True, slots=True)
class Forward(Generic[Record]):
    """Send a record to the next server of the chain."""

    to: Server
    version: int
    position: int
    record: Record


@dataclass(frozen=True, slots=True)
class Append(Generic[Record]):
    """Run a record on this server's clock."""

    position: int
    record: Record


@dataclass(frozen=True, slots=True)
class Durable:
    """All records before this position are safe."""

    position: int


@dataclass(frozen=True, slots=True)
class Fenced:
    """The sender knows only an earlier version of the chain."""

    version: int


Effect = Forward[Record] | Append[Record] | Durable | Fenced


class Replication(Generic[Record]):
    """The log of one shard at one server.

    Args:
        me: this server.
        position: where the log begins; what is before it came as a copy.
        version: of the chain whose tail made the copy.

    Attributes:
        position: behind the last record.
        durable: all before this position is safe.
        version: the latest version of the chain of which this server knows the members.
        heard_of: the latest one that it has heard of; what was sent in earlier ones is refused.
    """

    def __init__(self, me: Server, position: int = 0, version: int = -1) -> None:
        self.position = position
        self.durable = position
        self._me = me
        self.version = version
        self.heard_of = version
        self._next: Server | None = None
        self._heir: Server | None = None
        self._is_bound = False
        self._bound_at = 0
        self._heir_has = 0
        self._kept: deque[tuple[int, Record]] = deque()
        self._early: dict[int, Record] = {}

    @property
    def has_next(self) -> bool:
        """True unless this is the tail, by the view."""
        return self._next is not None and not self._is_bound

    @property
    def has_follower(self) -> bool:
        """True if records are sent to a backup, or to a server that becomes one."""
        return self._next is not None or self._heir is not None

    @property
    def heir_is_whole(self) -> bool:
        """True if the new backup has all that was safe here alone before it was bound."""
        return self._is_bound and self._heir_has >= self._bound_at

    def rechained(self, version: int, chain: tuple[Server, ...]) -> list[Effect[Record]]:
        """Takes another version of the chain: who follows this server may have changed."""
        if version <= self.version:
            return []
        self.version = version
        self.raise_fence(version)
        place = chain.index(self._me)
        successor = chain[place + 1] if place + 1 < len(chain) else None
        if successor is None and self._is_bound:
            successor = self._heir
        elif successor is not None:
            self._heir, self._is_bound = None, False
        self._next = successor
        if successor is None:
            return self._safe_until(self.position)
        return self._kept_again(successor)

    def append(self, record: Record) -> tuple[int, list[Effect[Record]]]:
        """Takes an input, at the head; returns its position and what to send."""
        at = self.position
        self.position += 1
        follower = self._next or self._heir
        effects: list[Effect[Record]] = []
        if follower is not None:
            self._kept.append((at, record))
            effects.append(Forward(follower, self.version, at, record))
        if self._next is None:
            effects += self._safe_until(self.position)
        return at, effects

    def receive(self, version: int, position: int, record: Record) -> list[Effect[Record]]:
        """Takes a record of the predecessor."""
        if version < self.heard_of:
            return [Fenced(self.heard_of)]
        if version > self.heard_of:
            self.raise_fence(version)
        if position >= self.position:
            self._early[position] = record
        effects: list[Effect[Record]] = []
        while self.position in self._early:
            ready = self._early.pop(self.position)
            at, sent = self.append(ready)
            effects += [Append(at, ready), *sent]
        return effects

    def raise_fence(self, version: int) -> bool:
        """Notes that there is a chain of that version; True if that is news.

        What was sent in earlier ones, and has not come in order, counts no more.
        """
        is_news = version > self.heard_of
        if is_news:
            self.heard_of = version
            self._early.clear()
        return is_news

    def acknowledged(self, by: Server, position: int, version: int) -> list[Effect[Record]]:
        """Notes that all before this position are safe at ``by``, as it says of that version."""
        if version < self.version:
            return []
        if by == self._heir:
            self._heir_has = max(self._heir_has, position)
            self._drop_kept(position)
        return self._safe_until(position) if by == self._next else []

    def _safe_until(self, position: int) -> list[Effect[Record]]:
        if self._heir is None or self._is_bound:
            self._drop_kept(position)
        if position <= self.durable:
            return []
        self.durable = position
        return [Durable(position)]

    def _kept_again(self, to: Server) -> list[Effect[Record]]:
        return [Forward(to, self.version, at, record) for at, record in self._kept]

    def _drop_kept(self, position: int) -> None:
        while self._kept and self._kept[0][0] < position:
            self._kept.popleft()

    def adopt(self, heir: Server) -> int:
        """Begins a copy for a new backup, to which what follows is sent; returns its position.

        Only the tail of a chain can do so.
        """
        self._heir, self._is_bound = heir, False
        self._heir_has = self.position
        self._kept.clear()
        return self.position

    def bind(self, heir: Server) -> list[Effect[Record]]:
        """Binds the new backup, which has its copy: it has what is durable from now on.

        What was durable before, it has once :attr:`heir_is_whole`. What it did not acknowledge
        is sent again: what came before the copy may have met a former one, which is no more.
        """
        if heir != self._heir:
            return []
        self._next, self._is_bound, self._bound_at = heir, True, self.position
        return self._kept_again(heir)

    def disown(self, heir: Server) -> list[Effect[Record]]:
        """Drops the new backup, which did not come to be."""
        if heir != self._heir:
            return []
        if self._is_bound:
            self._next = None
        self._heir, self._is_bound = None, False
        self._kept.clear()
        return self._safe_until(self.position)
