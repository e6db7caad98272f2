"""The memory, threads, bounds and receiver that all peers of one worker share.

Knows which threads may wait, as others depend on the reading of some. Owns nothing: the
transport makes the parts and ends them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rpc.ids import Life
from rpc.options import WhenFull
from rpc.transports.base import Receiver
from rpc.transports.late_receipts import LateReceipts
from rpc.transports.tensorwire.bulk import BulkMover
from rpc.transports.tensorwire.link import Resources
from rpc.transports.tensorwire.replies import ReplySide
from rpc.transports.tensorwire.requests import RequestSide


@dataclass(frozen=True, slots=True)
class PeerParts:
    """The parts that all peers of one worker share.

    Args:
        resources: memory.
        replies: reads the links this worker opens.
        requests: reads the links opened to it.
        bulk: reads bulk channels.
        receipts: acknowledges what arrives slowly.
        resume_seconds: how long a connection may be broken.
        max_bytes_in_flight: see ``Settings``, like ``when_full`` and
            ``stuck_seconds``.
        receiver: takes what arrives.
        lost: told once when a peer is lost.
    """

    resources: Resources
    replies: ReplySide
    requests: RequestSide
    bulk: BulkMover
    receipts: LateReceipts
    resume_seconds: float
    max_bytes_in_flight: int
    when_full: WhenFull
    stuck_seconds: float
    receiver: Receiver
    lost: Callable[[Life, str], None]

    def may_wait(self) -> bool:
        """Prepares the running thread for a wait; False if others depend on its reading."""
        if self.replies.is_reading_here() or self.bulk.is_moving_here():
            return False
        self.requests.about_to_block()
        self.replies.flush_held()
        self.replies.attend()
        return True
