"""What it means here that a worker's life is over: another's, which is forgotten, or our own.

However that was learnt, the same is done once: the transport refuses what the life still
sends, calls to it fail, references and contexts that it held are let go. Who it is told to,
``accusations`` decides; a worker that leaves together with others is ``departure``'s.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from rpc.errors import WorkerLostError
from rpc.group.events import MembershipChange, MembershipEvent
from rpc.ids import Life
from rpc.protocol.liveness import Evidence

if TYPE_CHECKING:
    from rpc.agent import Agent

_logger = logging.getLogger("rpc")


class Losses:
    """Carries out that lives are over."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent

    def reported(self, life: Life, reason: str) -> None:
        """The transport cannot reach a worker any more."""
        agent = self._agent
        verdict = None if agent.watch is None else agent.watch.verdict()
        if verdict is not None:
            self.expelled(verdict)
        self.declare(life, reason, Evidence.CLOSED)

    def told(self, life: Life, reason: str) -> None:
        """Another worker says that a life is over."""
        if life == self._agent.life:
            self.expelled(reason)
        else:
            self.declare(life, reason, Evidence.TOLD)

    def struck_off(self, life: Life, left: bool) -> None:
        """The group's store does not list a life any more.

        Args:
            life: which.
            left: it left of its own accord, rather than that somebody declared it lost.
        """
        watch = self._agent.watch
        if life == self._agent.life:
            told = None if watch is None else watch.verdict()
            self.expelled(told or "somebody declared it lost: the group does not list it any more")
        elif left:
            self.left(life)
        else:
            self.lost(life, "the group does not list it any more")

    def declare(self, life: Life, reason: str, evidence: Evidence) -> None:
        """A life of a worker is over: ends what involved it here, and tells the others.

        Whatever it still sends is refused; should it live, it learns why.
        """
        if self.lost(life, reason):
            self._agent.accusations.lost(life, reason, evidence)

    def lost(self, life: Life, reason: str) -> bool:
        """Ends here what involved a life that was lost; False if that is known."""
        return self._lose(life, reason, MembershipChange.LOST)

    def left(self, life: Life) -> None:
        """Ends here what involved a worker that left the group of its own accord."""
        self._lose(life, "it left the group", MembershipChange.LEFT)

    def refused(self, life: Life) -> None:
        """A message was not taken, as the life that sent it is over, or never joined."""
        known = self._agent.group.latest(life.worker)
        if known is None or known.incarnation < life.incarnation:
            _logger.error("dropped a message from %s: it is not in the group", life)
        else:
            _logger.debug("dropped a message from %s: that life is over", life)

    def expelled(self, reason: str) -> None:
        """The others declared this worker lost: its calls fail, now and from now on."""
        agent = self._agent
        if agent.is_expelled:
            return
        agent.is_expelled = True
        error, others = agent.group.expel(agent.info.id, reason)
        _logger.error("%s; call rpc.shutdown(), then it may join again", error)
        for life in others:
            self._end(life, error)
            agent.transport.remove_peer(life.worker)
        change, incarnation = MembershipChange.LOST, agent.life.incarnation
        agent.events.announce(MembershipEvent(change, agent.info, incarnation, error.reason))

    def _lose(self, life: Life, reason: str, change: MembershipChange) -> bool:
        agent = self._agent
        error = agent.group.lose(life, reason)
        if error is None:
            return False
        news = not agent.departure.expects_departures()
        if change is MembershipChange.LOST and news:
            _logger.warning("%s", error)
        agent.transport.remove_peer(life.worker)
        self._end(life, error)
        if news:
            info = agent.group.peer(life.worker).info
            agent.events.announce(MembershipEvent(change, info, life.incarnation, reason))
        return True

    def _end(self, life: Life, error: WorkerLostError) -> None:
        agent = self._agent
        agent.notices.forget(life.worker)
        agent.caller.worker_lost(life.worker, error)
        agent.callee.worker_lost(life.worker)
        agent.references.worker_lost(life, error.reason)
        agent.gatherings.worker_lost(life, error)
        for extension in agent.extensions.all():
            try:
                extension.on_worker_lost(life.worker, error.reason)
            except Exception:  # the others, and a shutdown, have to hear of it all the same
                _logger.exception("the extension %r could not be told of a loss", extension.name)
        agent.departure.worker_lost(life.worker)
