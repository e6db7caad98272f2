"""Takes what a worker's transport delivers, each frame and each loss, to whom it concerns.

What a request, a reply or a message means is decided where it is taken to.
"""

from __future__ import annotations

import logging
from functools import partial

from rpc.calls.callee import Callee
from rpc.calls.caller import Caller
from rpc.calls.channels import Channels
from rpc.calls.early_frames import EarlyFrames
from rpc.calls.shared import Shared
from rpc.errors import FrameError, UnknownWorkerError
from rpc.group.worker_loss import WorkerLoss
from rpc.ids import Life
from rpc.transports.base import Frame, FrameKind
from rpc.wire.control import Cancel, Leaving, Lost

_logger = logging.getLogger("rpc")


class Inbound:
    """The ``transports.base.Receiver`` of one worker.

    Args:
        shared: with the other parts of the worker's calls.
        early: keeps what comes while the group is being made known.
        caller: takes replies.
        callee: takes requests.
        channels: take messages.
        losses: takes the news that a worker is lost or leaves.
    """

    def __init__(
        self,
        shared: Shared,
        early: EarlyFrames,
        caller: Caller,
        callee: Callee,
        channels: Channels,
        losses: WorkerLoss,
    ) -> None:
        self._shared = shared
        self.early = early
        self._channels = channels
        self._callee = callee
        self._losses = losses
        self._living = shared.group.living_now
        # What every call passes is taken directly to whom it concerns.
        self.request = callee.request
        self.reply = caller.reply
        self.patience = caller.patience
        self.outstanding = caller.replies_to_come

    def deliver(
        self, sender: Life, frame: Frame, in_batch: bool = False, guests: int | None = None
    ) -> None:
        """Takes one frame from a peer; see ``transports.base.Receiver``.

        Args:
            sender: who sent it.
            frame: what came.
            in_batch: see there.
            guests: how many handlers may run on threads like this one; the transport decides,
                and the frame may be held back, if None.
        """
        early = self.early
        if guests is None:
            must_wait = early.held is not None
            if must_wait and early.keep(partial(self.deliver, sender, frame, guests=0)):
                return
            if in_batch:
                with self._shared.completions.elsewhere():
                    self.deliver(sender, frame, guests=0)
                return
        if self._living.get(sender[0]) != sender:
            self._losses.refused(sender)
            return
        try:
            kind = frame[0]
            if kind is FrameKind.REQUEST:
                self._callee.start(sender, frame, guests)
            elif kind is FrameKind.REPLY:
                self.reply(sender, frame)
            elif frame.header:
                self._channels.arrived(sender, frame, guests)
            else:
                self._control_arrived(sender, frame)
        except (FrameError, UnknownWorkerError) as error:
            _logger.error("dropped a message from %s: %s", sender, error)

    def peer_lost(self, life: Life, reason: str) -> None:
        """Takes the transport's word that a worker cannot be reached any more."""
        if not self.early.keep(partial(self._losses.reported, life, reason)):
            self._losses.reported(life, reason)

    def _control_arrived(self, sender: Life, frame: Frame) -> None:
        shared, losses = self._shared, self._losses
        messages = shared.control.arrived(sender, frame)
        for message in messages:
            if isinstance(message, Leaving) and not message.phase:
                losses.left(sender)
            elif isinstance(message, Cancel):
                self._callee.cancel(sender, message.correlations)
            elif isinstance(message, Lost):
                losses.told(Life(message.worker, message.incarnation), message.reason)
            elif not shared.shutdown.control_arrived(sender.worker, message):
                shared.references.control_arrived(sender, message)
        shared.control.acted_upon(sender, messages)
        shared.shutdown.activity_changed()
