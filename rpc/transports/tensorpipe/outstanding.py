"""Counts the calls between two workers, in both directions. Sans-IO.

A worker numbers its calls to a peer from 1, and takes each answer once
(:class:`SentCalls`). The peer knows which numbers it took, holds each request until its
handler replies, and counts what it has acted on (:class:`TakenCalls`), so that a worker that
leaves can say how many calls are to be awaited.

torch may answer a call with an error of its own, and then only the peer knows whether it took
the call. So the caller sends another one, VOID, under the same number: the peer ignores it if
the number was taken.

Large replies that travel through torch are bounded by a window at their sender. The caller
names those it received in a call of its own kind, a receipt: after many of them, after many
bytes, or soon.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

import torch

from rpc.transports.base import Frame, FrameKind
from rpc.transports.tensorpipe.wire import VOID, Envelope, Payload, TorchAnswer

AnswerFuture = torch.futures.Future[TorchAnswer]

RECEIPT_AFTER = 1024
RECEIPT_AFTER_BYTES = 8 << 20
MOST_IN_BATCH = 16_384

Call = tuple[int, int]
"""A call under way: its kind and its correlation."""


def size(frame: Frame) -> int:
    """Returns about how much memory a frame takes, in bytes."""
    nbytes = len(frame.header) + len(frame.payload)  # small tensors are in the header
    if frame.tensors:
        nbytes += sum(tensor.nbytes for tensor in frame.tensors)
    return nbytes


def is_large(frame: Frame) -> bool:
    """Returns whether a frame never travels in a batch, and a receipt names it if it is a reply."""
    return bool(frame.tensors) or len(frame.header) + len(frame.payload) > MOST_IN_BATCH


class SentCalls:
    """One worker's calls to another.

    Args:
        receipt_after: the bytes of large replies after which a receipt is due at once.

    Attributes:
        sent: how many calls there were.
        under_way: how many were not answered, or whose answer is still being acted on.
    """

    __slots__ = (
        "_receipt_after",
        "_received",
        "_received_bytes",
        "_unanswered",
        "sent",
        "under_way",
    )

    def __init__(self, receipt_after: int = RECEIPT_AFTER_BYTES) -> None:
        self._receipt_after = receipt_after
        self.sent = 0
        self.under_way = 0
        self._unanswered: dict[int, Call] = {}
        self._received: list[int] = []
        self._received_bytes = 0

    def begin(self, kind: int, correlation: int = 0) -> int:
        """Counts a call that begins; returns its number."""
        self.sent = number = self.sent + 1
        self.under_way += 1
        self._unanswered[number] = kind, correlation
        return number

    def void(self, number: int) -> bool:
        """Notes that a call could not be made; returns whether VOID is to be sent instead."""
        if number not in self._unanswered:
            return False
        self._unanswered[number] = VOID, 0
        return True

    def failed(self, number: int) -> bool:
        """Notes that torch answered a request with an error; returns whether VOID is to be sent.

        The peer may have made a reply that could not be sent. The next receipt names it.
        """
        kind, correlation = self._unanswered.get(number, (VOID, 0))
        if kind != FrameKind.REQUEST:
            return False
        self._received.append(correlation)
        return self.void(number)

    def came_back(self, number: int) -> Call | None:
        """Takes the answer to a call; returns the call, None if it was answered before.

        The call stays under way until its owner has acted on the answer.
        """
        return self._unanswered.pop(number, None)

    def received(self, correlation: int, nbytes: int) -> bool:
        """Notes that a large reply arrived; returns whether a receipt is due at once."""
        self._received.append(correlation)
        self._received_bytes += nbytes
        return len(self._received) >= RECEIPT_AFTER or self._received_bytes >= self._receipt_after

    def take_received(self) -> list[int]:
        """Removes and returns the requests whose large replies no receipt has named yet."""
        received, self._received, self._received_bytes = self._received, [], 0
        return received

    def forget(self) -> None:
        """Forgets all calls under way, as nothing will come back any more."""
        self.under_way = 0
        self._unanswered.clear()
        self._received.clear()


class TakenCalls:
    """Another worker's calls to this one.

    Attributes:
        delivered: how many calls were acted on.
        asked: the peer's requests that wait for our reply, by correlation.
    """

    __slots__ = ("_ahead", "_next", "asked", "delivered")

    def __init__(self) -> None:
        self.delivered = 0
        self.asked: dict[int, tuple[Envelope, AnswerFuture]] = {}
        self._next = 1
        self._ahead: set[int] = set()

    def take(self, envelope: Envelope, future: AnswerFuture | None) -> bool:
        """Takes a call, and holds it until it is answered; False if its number was taken before."""
        if envelope.number == self._next and not self._ahead:  # as nearly always
            self._next += 1
        elif not self._take_number(envelope.number):
            return False
        if future is not None:
            self.asked[envelope.correlation] = envelope, future
        return True

    def _take_number(self, number: int) -> bool:
        if number == self._next:
            self._next += 1
            while self._next in self._ahead:
                self._ahead.remove(self._next)
                self._next += 1
            return True
        if number < self._next or number in self._ahead:
            return False
        self._ahead.add(number)
        return True

    def take_asked(self) -> list[tuple[Envelope, AnswerFuture]]:
        """Removes and returns all requests that wait for our reply."""
        asked = list(self.asked.values())
        self.asked.clear()
        return asked


def encode_receipt(correlations: Iterable[int]) -> bytes:
    """Returns the payload of a receipt for the replies to these requests."""
    numbers = list(correlations)
    return struct.pack(f"<{len(numbers)}Q", *numbers)


def decode_receipt(data: Payload) -> list[int]:
    """The inverse of ``encode_receipt``."""
    return list(struct.unpack(f"<{len(data) // 8}Q", data))
