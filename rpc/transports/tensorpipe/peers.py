"""The peers of one TensorPipe transport, and whose calls it takes. Sans-IO.

Identity is ours, not torch's: a call says which worker made it, in which life. Calls of a
life that is not known yet wait for it; those of one that is over are refused. The owner
guards this with a lock.
"""

from __future__ import annotations

from rpc.transports.base import Frame
from rpc.transports.tensorpipe.links import PeerLink
from rpc.transports.tensorpipe.outstanding import AnswerFuture
from rpc.transports.tensorpipe.wire import Envelope

EARLY_LIMIT = 65_536

SHUT_DOWN = "it shut down"
REMOVED = "it no longer counts this worker as a member"
REPLACED = "a later life of it took its place"
OLD_LIFE = "it knows a later life of this worker"
OVERRUN = "it was sent too much before it knew this worker"

Early = tuple[Envelope, Frame, AnswerFuture | None]
"""A call whose sender is not known yet."""


class Peers:
    """The peers of one worker.

    Args:
        early_limit: how many calls of workers that are not known yet may wait.

    Attributes:
        open: whether anything is taken from anybody.
        links: those that are members, by id.
        removed: those that were members, by id.
        early: calls of those that may become members.
    """

    __slots__ = ("_early_limit", "early", "links", "open", "removed")

    def __init__(self, early_limit: int = EARLY_LIMIT) -> None:
        self._early_limit = early_limit
        self.open = True
        self.links: dict[int, PeerLink] = {}
        self.removed: dict[int, PeerLink] = {}
        self.early: list[Early] = []

    def add(self, link: PeerLink) -> list[Early]:
        """Makes a peer known, in place of an earlier life; returns the calls that wait for it."""
        worker_id = link.peer.info.id
        for former in (self.links.get(worker_id), self.removed.pop(worker_id, None)):
            if former is not None:
                former.shared.close()
        self.links[worker_id] = link
        waiting = [each for each in self.early if each[0].sender == worker_id]
        self.early = [each for each in self.early if each[0].sender != worker_id]
        return waiting

    def remove(self, worker_id: int) -> PeerLink | None:
        """Forgets a peer, but for the answers that are still to come."""
        link = self.links.pop(worker_id, None)
        if link is not None:
            self.removed[worker_id] = link
        return link

    def everyone(self) -> list[PeerLink]:
        """Returns the members and those that were."""
        return [*self.links.values(), *self.removed.values()]

    def sendable(self) -> list[PeerLink]:
        """Returns the members that can be sent to."""
        return [link for link in self.links.values() if link.lost is None]

    def of_sender(self, envelope: Envelope) -> PeerLink | None:
        """Returns the link to the very life that sent this, removed or not."""
        link = self.links.get(envelope.sender)
        if link is None or link.peer.incarnation != envelope.incarnation:
            link = self.removed.get(envelope.sender)
        if link is None or link.peer.incarnation != envelope.incarnation:
            return None
        return link

    def member(self, envelope: Envelope) -> PeerLink | None:
        """Returns the link to the life that sent this if it is a member, else None."""
        link = self.links.get(envelope.sender)
        if link is None or link.peer.incarnation != envelope.incarnation:
            return None
        return link

    def refusal(self, envelope: Envelope) -> str | None:
        """Returns why the calls of one that is no member are refused; None if they wait."""
        if not self.open:
            return SHUT_DOWN
        link = self.links.get(envelope.sender)
        if link is not None and link.peer.incarnation > envelope.incarnation:
            return OLD_LIFE
        removed = self.removed.get(envelope.sender)
        if removed is not None and removed.peer.incarnation >= envelope.incarnation:
            return REMOVED
        return OVERRUN if len(self.early) >= self._early_limit else None

    def clear(self) -> list[PeerLink]:
        """Forgets everyone, and takes nothing any more; returns all that were known."""
        self.open = False
        links = self.everyone()
        self.links.clear()
        self.removed.clear()
        self.early.clear()
        return links

    def is_flushed(self) -> bool:
        """Returns whether nothing waits to be sent."""
        return not any(link.outbox for link in self.sendable())
