"""Hands the frames and losses that a worker's transport delivers to the parts they concern.

Transports that look at the kind of a frame call the callee and the caller themselves. Here
are control messages and losses, and what a transport leaves to others to look at.
"""

from __future__ import annotations

import logging
from functools import partial

from rpc.calls.call_parts import CallParts
from rpc.calls.callee import Callee
from rpc.calls.caller import Caller
from rpc.calls.channels import Channels
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
        caller: takes replies.
        callee: takes requests.
        channels: take messages.
        losses: takes the news that a worker is lost or leaves.
    """

    def __init__(
        self,
        shared: CallParts,
        caller: Caller,
        callee: Callee,
        channels: Channels,
        losses: WorkerLoss,
    ) -> None:
        self._shared = shared
        self.early = shared.early
        self._channels = channels
        self._callee = callee
        self._losses = losses
        self._living = shared.group.living_now
        self.take_request = callee.take_request
        self.take_reply = caller.take_reply
        self.patience = caller.patience
        self.outstanding = caller.replies_to_come

    def deliver(self, sender: Life, frame: Frame, in_batch: bool = False) -> None:
        """Takes one frame from a peer; see ``transports.base.Receiver``.

        Args:
            sender: who sent it.
            frame: what came.
            in_batch: see there.
        """
        if frame.kind is FrameKind.REQUEST:
            self.take_request(sender, frame, in_batch)
        elif frame.kind is FrameKind.REPLY:
            self.take_reply(sender, frame, in_batch)
        else:
            self._notice(sender, frame, in_batch)

    def _notice(self, sender: Life, frame: Frame, in_batch: bool, was_kept: bool = False) -> None:
        early = self.early
        if (
            early.held is not None
            and not was_kept
            and early.keep(partial(self._notice, sender, frame, in_batch=True, was_kept=True))
        ):
            return
        if in_batch:
            with self._shared.completions.elsewhere():
                self._noticed(sender, frame, guests=0)
        else:
            self._noticed(sender, frame)

    def _noticed(self, sender: Life, frame: Frame, guests: int | None = None) -> None:
        """Takes a control message, or one of a channel, which has a header.

        Args:
            sender: who sent it.
            frame: what came.
            guests: how many handlers may run on threads like this one; the transport
                decides if None.
        """
        if self._living.get(sender.worker) != sender:
            self._losses.refused(sender)
            return
        try:
            if frame.header:
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
