"""Shared segments: who owns which part of them, and when a part is free again.

A sender has one :class:`SendPool` per peer. It creates segments, hands them to
the peer once, and from then on copies tensors into slots of them and names
(segment, position). The peer's :class:`ReceivedSegments` maps what it is handed
and builds tensors in place.

A slot comes back without a message: the first bytes of a segment hold one flag
per 4 KiB block; the sender raises a slot's flag, and the receiver lowers it when
the tensor in the slot is dead. Segments are anonymous files, so whatever happens
to either process, nothing stays behind. How a segment is handed over is the
transport's business.
"""

from __future__ import annotations

import fcntl
import itertools
import logging
import os
import threading
import time
from bisect import bisect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from rpc.errors import EncodeError, FrameError
from rpc.ids import new_tuple
from rpc.transports.host.backoff import Backoff, Refusals, number_of
from rpc.transports.host.regions import Array, Region, array_at, view_of

_log = logging.getLogger(__name__)

Copy = Callable[[int, int, int], None]

BLOCK = 4096
SHARED_FROM = 1 << 15
"""Bytes from which a tensor, or a payload, goes through shared memory."""
_MIN_SEGMENT = 16 << 20
_HUGE_PAGE = 2 << 20
_QUICK_LOOK = 4
_TAKES_FOR_A_LOOK = 4
"""For each part that was taken since, so many are looked at."""
_FEW = 2
"""The receiver of a call's tensors may still hold them when its answer has come."""
_EVERYTHING = 1 << 30
TOKEN_BYTES = 16
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step


def _flag_bytes(size: int) -> int:
    return _round_up(-(-size // BLOCK), BLOCK)


def _token_of(region: Region) -> memoryview:
    """Returns the place of the token in a segment that is not used yet: its first slot."""
    return view_of(array_at(region.address + _flag_bytes(region.size)), TOKEN_BYTES)


_Gap = tuple[int, int]
"""The start of a free part, and its length."""


class _Segment:
    """One segment at its sender: which parts are free, which are taken.

    Free parts are found at the lowest address, so that memory that is in the
    caches is used before memory that is not. What was never touched is taken last.
    """

    def __init__(self, number: int, region: Region) -> None:
        start = _flag_bytes(region.size)
        self.number = number
        self.region = region
        self.usable = False
        self._flags = view_of(array_at(region.address), start)
        self._gaps: list[_Gap] = [(start, region.size - start)]
        self._taken: dict[int, int] = {}
        self._touched = start
        self._unseen = 0
        """The number of parts taken since all were looked at."""
        self.lent: set[int] = set()
        """The places of parts that this worker's own tensors are in, whoever else is done."""

    def take(self, length: int, touched: bool) -> int | None:
        """The position of a part of ``length`` bytes, now taken; None if there is none.

        Args:
            length: in bytes.
            touched: only where something was before.
        """
        most = self._touched if touched else self.region.size
        for index, (start, free) in enumerate(self._gaps):
            if free >= length and start + length <= most:
                self._gaps[index : index + 1] = [(start + length, free - length)][: free > length]
                self._taken[start] = length
                self._flags[start // BLOCK] = 1
                self._touched = max(self._touched, start + length)
                self._unseen += 1
                return start
        return None

    def is_worth_a_look(self) -> bool:
        """Returns whether to look at all parts before untouched memory is used.

        A user may keep thousands of tensors, at none of which it pays to look each time.
        """
        return _QUICK_LOOK < len(self._taken) <= _TAKES_FOR_A_LOOK * self._unseen

    def take_again(self, length: int) -> int | None:
        """The part whose receiver was done first, where few are taken and it is as long as wanted.

        That is what one call after the other needs, and most quickly found.
        """
        taken = self._taken
        if len(taken) <= _FEW:
            for position, size in taken.items():
                if size != length or self._flags[position // BLOCK] or position in self.lent:
                    break
                del taken[position]
                taken[position] = length
                self._flags[position // BLOCK] = 1
                return position
        return None

    def give_up(self, position: int) -> None:
        """Lowers the flag of a slot in the receiver's place, which never hears of it."""
        self._flags[position // BLOCK] = 0

    def collect(self, at_most: int) -> None:
        """Frees the parts whose receivers are done, among the ``at_most`` oldest."""
        flags = self._flags
        if at_most >= len(self._taken):
            self._unseen = 0
        oldest = itertools.islice(self._taken, at_most)
        lent = self.lent
        for position in [p for p in oldest if not flags[p // BLOCK] and p not in lent]:
            self._free(position, self._taken.pop(position))

    def _free(self, start: int, length: int) -> None:
        gaps = self._gaps
        index = bisect(gaps, (start, 0))
        if index < len(gaps) and gaps[index][0] == start + length:
            length += gaps.pop(index)[1]
        if index and sum(gaps[index - 1]) == start:
            index -= 1
            start, before = gaps.pop(index)
            length += before
        gaps.insert(index, (start, length))


class SharedSlot(NamedTuple):
    """A place that was filled: which segment, and where in it."""

    segment: int
    position: int


class Budget:
    """Counts bytes of shared memory against a bound, for all pools of one worker."""

    def __init__(self, limit: int) -> None:
        self._lock = threading.Lock()
        self._left = limit

    def take(self, size: int) -> bool:
        """Reserves ``size`` bytes if they are left."""
        with self._lock:
            if size > self._left:
                return False
            self._left -= size
            return True

    def give_back(self, size: int) -> None:
        """Ends a reservation."""
        with self._lock:
            self._left += size


class SegmentOffer(NamedTuple):
    """A new segment that the peer must map before it can be used.

    The descriptor is the offer's: close it when it has been passed on. The token
    stands in the segment until it is used.
    """

    segment: int
    size: int
    descriptor: int
    token: bytes


@dataclass(slots=True)
class _Lent:
    """A slot in which a tensor of this worker lies, which it may send once."""

    segment: _Segment
    position: int
    length: int
    sent: bool = False

    def send(self) -> SharedSlot:
        if self.sent:
            raise EncodeError(
                "a tensor from send_buffer or reply_buffer is sent once, as it is its receiver's "
                "then: ask for another one, or send a copy"
            )
        self.sent = True
        return SharedSlot(self.segment.number, self.position)


class SendPool:
    """The segments in which one link sends.

    Args:
        budget: what new segments are charged to.
        copy: copies bytes from one address to another: to which, from which, how many.
        peer_name: for log lines, as is the next.
        instead: what large tensors go through without segments.
        clock: tells the time in seconds.
    """

    def __init__(
        self,
        budget: Budget,
        copy: Copy,
        peer_name: str,
        instead: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._lock = threading.Lock()
        self._budget = budget
        self._copy = copy
        self._peer_name = peer_name
        self._instead = instead
        self._segments: dict[int, _Segment] = {}
        self._usable: list[_Segment] = []
        self._lent: dict[int, _Lent] = {}  # by their addresses
        self._next = 0
        self._parting: list[_Segment] = []
        self._copying = 0
        self._closed = False
        self._backoff = Backoff(clock)

    def put(self, address: int, length: int, copy: Copy | None = None) -> SharedSlot | None:
        """Copies ``length`` bytes at ``address`` into a slot; None if none is free.

        With ``copy``, that copies them. What lies in a slot that was lent stays there.

        Raises:
            EncodeError: it was sent from there before.
        """
        with self._lock:
            lent = self._lent.get(address)
            if lent is not None and length <= lent.length:
                return lent.send()
            segment, position = self._take(-(-length // BLOCK) * BLOCK)
            if segment is None:
                return None
            self._copying += 1
        try:
            (copy or self._copy)(segment.region.address + position, address, length)
        except BaseException:
            segment.give_up(position)
            raise
        finally:
            with self._lock:
                self._copying -= 1
                ended = self._closed and not self._copying
            if ended:
                self._part()
        return new_tuple(SharedSlot, (segment.number, position))

    def take_back(self, slots: Iterable[SharedSlot]) -> None:
        """Frees slots that were filled for a message that is not sent, after all."""
        with self._lock:
            for slot in slots:
                segment = self._segments.get(slot.segment)
                if segment is None:
                    continue
                lent = self._lent.get(segment.region.address + slot.position)
                if lent is None:
                    segment.give_up(slot.position)
                else:
                    lent.sent = False

    def lend(self, length: int) -> Array | None:
        """A slot of ``length`` bytes for this worker to write to; None if none is free.

        It is free again when the array is dead, and the peer is done if it was sent.
        """
        with self._lock:
            segment, position = self._take(_round_up(length, BLOCK))
            if segment is None:
                return None
            segment.lent.add(position)
            address = segment.region.address + position
            self._lent[address] = _Lent(segment, position, length)
        return segment.region.array(position, length, partial(self._array_died, address))

    def _array_died(self, address: int) -> None:
        """Frees an array's slot; takes no lock, as garbage may be collected where it is held."""
        lent = self._lent.pop(address)
        if not lent.sent:
            lent.segment.give_up(lent.position)
        lent.segment.lent.discard(lent.position)

    def _take(self, length: int) -> tuple[_Segment | None, int]:
        """Takes a slot for ``length`` bytes. Called with the lock held."""
        usable = self._usable
        for segment in usable:
            position = segment.take_again(length)
            if position is not None:
                return segment, position
        for segment in usable:
            segment.collect(_QUICK_LOOK)
            position = segment.take(length, touched=True)
            if position is None and segment.is_worth_a_look():
                segment.collect(_EVERYTHING)
                position = segment.take(length, touched=True)
            if position is not None:
                return segment, position
        for look_at in (0, _EVERYTHING):
            for segment in usable:
                segment.collect(look_at)
                position = segment.take(length, touched=False)
                if position is not None:
                    return segment, position
        return None, 0

    def offer(self, length: int) -> SegmentOffer | None:
        """Creates a segment with room for ``length`` bytes; None if there may be none.

        One offer at a time: there is none while another awaits its answer, nor for a while
        after one was refused.
        """
        with self._lock:
            waiting = any(not s.usable for s in self._segments.values())
            if self._closed or waiting or not self._backoff.may_try():
                return None
            held = sum(s.region.size for s in self._segments.values())
            number, self._next = self._next, self._next + 1
        wanted = _round_up(length, BLOCK)
        sizes = (_round_up(max(wanted, held, _MIN_SEGMENT), _HUGE_PAGE), wanted)
        for data in sizes:
            size = _round_up(data + _flag_bytes(data) + BLOCK, _HUGE_PAGE)
            if self._budget.take(size):
                return self._create(number, size)
        return None

    def _create(self, number: int, size: int) -> SegmentOffer | None:
        try:
            descriptor = os.memfd_create("tensorwire", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError as error:
            self._fail(size, error)
            return None
        try:
            os.ftruncate(descriptor, size)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
            region = Region(size, descriptor)
        except OSError as error:
            os.close(descriptor)
            self._fail(size, error)
            return None
        segment, token = _Segment(number, region), os.urandom(TOKEN_BYTES)
        _token_of(region)[:] = token
        with self._lock:
            if not self._closed:
                self._segments[number] = segment
                return SegmentOffer(number, size, descriptor, token)
        os.close(descriptor)
        self._discard(segment)
        return None

    def _fail(self, size: int, error: OSError) -> None:
        self._budget.give_back(size)
        with self._lock:
            until = self._backoff.failed(number_of(error))
        if until:
            _log.warning("no memory to share (%s): large tensors go without, %s", error, until)

    def answered(self, number: int, usable: bool, error: int = 0) -> None:
        """Notes if the peer has mapped segment ``number``; if not, none is offered again.

        If what it lacks may be there later, one is, after a pause that doubles. The log says
        once that large tensors go without.

        Args:
            number: the offer's.
            usable: it has mapped it.
            error: why not, as the system's number; 0 if there is none.

        Raises:
            FrameError: no such segment was offered.
        """
        with self._lock:
            segment = self._segments.get(number)
            if segment is None or segment.usable:
                raise FrameError(f"an answer about segment {number}, which was not offered")
            if usable:
                segment.usable = True
                self._backoff.worked()
                self._usable.append(segment)
                return
            until = self._backoff.failed(error)
            del self._segments[number]
        self._discard(segment)
        if until:
            _log.warning(
                "worker %s cannot map shared memory; tensors to it go through %s, %s",
                self._peer_name,
                self._instead,
                until,
            )

    @property
    def is_closed(self) -> bool:
        """True if it offers and takes nothing any more."""
        return self._closed

    def close(self) -> None:
        """Unmaps all segments, as soon as copies into them have ended."""
        with self._lock:
            self._closed = True
            self._parting += self._segments.values()
            self._segments.clear()
            self._usable.clear()
            if self._copying:
                return
        self._part()

    def _part(self) -> None:
        with self._lock:
            segments, self._parting = self._parting, []
        for segment in segments:
            self._discard(segment)

    def _discard(self, segment: _Segment) -> None:
        size = segment.region.size
        segment.region.retire()
        self._budget.give_back(size)


class _Received(NamedTuple):
    """One segment at its receiver: its flags, and where its slots begin."""

    region: Region
    flags: Array
    start: int


class ReceivedSegments:
    """The segments that the peer of one link handed over.

    Args:
        peer_name: for log lines, as is the next.
        instead: what its tensors go through without them.
    """

    def __init__(self, peer_name: str, instead: str) -> None:
        self._peer_name = peer_name
        self._instead = instead
        self._refusals = Refusals()
        self._lock = threading.Lock()
        self._received: dict[int, _Received] = {}
        self._closed = False

    def add(self, number: int, size: int, descriptor: int, token: bytes | None = None) -> None:
        """Maps a segment; the descriptor stays the caller's.

        Args:
            number: the offer's, as are the others.
            size: in bytes.
            descriptor: of the file.
            token: given where it is not certain which file the descriptor is of.

        Raises:
            OSError: it cannot be mapped.
            FrameError: the file is not what was announced.
        """
        sealed = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _SEALS == _SEALS
        if not sealed or os.fstat(descriptor).st_size != size or size < 2 * BLOCK:
            raise FrameError(f"a shared segment that is not {size} bytes long for good")
        region = Region(size, descriptor)
        if token is not None and _token_of(region) != token:
            region.retire()
            raise FrameError("a shared segment that is not the one that was announced")
        with self._lock:
            if not self._closed and number not in self._received:
                flags = array_at(region.address)
                self._received[number] = _Received(region, flags, _flag_bytes(size))
                return
        region.retire()
        raise FrameError(f"shared segment {number} came twice, or too late")

    def refused(self, error: Exception) -> int:
        """Takes note of why a segment cannot be mapped, which is logged once.

        Returns:
            The system's number of it, for the answer; 0 if it has none.
        """
        number, is_new = self._refusals.note(error)
        if is_new:
            _log.warning(
                "shared memory from worker %s cannot be mapped (%s); using %s",
                self._peer_name,
                error,
                self._instead,
            )
        return number

    def array(self, number: int, position: int, length: int) -> Array:
        """The bytes of a slot; the slot is the sender's again when the array is dead.

        Raises:
            FrameError: there is no such slot.
        """
        with self._lock:
            segment = self._received.get(number)
            if segment is None:
                raise FrameError(
                    f"a tensor in shared segment {number}, which was never handed over"
                )
            region, flags, start = segment
            if not start <= position <= region.size - length or position % BLOCK or not length:
                raise FrameError(f"a tensor outside shared segment {number}")
            # A function of Python's would take longer than what it does.
            return region.array(position, length, partial(flags.__setitem__, position // BLOCK, 0))

    def close(self) -> None:
        """Unmaps every segment that no tensor lives in; the others follow their tensors."""
        with self._lock:
            self._closed = True
            received = list(self._received.values())
            self._received.clear()
        for each in received:
            each.region.retire()
