"""Answers the calls that one TensorPipe transport took.

What to answer, and when, is for others to know; this is how.
"""

from __future__ import annotations

from collections.abc import Iterable

from rpc.transports.base import Frame, FrameKind
from rpc.transports.tensorpipe import wire as wire
from rpc.transports.tensorpipe.ledger import Again, AnswerFuture
from rpc.transports.tensorpipe.links import Link
from rpc.transports.tensorpipe.torch_agent import Leaving
from rpc.transports.tensorpipe.wire import Answer, Envelope, Sender


class Answers:
    """Gives answers.

    Args:
        sender: who gives them.
    """

    def __init__(self, sender: Sender) -> None:
        self._sender = sender
        self._leaving = Leaving()

    def make(
        self, kind: int, payload: str | bytes = b"", number: int = 0, attempt: int = 0
    ) -> Answer:
        """An answer without a frame.

        Args:
            kind: one of ``tensorpipe_wire``'s.
            payload: what it says.
            number: which of the other's calls it answers.
            attempt: which of the other's attempts at a pipe.
        """
        data = payload.encode() if isinstance(payload, str) else payload
        envelope = self._sender.envelope(kind, 0, number, attempt)
        return Answer(*wire.pack(envelope, Frame(FrameKind.NOTICE, 0, b"", data)))

    def give_reply(self, link: Link, request: Envelope, future: AnswerFuture, frame: Frame) -> None:
        """Answers a request of a peer's with a frame."""
        me, life = self._sender
        envelope = Envelope(FrameKind.REPLY, me, life, request.correlation, request.number)
        future.set_result(Answer(*wire.pack(envelope, frame, link.replies_lent_from)))

    def give_again(
        self,
        link: Link,
        request: Envelope,
        future: AnswerFuture,
        again: Again,
        reply: Frame | None,
    ) -> None:
        """Answers a request that was taken before, unless its handler is to answer it."""
        if reply is not None:
            self.give_reply(link, request, future, reply)
        elif again is Again.FORGOTTEN:
            future.set_result(self.make(wire.FORGOTTEN, b"", request.number))
        elif again is Again.STALE:
            future.set_result(self.make(wire.DONE))

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

    def turn_away(
        self,
        asked: Iterable[tuple[Envelope, AnswerFuture]],
        lifelines: Iterable[AnswerFuture],
        reason: str,
    ) -> None:
        """Refuses all that waits for an answer, and ends the lifelines, for one reason."""
        self.give_asked(asked, wire.REFUSED, reason)
        self.give(lifelines, wire.LIFELINE, reason)

    def give_visibly(self, future: AnswerFuture, kind: int, payload: bytes) -> None:
        """Answers, and lets :meth:`wait` see when the answer has left."""
        answer = self.make(kind, payload)
        answer.tensors.append(self._leaving.sign())
        future.set_result(answer)

    def wait(self, deadline: float) -> None:
        """Waits until what was given visibly has left, at most until then (monotonic clock)."""
        self._leaving.wait(deadline)
