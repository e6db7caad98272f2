"""The reading half of a main channel: bytes in, frames to whoever takes them.

One receive at a time; which thread calls, and that only one does, is decided by
``replies`` and ``requests``. The decoder, which finds where frames begin and end, is
Sans-IO; ``framing`` tells their layout.

Of a frame for which there is no memory the table is kept, so that what it says can be
given back, and the beginning of the header, so that it is known whose call failed; the
rest is thrown away.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from zlib import crc32

from rpc.errors import FrameError, caused
from rpc.ids import new_tuple
from rpc.protocol.resumption import Receipts
from rpc.runtime.text import says
from rpc.transports.base import Frame, Unreceived
from rpc.transports.host.frame_table import INLINE_ALIGNMENT
from rpc.transports.late_receipts import Acknowledging
from rpc.transports.tensorwire.channel import Sender
from rpc.transports.tensorwire.framing import (
    ACKNOWLEDGE,
    CHECKED,
    CHECKED_BYTES,
    COUNTER_MASK,
    FIXED_SIZE,
    KINDS,
    MAGIC,
    MAIN_KINDS,
    VERSION,
    WASTE_BYTES,
    Buffer,
    Fixed,
    check_fixed,
)
from rpc.transports.tensorwire.link import Link
from rpc.transports.tensorwire.receive_buffers import ReceiveBuffers

_RECEIVE_BYTES = 65536
_BYTES_SOON = 1 << 14
_BYTES_NOW = 1 << 18
_FRAME_COUNTS_FOR_SHIFT = 7
"""A frame counts for ``2**7`` bytes more than its own: the memory of what is kept of it."""
_clock = time.perf_counter
_CLOSED = "the connection was closed by the other end"
_LARGE = 1 << 14
_KEPT_BYTES = 1 << 18
"""Of a header without memory. The small tensors, which make one long, stand at its end."""
_unpack_checked = CHECKED.unpack_from

Arrived = tuple[Frame, bytes]
"""A frame as it came off a main channel, and its table. If there is a table, the frame's payload
is the whole inline section, writable, and it has no tensors yet. Or the payload is
:class:`Unreceived` and says what there was no memory for; then the header may end early."""


def _fresh(length: int) -> memoryview:
    return memoryview(bytearray(length))


def _ignore(_: int) -> None:
    """Ignores an acknowledgement, for whoever remembers nothing."""


class MainReader:
    """Reads one main channel until it ends.

    Args:
        sock: the channel.
        link: builds frames.
        max_frame_bytes: see :class:`FrameDecoder`.
        buffers: where memory for long frames comes from.
        sender: the writing half.
        late: told that an acknowledgement is to be sent some time, by :meth:`acknowledge`.

    Attributes:
        more: the last :meth:`read` may have left something in the socket.
        dry: the last :meth:`read` found nothing.
        over: why there is nothing more to read on this connection; empty while there is.
        garbled: what arrived cannot be read, so that no other connection can help.
        silent: nothing has ever been received.
    """

    def __init__(
        self,
        sock: socket.socket,
        link: Link,
        max_frame_bytes: int,
        buffers: ReceiveBuffers,
        sender: Sender,
        late: Callable[[Acknowledging], None],
    ) -> None:
        self._sock = sock
        self._receive = sock.recv
        self._link = link
        self._decoder = FrameDecoder(max_frame_bytes, buffers.view, sender.acknowledged)
        self._sender = sender
        self._receipts = Receipts(_BYTES_SOON, _BYTES_NOW, lambda: late(self))
        self.more = False
        self.dry = False
        self.over = ""
        self.garbled = False
        self.silent = True

    @property
    def received(self) -> int:
        """The number of frames that have arrived whole."""
        return self._decoder.received

    def restart(self) -> None:
        """Goes on with another connection, which took the place of the last."""
        self._decoder.restart()
        self.over = ""

    def acknowledge(self) -> None:
        """Tells the other end what has arrived."""
        self._receipts.paid()
        self._sender.acknowledge(self._decoder.received)

    def read(self) -> list[Frame]:
        """Receives once; returns the frames that are complete."""
        self.more = self.dry = False
        try:
            room = None if self._decoder.large is None else self._decoder.room()
            if room is not None:
                return self._read_into(room)
            data = self._receive(_RECEIVE_BYTES)
        except BlockingIOError:
            self.dry = True
            return []
        except OSError as error:
            self.over = f"the connection broke: {error.strerror}"
            return []
        except MemoryError:  # what is lost with the connection comes again on another
            self.over = "the connection was given up: there is no memory to receive anything"
            return []
        if not data:
            self.over = _CLOSED
            return []
        self.more = len(data) == _RECEIVE_BYTES
        self.silent = False
        self._link.heard_at = _clock()
        frames: list[Frame] = []
        try:
            arrived = self._decoder.feed(data)
            receipts = self._receipts
            receipts.owed += len(data) + (len(arrived) << _FRAME_COUNTS_FOR_SHIFT)
            if receipts.owed >= receipts.limit and receipts.due():
                self.acknowledge()
            for frame, table in arrived:
                opened = self._link.open(frame, table) if table else frame
                if opened is not None:
                    frames.append(opened)
        except Exception as error:
            self._cannot_read(error)
        return frames

    def _cannot_read(self, error: Exception) -> None:
        self.garbled = True
        self.over = f"what it sent cannot be read: {says(error)}"

    def _read_into(self, room: memoryview) -> list[Frame]:
        count = self._sock.recv_into(room)
        if not count:
            self.over = _CLOSED
            return []
        self.more = True
        self._link.heard_at = _clock()
        try:
            arrived = self._decoder.filled(count)
            receipts = self._receipts
            receipts.owed += count
            if receipts.owed >= receipts.limit and receipts.due():
                self.acknowledge()
            for frame, table in arrived:
                whole = not table and type(frame.payload) is not Unreceived
                opened = frame if whole else self._link.open(frame, table)
                if opened is not None:
                    return [opened]
        except Exception as error:
            self._cannot_read(error)
        return []


class FrameDecoder:
    """Turns the bytes of a main channel into frames.

    While :meth:`room` returns a buffer, the next bytes of the stream are received
    there and reported with :meth:`filled`; otherwise they are passed to :meth:`feed`.
    After a :class:`FrameError` the stream cannot be used any more.

    Args:
        max_frame_bytes: a frame that says it is longer is refused.
        allocate: where memory for long frames comes from, aligned as ``INLINE_ALIGNMENT`` says.
        acknowledged: told how many of the frames sent have arrived, now and then.

    Attributes:
        large: the memory of a long frame that has begun; see :meth:`room`.
    """

    def __init__(
        self,
        max_frame_bytes: int,
        allocate: Callable[[int], memoryview] = _fresh,
        acknowledged: Callable[[int], None] = _ignore,
    ) -> None:
        self._max_frame_bytes = max_frame_bytes
        self._allocate = allocate
        self._acknowledged = acknowledged
        self._rest = b""
        self._sequence = 0
        self.large: memoryview | None = None
        self._skimmed: _Skimmed | None = None
        self._large_fixed = Fixed(*[0] * 9)
        self._large_end = 0

    def feed(self, data: bytes) -> list[Arrived]:
        """Takes the next bytes of the stream; returns the frames they completed.

        Raises:
            FrameError: the bytes are not frames.
        """
        if self._rest:
            data = self._rest + data
        start, available = 0, len(data)
        frames: list[Arrived] = []
        while available - start >= FIXED_SIZE:
            magic, version, kind, header, table, inline, correlation, sequence, checksum = (
                _unpack_checked(data, start)
            )
            if (
                checksum != crc32(data[start : start + CHECKED_BYTES])
                or sequence != self._sequence
                or kind not in MAIN_KINDS
                or magic != MAGIC
                or version != VERSION
            ):
                check_fixed(data, start, MAIN_KINDS, self._sequence)
            at_header = start + FIXED_SIZE
            at_inline = at_header + header + table
            end = at_inline + inline
            if end > available:
                if self._begin_large(data, start, end - start):
                    return frames
                break
            self._sequence = (sequence + 1) & COUNTER_MASK
            start = end
            at_table = at_header + header
            inline_part: Buffer = data[at_inline:end]
            if table:
                if kind == ACKNOWLEDGE:
                    self._acknowledged(correlation)
                    continue
                inline_part = bytearray(inline_part)
            try:
                parts = KINDS[kind], correlation, data[at_header:at_table], inline_part, ()
            except KeyError:
                raise caused(FrameError("an acknowledgement without its table"), None) from None
            frames.append((new_tuple(Frame, parts), data[at_table:at_inline]))
        self._rest = data[start:]
        return frames

    @property
    def received(self) -> int:
        """The number of frames that have arrived whole."""
        return self._sequence

    def restart(self) -> None:
        """Forgets what has not arrived whole, as another connection takes this one's place."""
        self._rest = b""
        self.large = None
        self._skimmed = None

    def _begin_large(self, data: bytes, start: int, length: int) -> bool:
        """Gives a long incomplete frame memory of its own; False if it is a short one."""
        if length > self._max_frame_bytes:
            raise FrameError(
                f"frame of {length} bytes; the limit is {self._max_frame_bytes} (max_frame_bytes)"
            )
        if length < _LARGE:
            return False
        present = data[start + FIXED_SIZE :]
        fixed = self._large_fixed = Fixed._make(CHECKED.unpack_from(data, start))
        before_inline = -(fixed.header + fixed.table) % INLINE_ALIGNMENT
        self._rest = b""
        try:
            self.large = self._allocate(before_inline + length - FIXED_SIZE)[before_inline:]
        except MemoryError as error:
            self._begin_to_skim(memoryview(present), str(error))
            return True
        self.large[: len(present)] = present
        self._large_end = len(present)
        return True

    def _begin_to_skim(self, present: memoryview, problem: str) -> None:
        skimmed = self._skimmed = _skim(self._large_fixed, problem)
        place = next(skimmed.sections)
        while len(present) >= len(place):
            place[:] = present[: len(place)]
            present = present[len(place) :]
            place = next(skimmed.sections)
        place[: len(present)] = present
        self.large, self._large_end = place, len(present)

    def room(self) -> memoryview | None:
        """Returns the buffer for the rest of a long frame, if one has begun."""
        if self.large is None:
            return None
        return self.large[self._large_end :]

    def filled(self, count: int) -> list[Arrived]:
        """Takes note of ``count`` bytes in :meth:`room`; returns the frame if it is complete."""
        large, fixed = self.large, self._large_fixed
        self._large_end += count
        if large is None or self._large_end < len(large):
            return []
        skimmed = self._skimmed
        if skimmed is not None:
            self.large, self._large_end = next(skimmed.sections, None), 0
            if self.large is not None:
                return []
        self.large = self._skimmed = None
        self._sequence = (self._sequence + 1) & COUNTER_MASK
        if fixed.kind == ACKNOWLEDGE:
            raise FrameError("an acknowledgement that is a long frame")
        header, table, payload = _split(large, fixed) if skimmed is None else skimmed.parts()
        return [(Frame(KINDS[fixed.kind], fixed.correlation, header, payload), table)]


@dataclass(frozen=True, slots=True)
class _Skimmed:
    """The parts that are kept of a frame for which there is no memory, and why there is none."""

    problem: str
    header: bytearray
    table: bytearray
    sections: Iterator[memoryview]
    """The memory its bytes belong in, one place after the other; none is empty."""

    def parts(self) -> tuple[bytes, bytes, Buffer]:
        """Header, table and payload, once all sections are filled."""
        return bytes(self.header), bytes(self.table), Unreceived(self.problem.encode())


def _skim(fixed: Fixed, problem: str) -> _Skimmed:
    header = bytearray(min(fixed.header, _KEPT_BYTES))
    table = bytearray(fixed.table)

    def sections() -> Iterator[memoryview]:
        yield from _in_parts(memoryview(header), len(header))
        waste = memoryview(bytearray(WASTE_BYTES))
        yield from _in_parts(waste, fixed.header - len(header))
        yield from _in_parts(memoryview(table), len(table))
        yield from _in_parts(waste, fixed.inline)

    return _Skimmed(problem, header, table, sections())


def _split(large: memoryview, fixed: Fixed) -> tuple[bytes, bytes, Buffer]:
    """Header, table and payload of a frame that came whole."""
    at_inline = fixed.header + fixed.table
    table = bytes(large[fixed.header : at_inline])
    try:
        return bytes(large[: fixed.header]), table, large[at_inline:]
    except MemoryError:
        problem = f"{fixed.header} bytes cannot be allocated"
        return bytes(large[: min(fixed.header, _KEPT_BYTES)]), table, Unreceived(problem.encode())


def _in_parts(buffer: memoryview, length: int) -> Iterator[memoryview]:
    """A buffer, as often as ``length`` bytes fill it."""
    while length:
        part = buffer[:length]
        length -= len(part)
        yield part
