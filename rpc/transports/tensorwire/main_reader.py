"""The reading half of a main channel: bytes in, frames to whoever takes them.

One receive at a time; which thread calls, and that only one does, is decided by
``replies`` and ``requests``.
"""

from __future__ import annotations

import socket

from rpc.transports.base import Frame
from rpc.transports.tensorwire.framing import FrameDecoder
from rpc.transports.tensorwire.link import Link
from rpc.transports.tensorwire.receive_buffers import ReceiveBuffers

_RECEIVE_BYTES = 65536
_CLOSED = "the connection was closed by the other end"


class MainReader:
    """Reads one main channel until it ends.

    Args:
        sock: the channel.
        link: builds frames.
        max_frame_bytes: see :class:`FrameDecoder`.
        buffers: where memory for long frames comes from.

    Attributes:
        more: the last :meth:`read` may have left something in the socket.
        over: why there is nothing more to read, ever; empty while there is.
        silent: nothing has ever been received.
    """

    def __init__(
        self, sock: socket.socket, link: Link, max_frame_bytes: int, buffers: ReceiveBuffers
    ) -> None:
        self._sock = sock
        self._receive = sock.recv
        self._link = link
        self._decoder = FrameDecoder(max_frame_bytes, buffers.view)
        self.more = False
        self.over = ""
        self.silent = True

    def read(self) -> list[Frame]:
        """Receives once; returns the frames that are complete."""
        self.more = False
        try:
            room = self._decoder.room()
            if room is not None:
                return self._read_into(room)
            data = self._receive(_RECEIVE_BYTES)
        except BlockingIOError:
            return []
        except OSError as error:
            self.over = f"the connection broke: {error.strerror}"
            return []
        if not data:
            self.over = _CLOSED
            return []
        self.more = len(data) == _RECEIVE_BYTES
        self.silent = False
        frames: list[Frame] = []
        try:
            for frame, table in self._decoder.feed(data):
                opened = self._link.open(frame, table) if table else frame
                if opened is not None:
                    frames.append(opened)
        except Exception as error:
            self.over = f"what it sent cannot be read: {error}"
        return frames

    def _read_into(self, room: memoryview) -> list[Frame]:
        count = self._sock.recv_into(room)
        if not count:
            self.over = _CLOSED
            return []
        self.more = True
        try:
            for frame, table in self._decoder.filled(count):
                opened = self._link.open(frame, table) if table else frame
                if opened is not None:
                    return [opened]
        except Exception as error:
            self.over = f"what it sent cannot be read: {error}"
        return []
