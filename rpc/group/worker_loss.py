"""Removes a lost worker from this worker's tables, or ends this worker if it is the lost one.

Whatever reported the loss, the same is done once: the transport refuses what the life still
sends, calls to it fail, references and contexts that it held are let go. ``loss_reports``
decides which workers are told; ``shutdown`` treats workers that leave together.
"""

from __future__ import annotations

import logging
from typing import Protocol

from rpc.errors import ANOTHER_ANSWERS, NO_MEMBER, WorkerLeftError, WorkerLostError
from rpc.group.events import MembershipChange, MembershipEvent, MembershipEvents
from rpc.group.loss_reports import LossReports
from rpc.group.member_list import Departure, End
from rpc.group.members import Group
from rpc.ids import Life
from rpc.protocol.liveness import Evidence
from rpc.transports.base import Transport
from rpc.worker_info import WorkerInfo

_logger = logging.getLogger("rpc")


class LosingWorker(Protocol):
    """The worker that removes lost ones, as far as their removal uses it."""

    is_expelled: bool
    """True if the others declared it lost."""
    transport: Transport
    """Refuses what a removed worker still sends."""

    @property
    def info(self) -> WorkerInfo:
        """Its name and id."""

    @property
    def life(self) -> Life:
        """Its id and incarnation."""

    @property
    def group(self) -> Group:
        """The workers that it knows."""

    @property
    def events(self) -> MembershipEvents:
        """Tells user code."""

    @property
    def loss_reports(self) -> LossReports:
        """Tells the other workers."""

    def why_expelled(self) -> str | None:
        """The reason why the others declared it lost; None if they did not, as far as it knows."""

    def expects_departures(self) -> bool:
        """True when workers that go are nothing to warn of."""

    def end_all_of(self, life: Life, error: WorkerLostError) -> None:
        """Ends what involved a lost worker: calls, references, gatherings, contexts."""

    def end_references(self, reason: str) -> None:
        """Ends all references to and of others, those included that it has never met."""


class WorkerLoss:
    """Removes lost workers from this worker's tables."""

    def __init__(self, agent: LosingWorker) -> None:
        self._agent = agent

    def reported(self, life: Life, reason: str) -> None:
        """Takes the transport's word that a worker cannot be reached any more."""
        agent = self._agent
        verdict = agent.why_expelled()
        if verdict is not None:
            self.expelled(verdict)
        is_refused = NO_MEMBER in reason.partition(ANOTHER_ANSWERS)[0]
        self.declare(life, reason, Evidence.REFUSED if is_refused else Evidence.CLOSED)

    def told(self, life: Life, reason: str) -> None:
        """Takes another worker's word that a life is over."""
        if life == self._agent.life:
            self.expelled(reason)
        else:
            self.declare(life, reason, Evidence.TOLD)

    def departed(self, life: Life, departure: Departure | None) -> None:
        """Removes a worker that is no member of a dynamic group any more.

        Args:
            life: which.
            departure: how its membership ended; None if another took its place.
        """
        if life == self._agent.life:
            told = departure.told() if departure else "the group does not list it any more"
            self.expelled(self._agent.why_expelled() or f"somebody declared it lost: {told}")
        elif departure is None:
            self.lost(life, "the group does not list it any more")
        elif departure.end is End.LEFT:
            self.left(life)
        else:
            self.lost(life, departure.told())

    def declare(self, life: Life, reason: str, evidence: Evidence) -> None:
        """Ends here what involved a life of a worker that is over, and tells the others.

        Whatever it still sends is refused; should it live, it learns why.
        """
        if self.lost(life, reason):
            self._agent.loss_reports.lost(life, reason, evidence)

    def lost(self, life: Life, reason: str) -> bool:
        """Ends here what involved a life that was lost; False if that is known."""
        return self._lose(life, reason, MembershipChange.LOST)

    def left(self, life: Life) -> None:
        """Ends here what involved a worker that left the group of its own accord."""
        self._lose(life, "it left the group", MembershipChange.LEFT, WorkerLeftError)

    def refused(self, life: Life) -> None:
        """Notes a message that was not taken, as the life that sent it is over, or never joined."""
        known = self._agent.group.latest(life.worker)
        if known is None or known.incarnation < life.incarnation:
            _logger.error("dropped a message from %s: it is not in the group", life)
        else:
            _logger.debug("dropped a message from %s: that life is over", life)

    def expelled(self, reason: str) -> None:
        """Fails this worker's calls, now and from now on, as the others declared it lost."""
        agent = self._agent
        if agent.is_expelled:
            return
        error, others = agent.group.expel(agent.info.id, reason)
        agent.is_expelled = True
        _logger.error("%s; call rpc.shutdown(), then it may join again", error)
        for life in others:
            agent.transport.remove_peer(life.worker)  # first: no call is sent that none would end
            agent.end_all_of(life, error)
        agent.end_references(error.reason)
        change, incarnation = MembershipChange.LOST, agent.life.incarnation
        agent.events.announce(MembershipEvent(change, agent.info, incarnation, error.reason))

    def _lose(
        self,
        life: Life,
        reason: str,
        change: MembershipChange,
        kind: type[WorkerLostError] = WorkerLostError,
    ) -> bool:
        agent = self._agent
        error = agent.group.lose(life, reason, kind)
        if error is None:
            return False
        news = not agent.expects_departures()
        if change is MembershipChange.LOST and news:
            _logger.warning("%s", error)
        agent.transport.remove_peer(life.worker)
        agent.end_all_of(life, error)
        if news:
            info = agent.group.peer(life.worker).info
            agent.events.announce(MembershipEvent(change, info, life.incarnation, reason))
        return True
