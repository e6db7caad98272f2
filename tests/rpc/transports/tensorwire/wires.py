"""A socket pair whose far end is read, for tests of channels."""

from __future__ import annotations

import select
import socket

from rpc.transports.tensorwire.channel import Sender, Unsent
from rpc.transports.tensorwire.main_reader import FrameDecoder
from tests.waiting import until

SECONDS = 20.0


class Wire:
    """A sender, and the other end of its socket."""

    def __init__(self, remember: int = 0) -> None:
        mine, self.other = socket.socketpair()
        mine.setblocking(False)
        self.other.settimeout(10)
        self.unsent = Unsent()
        self.watching: list[bool] = []
        self.sender = Sender(mine, self.unsent, self.watching.append, remember)
        self.decoder = FrameDecoder(1 << 30)
        self.found: list[tuple[int, bytes, bytes]] = []

    def receive(self, count: int) -> None:
        """Reads until ``count`` frames have arrived, letting the sender go on meanwhile."""
        until(lambda: len(self.found) >= count, pause=0, meanwhile=self._step)

    def _step(self) -> None:
        readable, _, _ = select.select([self.other], [], [], 0.01)
        if readable:
            self._read()
        if self.watching and self.watching[-1]:
            self.sender.writable()

    def _read(self) -> None:
        room = self.decoder.room()
        if room is not None:
            frames = self.decoder.filled(self.other.recv_into(room))
        else:
            frames = self.decoder.feed(self.other.recv(1 << 16))
        self.found += [(f.correlation, f.header, bytes(f.payload)) for f, _ in frames]

    def close(self) -> None:
        self.sender.close()
        self.other.close()
