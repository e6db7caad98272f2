"""Answers the calls that one TensorPipe transport took."""

from __future__ import annotations

from collections.abc import Iterable

from rpc.ids import new_tuple
from rpc.transports.base import Frame, FrameKind
from rpc.transports.tensorpipe import wire
from rpc.transports.tensorpipe.links import PeerLink
from rpc.transports.tensorpipe.outstanding import AnswerFuture
from rpc.transports.tensorpipe.torch_agent import UnsentAnswers
from rpc.transports.tensorpipe.wire import Envelope, SenderId, TorchAnswer


class Answers:
    """Gives answers.

    Args:
        sender: this worker, which gives them.
    """

    def __init__(self, sender: SenderId) -> None:
        self._sender = sender
        self._unsent = UnsentAnswers()

    def make(self, kind: int, payload: str | bytes = b"", number: int = 0) -> TorchAnswer:
        """Returns an answer without a frame.

        Args:
            kind: one of those in ``wire``.
            payload: what it says.
            number: the number of the call that it answers; 0 if it has none.
        """
        data = payload.encode() if isinstance(payload, str) else payload
        envelope = self._sender.envelope(kind, 0, number)
        return TorchAnswer(*wire.pack(envelope, Frame(FrameKind.NOTICE, 0, b"", data)))

    def give_reply(
        self, link: PeerLink, request: Envelope, future: AnswerFuture, frame: Frame
    ) -> None:
        """Answers a request of a peer's with a frame."""
        parts = FrameKind.REPLY, *self._sender, request.correlation, request.number
        envelope: Envelope = new_tuple(Envelope, parts)
        future.set_result(TorchAnswer(*wire.pack(envelope, frame, link.replies_lent_from)))

    def give(self, futures: Iterable[AnswerFuture], kind: int, reason: str = "") -> None:
        """Answers calls that have no number."""
        for future in futures:
            future.set_result(self.make(kind, reason))

    def give_asked(
        self, asked: Iterable[tuple[Envelope, AnswerFuture]], kind: int, reason: str = ""
    ) -> None:
        """Answers requests without a frame."""
        for envelope, future in asked:
            future.set_result(self.make(kind, reason, envelope.number))

    def refuse(
        self,
        asked: Iterable[tuple[Envelope, AnswerFuture]],
        lifelines: Iterable[AnswerFuture],
        reason: str,
    ) -> None:
        """Refuses requests that wait for an answer, and ends lifelines, for one reason."""
        self.give_asked(asked, wire.REFUSED, reason)
        self.give(lifelines, wire.LIFELINE, reason)

    def give_visibly(self, future: AnswerFuture, kind: int, payload: bytes) -> None:
        """Answers, and lets :meth:`wait` see when the answer has left."""
        answer = self.make(kind, payload)
        answer.tensors.append(self._unsent.sign())
        future.set_result(answer)

    def wait(self, deadline: float) -> None:
        """Waits until what was given visibly has left, at most until then (monotonic clock)."""
        self._unsent.wait(deadline)
