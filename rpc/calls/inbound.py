"""What a worker's transport tells it: takes each frame, and each loss, to whom it concerns.

What a request, a reply or a control message means is decided where it is taken to; what
has to wait, by ``early_frames``.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from rpc.calls.early_frames import EarlyFrames
from rpc.errors import FrameError, UnknownWorkerError
from rpc.ids import Life
from rpc.transports.base import Frame, FrameKind, Patience
from rpc.wire.control import Cancel, Leaving, Lost

if TYPE_CHECKING:
    from rpc.agent import Agent

_logger = logging.getLogger("rpc")


class Inbound:
    """The ``transports.base.Receiver`` of one agent.

    Attributes:
        early: what has to wait while the group, or a newcomer, is being made known.
    """

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self.early = EarlyFrames(self._take_early, agent.worker_loss.reported)

    def deliver(self, sender: Life, frame: Frame, in_batch: bool = False) -> None:
        """Takes one frame from a peer; see ``transports.base.Receiver``."""
        early = self.early
        if early.held is not None and early.keep(sender, frame):
            return
        if in_batch:
            with self._agent.completions.elsewhere():
                self._take(sender, frame, 0)
        else:
            self._take(sender, frame)

    def peer_lost(self, life: Life, reason: str) -> None:
        """Takes the transport's word that a worker cannot be reached any more."""
        if not self.early.keep_loss(life, reason):
            self._agent.worker_loss.reported(life, reason)

    def patience(self, correlation: int) -> Patience:
        """Whether a request that finds no room may wait; see ``transports.base.Receiver``."""
        return self._agent.caller.patience(correlation)

    def _take_early(self, sender: Life, frame: Frame) -> None:
        """Runs no handler here: it might wait for what is delivered next."""
        self._take(sender, frame, 0)

    def _take(self, sender: Life, frame: Frame, guests: int | None = None) -> None:
        agent = self._agent
        if not agent.group.has(sender):
            agent.worker_loss.refused(sender)
            return
        try:
            if frame.kind is FrameKind.REQUEST:
                agent.callee.request_arrived(sender, frame, guests)
            elif frame.kind is FrameKind.REPLY:
                agent.caller.reply_arrived(sender.worker, frame)
            elif frame.header:
                agent.channels.arrived(sender, frame, guests)
            else:
                self._control_arrived(sender, frame)
        except (FrameError, UnknownWorkerError) as error:
            _logger.error("dropped a message from %s: %s", sender, error)

    def _control_arrived(self, sender: Life, frame: Frame) -> None:
        agent = self._agent
        messages = agent.control.arrived(sender, frame)
        for message in messages:
            if isinstance(message, Leaving) and not message.phase:
                agent.worker_loss.left(sender)
            elif isinstance(message, Cancel):
                agent.callee.cancel(sender, message.correlations)
            elif isinstance(message, Lost):
                agent.worker_loss.told(Life(message.worker, message.incarnation), message.reason)
            elif not agent.group_shutdown.control_arrived(sender.worker, message):
                agent.references.control_arrived(sender, message)
        agent.control.acted_upon(sender, messages)
        agent.activity_changed()
