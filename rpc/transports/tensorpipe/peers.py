"""Whom one TensorPipe transport knows, and whose calls it takes. Sans-IO.

Identity is ours, not torch's: a call says who made it and in which life. Calls of
a life that is not known yet wait for it; those of one that is over are refused.
The owner guards it with a lock.
"""

from __future__ import annotations

from rpc.transports.base import Frame
from rpc.transports.tensorpipe.ledger import AnswerFuture, Taken
from rpc.transports.tensorpipe.links import Link
from rpc.transports.tensorpipe.wire import Envelope

EARLY_LIMIT = 65_536

SHUT_DOWN = "it shut down"
REMOVED = "it no longer counts this worker as a member"
REPLACED = "a later life of it took its place"
OLD_LIFE = "it knows a later life of this worker"
OVERRUN = "it was sent too much before it knew this worker"
SOMEBODY_ELSE = "somebody else listens at its address by now"
GIVEN_UP = "it gave this worker up"

Early = tuple[Envelope, Frame, AnswerFuture | None]
"""A call whose sender is not known yet."""


class Roster:
    """The peers of one worker.

    Args:
        life: what peers name to show that they mean this very transport.

    Attributes:
        open: whether anything is taken from anybody.
        links: those that are members, by id.
        removed: those that were, by id.
        early: calls of those that may become members.
    """

    __slots__ = ("_life", "early", "links", "open", "removed")

    def __init__(self, life: str) -> None:
        self._life = life
        self.open = True
        self.links: dict[int, Link] = {}
        self.removed: dict[int, Link] = {}
        self.early: list[Early] = []

    def add(self, link: Link) -> list[Early]:
        """Makes a peer known, in place of an earlier life; returns the calls that wait for it."""
        worker_id = link.peer.info.id
        for former in (self.links.get(worker_id), self.removed.pop(worker_id, None)):
            if former is not None:
                former.shared.close()
        self.links[worker_id] = link
        waiting = [each for each in self.early if each[0].sender == worker_id]
        self.early = [each for each in self.early if each[0].sender != worker_id]
        return waiting

    def remove(self, worker_id: int) -> Link | None:
        """Forgets a peer, but for the answers that are still to come."""
        link = self.links.pop(worker_id, None)
        if link is not None:
            self.removed[worker_id] = link
        return link

    def everyone(self) -> list[Link]:
        """Members and those that were."""
        return [*self.links.values(), *self.removed.values()]

    def sendable(self) -> list[Link]:
        """The members that can be sent to."""
        return [link for link in self.links.values() if link.lost is None]

    def of_sender(self, envelope: Envelope) -> Link | None:
        """The link to the very life that sent this, removed or not."""
        link = self.links.get(envelope.sender)
        if link is None or link.peer.incarnation != envelope.incarnation:
            link = self.removed.get(envelope.sender)
        if link is None or link.peer.incarnation != envelope.incarnation:
            return None
        return link

    def member(self, envelope: Envelope) -> Link | None:
        """The link to a sender whose calls are taken; None if it is refused, or not known yet."""
        link = self.links.get(envelope.sender)
        if link is None or link.peer.incarnation != envelope.incarnation:
            return None
        return link

    def refusal(self, envelope: Envelope) -> str | None:
        """Why nothing is taken from one that is no member, or at all; None if it may be later."""
        if not self.open:
            return SHUT_DOWN
        link = self.links.get(envelope.sender)
        if link is not None and link.peer.incarnation > envelope.incarnation:
            return OLD_LIFE
        removed = self.removed.get(envelope.sender)
        if removed is not None and removed.peer.incarnation >= envelope.incarnation:
            return REMOVED
        return OVERRUN if len(self.early) >= EARLY_LIMIT else None

    def resume(self, envelope: Envelope, life: str) -> Taken | str:
        """A sender's pipe broke, and it asks to go on; says what was taken, or why not.

        Of one that is not known yet, nothing was taken: its calls wait, and it makes them again.
        """
        link = self.member(envelope)
        if life != self._life:
            return SOMEBODY_ELSE
        if link is None or not self.open:
            return self.refusal(envelope) or Taken()
        return GIVEN_UP if link.broken or not link.seconds else link.served.taken

    def clear(self) -> list[Link]:
        """Takes nothing any more and forgets everyone; returns who was known."""
        self.open = False
        links = self.everyone()
        self.links.clear()
        self.removed.clear()
        self.early.clear()
        return links

    def is_flushed(self) -> bool:
        """Whether nothing waits to be sent."""
        return not any(link.outbox or link.route is None for link in self.sendable())
