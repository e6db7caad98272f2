"""Sends and receives control messages: queued per peer, many to a frame.

Owns the queues, the sequence numbers that recognise a batch which came twice,
and the counters by which a graceful shutdown knows that nothing is under way.
"""

from __future__ import annotations

import threading
from collections import defaultdict

from rpc.errors import RpcError
from rpc.group.members import Group
from rpc.ids import Life
from rpc.transports.base import Frame, FrameKind, Transport
from rpc.wire.control import (
    Cancel,
    ControlMessage,
    DuplicateFilter,
    Leaving,
    Lost,
    Probe,
    Quiet,
    Ready,
    decode_batch,
    encode_batch,
)

UNCOUNTED = (Ready, Probe, Quiet, Leaving, Lost, Cancel)


class ControlChannel:
    """The control traffic of one worker.

    Args:
        group: the workers that are there.
        transport: carries frames; another one takes its place in a forked child.
        duplicates: makes what recognises batches that came before.

    Attributes:
        seen: the batches that came, by sender.
    """

    def __init__(
        self,
        group: Group,
        transport: Transport,
        duplicates: type[DuplicateFilter] = DuplicateFilter,
    ) -> None:
        self._group = group
        self.transport = transport
        self._lock = threading.Lock()
        self._queued: dict[Life, list[ControlMessage]] = {}
        self._early: dict[Life, list[ControlMessage]] = {}  # to lives not known here yet
        self._joined: dict[int, int] = {}  # worker: its latest incarnation that is known
        self._sequences: defaultdict[int, int] = defaultdict(int)
        self.seen: defaultdict[Life, DuplicateFilter] = defaultdict(duplicates)
        self._sent: defaultdict[int, int] = defaultdict(int)
        self._received: defaultdict[int, int] = defaultdict(int)

    def queue(self, to: Life, message: ControlMessage) -> None:
        """Queues a message; :meth:`flush` sends it."""
        with self._lock:
            self._queued.setdefault(to, []).append(message)
            self._sent[to.worker] += 1

    def flush(self) -> None:
        """Sends what is queued; what is meant for a worker that is gone is dropped.

        What is meant for one that this worker is still to hear of waits until then.
        """
        while True:
            with self._lock:
                if not self._queued:
                    return
                to, messages = self._queued.popitem()
                if self._joined.get(to.worker, -1) < to.incarnation:
                    self._early.setdefault(to, []).extend(messages)
                    self._sent[to.worker] -= len(messages)
                    continue
                sequence = self._sequences[to.worker]
                self._sequences[to.worker] += 1
            if not self._send(to, sequence, messages):
                with self._lock:
                    self._sent[to.worker] -= len(messages)

    def joined(self, life: Life) -> None:
        """Allows messages to a life of a worker from now on."""
        with self._lock:
            self._joined[life.worker] = life.incarnation
            for to in [to for to in self._early if to.worker == life.worker]:
                if to.incarnation <= life.incarnation:
                    messages = self._early.pop(to)
                    if to == life:
                        self._queued.setdefault(to, []).extend(messages)
                        self._sent[to.worker] += len(messages)
        self.flush()

    def tell(self, to: Life, message: ControlMessage) -> None:
        """Sends a message about the group itself at once; such are not counted."""
        with self._lock:
            sequence = self._sequences[to.worker]
            self._sequences[to.worker] += 1
        self._send(to, sequence, [message])

    def _send(self, to: Life, sequence: int, messages: list[ControlMessage]) -> bool:
        """Sends a batch; False if the peer is gone, which others learn of as a lost worker."""
        try:
            if self._group.life(to.worker) != to:
                return False
            frame = Frame(FrameKind.NOTICE, 0, b"", encode_batch(sequence, messages))
            self.transport.send(to.worker, frame)
        except RpcError:
            return False
        return True

    def arrived(self, sender: Life, frame: Frame) -> list[ControlMessage]:
        """The messages of a batch; none if it came before."""
        sequence, messages = decode_batch(frame.payload)
        with self._lock:
            return messages if self.seen[sender].accept(sequence) else []

    def acted_upon(self, sender: Life, messages: list[ControlMessage]) -> None:
        """Counts a batch as received, now that what it asks for was done."""
        counted = sum(not isinstance(message, UNCOUNTED) for message in messages)
        if counted:
            with self._lock:
                self._received[sender.worker] += counted

    def post_begins(self, to: int) -> None:
        """Counts a message of a channel before it is sent; a graceful shutdown waits for it."""
        with self._lock:
            self._sent[to] += 1

    def post_failed(self, to: int) -> None:
        """Uncounts a message of a channel that was not sent."""
        with self._lock:
            self._sent[to] -= 1

    def post_handled(self, sender: Life) -> None:
        """Counts a message of a channel whose handler has ended."""
        with self._lock:
            self._received[sender.worker] += 1

    def forget(self, worker_id: int) -> None:
        """Forgets what was exchanged with a worker that is gone; it does not count any more."""
        with self._lock:
            for life in [life for life in self._queued if life.worker == worker_id]:
                del self._queued[life]
            for life in [life for life in self.seen if life.worker == worker_id]:
                del self.seen[life]
            for counters in (self._sequences, self._sent, self._received):
                counters.pop(worker_id, None)

    def totals(self) -> tuple[dict[int, int], dict[int, int]]:
        """Messages queued for and received from the living, by worker."""
        with self._lock:
            return dict(self._sent), dict(self._received)
