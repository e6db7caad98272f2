"""Frames whose parts arrive on several channels: which are complete, and when.

A frame on the main channel may refer to transfers on bulk channels; either may
arrive first. This collects both and says when a frame has everything, or that
there was no memory for it. Does no I/O and builds no frames.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import NamedTuple

from rpc.errors import FrameError
from rpc.transports.base import Frame
from rpc.transports.host.frame_table import Item, Placement
from rpc.transports.host.regions import Array, view_of
from rpc.transports.tensorwire.receive_buffers import ReceiveBuffers


@dataclass(slots=True)
class _Transfer:
    array: Array | None
    total: int
    missing: int
    problem: str = ""


@dataclass(slots=True)
class _Waiting:
    """A frame that came before some of its transfers."""

    frame: Frame
    items: list[Item]
    missing: int


class CompleteFrame(NamedTuple):
    """A frame with its table parsed and its transfers, by number, complete.

    With a ``problem`` it has come, but found no memory.
    """

    frame: Frame
    items: list[Item]
    arrays: dict[int, Array]
    problem: str = ""


class Transfers:
    """The bulk side of one link's receiving end.

    Args:
        buffers: where memory for transfers comes from.
        max_bytes: bound on one transfer.
    """

    def __init__(self, buffers: ReceiveBuffers, max_bytes: int) -> None:
        self._buffers = buffers
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._transfers: dict[int, _Transfer] = {}
        self._waiting: dict[int, _Waiting] = {}

    def __len__(self) -> int:
        """The number of transfers whose frame has not been completed."""
        return len(self._transfers)

    def place(self, transfer: int, offset: int, length: int, total: int) -> memoryview | None:
        """Returns the buffer for a chunk; None if there is no memory for it.

        Raises:
            FrameError: the chunk contradicts what is known about its transfer.
        """
        if total > self._max_bytes:
            raise FrameError(
                f"transfer of {total} bytes; the limit is {self._max_bytes} (max_message_bytes)"
            )
        with self._lock:
            known = self._transfers.get(transfer)
            if known is None:
                known = self._transfers[transfer] = self._begin(total)
            if known.total != total or length > known.missing:
                raise FrameError(f"chunks of transfer {transfer} contradict each other")
            if known.array is None:
                return None
            return view_of(known.array, total)[offset : offset + length]

    def _begin(self, total: int) -> _Transfer:
        try:
            return _Transfer(self._buffers.take(total), total, total)
        except MemoryError as error:
            return _Transfer(None, total, total, str(error))

    def chunk_received(self, transfer: int, length: int) -> CompleteFrame | None:
        """A chunk is in its place; returns the frame that it completed."""
        with self._lock:
            known = self._transfers[transfer]
            known.missing -= length
            if known.missing or (waiting := self._waiting.pop(transfer, None)) is None:
                return None
            waiting.missing -= 1
            return None if waiting.missing else self._complete(waiting.frame, waiting.items)

    def is_whole(self, transfer: int) -> bool:
        """Returns whether no chunk of a transfer that began is missing."""
        with self._lock:
            known = self._transfers.get(transfer)
            return known is None or not known.missing

    def frame_received(self, frame: Frame, items: list[Item]) -> CompleteFrame | None:
        """A frame is here; returned at once if its transfers are, otherwise later.

        Raises:
            FrameError: the frame and a transfer disagree about a length.
        """
        waiting = _Waiting(frame, items, 0)
        with self._lock:
            for item in items:
                if item.place is Placement.STREAM:
                    known = self._transfers.get(item.position)
                    if known is None or known.missing:
                        waiting.missing += 1
                        self._waiting[item.position] = waiting
            return None if waiting.missing else self._complete(frame, items)

    def _complete(self, frame: Frame, items: list[Item]) -> CompleteFrame:
        """Called with the lock held, when all of its transfers are here."""
        arrays: dict[int, Array] = {}
        problem = ""
        for item in items:
            if item.place is Placement.STREAM:
                known = self._transfers.pop(item.position, None)
                if known is None or known.total != item.nbytes:
                    raise FrameError(f"transfer {item.position} is not {item.nbytes} bytes long")
                arrays[item.position] = known.array
                problem = problem or known.problem
        return CompleteFrame(frame, items, arrays, problem)
