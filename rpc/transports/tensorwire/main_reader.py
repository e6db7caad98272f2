"""The reading half of a main channel: bytes in, frames to whoever takes them.

One receive at a time; which thread calls, and that only one does, is decided by
``replies`` and ``requests``.
"""

from __future__ import annotations

import socket

from rpc.transports.base import Frame
from rpc.transports.tensorwire.framing import FrameDecoder
from rpc.transports.tensorwire.link import Link


class MainReader:
    """Reads one main channel until it ends.

    Args:
        sock: the channel.
        link: builds frames.
        max_frame_bytes: see :class:`FrameDecoder`.

    Attributes:
        more: the last :meth:`read` may have left something in the socket.
        over: why there is nothing more to read, ever; empty while there is.
        silent: nothing has ever been received.
    """

    def __init__(self, sock: socket.socket, link: Link, max_frame_bytes: int) -> None:
        self._receive = sock.recv_into
        self._link = link
        self._decoder = FrameDecoder(max_frame_bytes)
        self.more = False
        self.over = ""
        self.silent = True

    def read(self) -> list[Frame]:
        """Receives once; returns the frames that are complete."""
        decoder = self._decoder
        buffer = decoder.buffer()
        self.more = False
        try:
            count = self._receive(buffer)
        except BlockingIOError:
            return []
        except OSError as error:
            self.over = f"the connection broke: {error.strerror}"
            return []
        if not count:
            self.over = "the connection was closed by the other end"
            return []
        self.more = count == len(buffer)
        self.silent = False
        frames: list[Frame] = []
        try:
            for wire in decoder.received(count):
                frame = self._link.frame_of(wire)
                if frame is not None:
                    frames.append(frame)
        except Exception as error:
            self.over = f"what it sent cannot be read: {error}"
        return frames
