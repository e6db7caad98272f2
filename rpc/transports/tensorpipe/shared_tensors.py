"""Large tensors between two workers on one host: copied once, into shared memory.

Owns the segments in which this worker sends to one peer, and those it was handed by
it; ``host.segments`` says how they are filled and how a part is free again. Here a
frame is turned into one that says where its tensors lie (:class:`PlacedFrame`), and back.

A segment has no name. Its sender tells process, descriptor and a random token that
stands in the segment; the receiver opens what it finds there, and answers that it may be
used if it reads the token. So nothing is guessed about containers and hosts, and
whatever cannot be opened, or finds no room, goes through torch.
"""

from __future__ import annotations

import os
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from rpc.errors import EncodeError, FrameError
from rpc.transports.base import Frame, FrameKind, unreceived
from rpc.transports.host.copying import CopyThreads
from rpc.transports.host.frame_table import (
    Item,
    Look,
    Placement,
    join_rows,
    look_at,
    payload_row,
    source_of_payload,
    tensor_over,
    tensor_row,
    unpack_table,
)
from rpc.transports.host.identity import host_identity
from rpc.transports.host.regions import Array, view_of
from rpc.transports.host.segments import (
    SHARED_FROM,
    Budget,
    ReceivedSegments,
    SegmentOffer,
    SendPool,
    SharedSlot,
)
from rpc.transports.tensorpipe.wire import Payload, PlacedFrame

_OFFER = struct.Struct("<QQii16s")
_ANSWER = struct.Struct("<Q?i")
_INSTEAD = "torch"
_ANY_SIZE = 1 << 62
_FILES = "/proc/{}/fd/{}"


class HostMemory:
    """The shared memory of one worker.

    Args:
        name: what its threads are called.
        limit: bound, in bytes, on what it holds for others; 0 for none in either direction.
        clock: tells the time in seconds.
    """

    def __init__(self, name: str, limit: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.host = host_identity("pid") if limit else ""
        self._budget = Budget(limit)
        self._copier = CopyThreads(name)

    def shared_with(self, peer_name: str, host: str) -> SharedTensors:
        """Makes the shared memory with a peer, given the host that it published."""
        same = bool(host) and host == self.host
        if not same:
            return nothing_shared(peer_name)
        copy, clock = self._copier.copy, self._clock
        return SharedTensors(peer_name, SendPool(self._budget, copy, peer_name, _INSTEAD, clock))

    def close(self) -> None:
        """Ends its threads."""
        self._copier.close()


class SharedTensors:
    """The shared memory between this worker and one life of a peer.

    Args:
        peer_name: for log lines.
        pool: where what is sent lies; None if the peer is not on this host.
    """

    def __init__(self, peer_name: str, pool: SendPool | None) -> None:
        self._peer_name = peer_name
        self._pool = pool
        self._segments = ReceivedSegments(peer_name, _INSTEAD)
        self._lock = threading.Lock()
        self._offered: SegmentOffer | None = None
        self.untold: Frame | None = None
        """The offer that :meth:`take_offer` takes, to tell the peer of it."""

    # Sending

    def place(self, frame: Frame) -> Frame:
        """The frame to send instead, whose large parts are in shared memory; or the same."""
        pool = self._pool
        if pool is None:
            return frame
        looks = _looks(frame.tensors)
        if looks is None:
            return frame
        rows, slots = list[bytes](), list[SharedSlot]()
        try:
            payload, beside = self._place_parts(pool, frame, looks, rows, slots)
        except BaseException:  # a tensor without memory, for instance
            pool.take_back(slots)
            raise
        if not slots:
            return frame
        header = PlacedFrame.join(join_rows(rows), frame.header)
        return PlacedFrame(frame.kind, frame.correlation, header, payload, tuple(beside))

    def _place_parts(
        self,
        pool: SendPool,
        frame: Frame,
        looks: list[Look],
        rows: list[bytes],
        slots: list[SharedSlot],
    ) -> tuple[Payload, list[torch.Tensor]]:
        """Adds to ``rows`` where each part is, to ``slots`` what it filled.

        Returns what is in no slot.
        """
        payload, beside = frame.payload, list[torch.Tensor]()
        size, slot = len(payload), None
        if size >= SHARED_FROM:
            slot = self._put(pool, *source_of_payload(payload)[:2])
        if slot is None:
            rows.append(payload_row(Placement.INLINE, 0, 0, size))
        else:
            slots.append(slot)
            rows.append(payload_row(Placement.SHARED, *slot, size))
            payload = b""
        for tensor, look in zip(frame.tensors, looks, strict=True):
            slot = None
            if look.nbytes >= SHARED_FROM:
                slot = self._put(pool, tensor.data_ptr(), look.nbytes)
            if slot is None:
                rows.append(tensor_row(Placement.STREAM, 0, len(beside), look))
                beside.append(tensor)
            else:
                slots.append(slot)
                rows.append(tensor_row(Placement.SHARED, *slot, look))
        return payload, beside

    def _put(self, pool: SendPool, address: int, size: int) -> SharedSlot | None:
        slot = pool.put(address, size)
        if slot is None:
            self._offer(pool, size)
        return slot

    def lend(self, nbytes: int) -> Array | None:
        """Shared memory from which a tensor is sent as it is; None if there is none."""
        if self._pool is None or nbytes < SHARED_FROM:
            return None
        lent = self._pool.lend(nbytes)
        if lent is None:
            self._offer(self._pool, nbytes)
        return lent

    def _offer(self, pool: SendPool, size: int) -> None:
        offer = pool.offer(size)
        if offer is not None:
            fields = offer.segment, offer.size, os.getpid(), offer.descriptor, offer.token
            with self._lock:
                self._offered = offer
                self.untold = Frame(FrameKind.NOTICE, 0, b"", _OFFER.pack(*fields))
            if pool.is_closed:  # meanwhile
                self._take_back()

    def take_back(self, frame: Frame) -> None:
        """Frees what :meth:`place` filled for a frame that is not sent, and never will be.

        Only if the peer cannot have heard of it.
        """
        if self._pool is not None and type(frame) is PlacedFrame:
            filled = _filled(frame.split()[0])
            self._pool.take_back(SharedSlot(item.segment, item.position) for item in filled)

    def take_offer(self) -> Frame | None:
        """A segment that the peer has to map, to be sent to it; None if there is none."""
        with self._lock:
            offer, self.untold = self.untold, None
        return offer

    def answered(self, answer: Payload) -> None:
        """Notes that the peer has mapped what it was offered, or could not.

        Raises:
            FrameError: it was offered no such thing.
        """
        number, usable, error = _unpack(_ANSWER, answer)
        pool = self._pool
        if self._take_back() is None or pool is None:
            return
        pool.answered(number, usable, error)

    def _take_back(self) -> SegmentOffer | None:
        """Ends an offer, whose descriptor is needed no more."""
        with self._lock:
            offer, self._offered = self._offered, None
        if offer is not None:
            os.close(offer.descriptor)
        return offer

    # Receiving

    def map(self, offer: Payload) -> Frame:
        """Maps a segment that the peer offers; returns what to answer.

        Raises:
            FrameError: it is no offer.
        """
        number, size, process, descriptor, token = _unpack(_OFFER, offer)
        path, usable, problem = _FILES.format(process, descriptor), False, 0
        try:
            opened = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
            try:
                self._segments.add(number, size, opened, token)
                usable = True
            finally:
                os.close(opened)
        except (OSError, FrameError) as error:
            problem = self._segments.refused(error)
        return Frame(FrameKind.NOTICE, 0, b"", _ANSWER.pack(number, usable, problem))

    def open(self, frame: PlacedFrame) -> Frame:
        """The frame as it was before :meth:`place`, in the shared memory.

        Raises:
            FrameError: it names what is not there.
        """
        table, header = frame.split()
        items = unpack_table(table, len(frame.payload), _ANY_SIZE)
        left = iter(items)
        try:
            payload, tensors = self._parts(frame, left)
        except FrameError:
            raise
        except Exception as error:  # there is no memory left, most likely
            problem = f"{type(error).__name__}: {error}"
        else:
            return Frame(frame.kind, frame.correlation, header, payload, tensors)
        for item in left:
            if item.place is Placement.SHARED:
                self._array(item)  # dies at once, which gives its slot back
        size = sum(item.nbytes for item in items)
        return unreceived(frame._replace(header=header), size, self._peer_name, problem)

    def _parts(
        self, frame: PlacedFrame, left: Iterator[Item]
    ) -> tuple[Payload, tuple[torch.Tensor, ...]]:
        """Payload and tensors of a frame; what has been claimed is not ``left``."""
        first, payload = next(left), frame.payload
        if first.place is Placement.SHARED:
            payload = view_of(self._array(first), first.nbytes)
        return payload, tuple([self._tensor(item, frame.tensors) for item in left])

    def _tensor(self, item: Item, beside: tuple[torch.Tensor, ...]) -> torch.Tensor:
        if item.place is Placement.SHARED:
            return tensor_over(self._array(item), item)
        if item.position >= len(beside):
            raise FrameError(f"tensor {item.position} of {len(beside)} that came beside a frame")
        return beside[item.position]

    def _array(self, item: Item) -> Array:
        return self._segments.array(item.segment, item.position, item.nbytes)

    def give_back(self, table: bytes) -> None:
        """Frees what was filled for a frame that never came.

        Args:
            table: of the frame, as :meth:`PlacedFrame.split` returns it; empty if it had none.

        Raises:
            FrameError: it is no table, or there are no such slots.
        """
        for item in _filled(table) if table else ():
            self._array(item)  # dies at once

    # The end

    def stop_sending(self) -> None:
        """Gives up the segments of this side, as the peer takes nothing any more."""
        if self._pool is not None:
            self._pool.close()
            self._take_back()

    def close(self) -> None:
        """Gives up the other side's too; tensors that were received keep theirs."""
        self.stop_sending()
        self._segments.close()


def _filled(table: bytes) -> list[Item]:
    items = unpack_table(table, _ANY_SIZE, _ANY_SIZE)
    return [item for item in items if item.place is Placement.SHARED]


def nothing_shared(peer_name: str = "") -> SharedTensors:
    """Returns what is shared with a peer on another host."""
    return SharedTensors(peer_name, None)


def _unpack(what: struct.Struct, data: Payload) -> tuple[Any, ...]:
    try:
        return what.unpack(data)
    except struct.error:
        raise FrameError(f"{len(data)} bytes about shared memory are not {what.size}") from None


def _looks(tensors: tuple[torch.Tensor, ...]) -> list[Look] | None:
    """Returns the layouts of tensors; None if one is not plain memory of this process."""
    looks: list[Look] = []
    for tensor in tensors:
        if not tensor.is_cpu:
            return None
        try:
            looks.append(look_at(tensor))
        except EncodeError:
            return None
    return looks
