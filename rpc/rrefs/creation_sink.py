"""Takes the outcome of the request behind ``remote()``, for the reference that it made."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rpc.outcomes.sinks import Unpack, harmless
from rpc.rrefs.transfer import Holding
from rpc.transports.base import Frame
from rpc.wire import codec
from rpc.wire.messages import Reply, Status

if TYPE_CHECKING:
    from rpc.rrefs.creations import Creations


class CreationSink:
    """A sink; see ``sinks.Sink``.

    Args:
        creations: is told how it ended.
        holding: of the reference; gets the value if the reply brings it.
    """

    __slots__ = ("_creations", "_holding")

    def __init__(self, creations: Creations, holding: Holding) -> None:
        self._creations = creations
        self._holding = holding

    def replied(self, reply: Reply, frame: Frame, unpack: Unpack) -> None:
        """Notes that the value was made, and takes it if the reply brings it."""
        try:
            if reply.status is not Status.OK or reply.extensions:
                unpack(reply, frame, _decode_nothing)
            if frame.payload:
                self._holding.constant = (codec.decode(frame.payload, (), ()),)
        except BaseException as error:
            self.failed(harmless(error))
        else:
            self._creations.replied(self._holding)

    def failed(self, error: Exception) -> None:
        """Notes that the value was not made, or that nobody knows."""
        self._creations.gone(self._holding, error)


def _decode_nothing(*_: object) -> None:
    """A creation that succeeded brings no value back."""
