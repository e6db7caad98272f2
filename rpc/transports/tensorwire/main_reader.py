"""The reading half of a main channel: bytes in, frames to whoever takes them.

One receive at a time; which thread calls, and that only one does, is decided by
``replies`` and ``requests``.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable

from rpc.protocol.resumption import Receipts
from rpc.runtime.text import says
from rpc.transports.base import Frame, Unreceived
from rpc.transports.late_receipts import Acknowledging
from rpc.transports.tensorwire.channel import Sender
from rpc.transports.tensorwire.framing import FrameDecoder
from rpc.transports.tensorwire.link import Link
from rpc.transports.tensorwire.receive_buffers import ReceiveBuffers

_RECEIVE_BYTES = 65536
_BYTES_SOON = 1 << 14
_BYTES_NOW = 1 << 18
_FRAME_COUNTS_FOR_SHIFT = 7
"""A frame counts for ``2**7`` bytes more than its own: the memory of what is kept of it."""
_clock = time.perf_counter
_CLOSED = "the connection was closed by the other end"


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
