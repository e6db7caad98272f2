"""Moves large data: one thread per worker that reads and writes all bulk channels.

Large transfers copy for milliseconds inside system calls, where they hold no
interpreter lock; here they do so beside the small frames, not in their way.
Also passes shared segments from and to Unix bulk channels. Frames that become
complete here are handed on.
"""

from __future__ import annotations

import array
import contextlib
import os
import select
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass

from rpc.errors import FrameError
from rpc.transports.base import Frame
from rpc.transports.tensorwire.channel import Sender
from rpc.transports.tensorwire.framing import BulkDecoder
from rpc.transports.tensorwire.link import Link

_EVENTS = 32
_READS_PER_TURN = 4
_MAX_DESCRIPTORS = 4
_ANCILLARY_BYTES = socket.CMSG_SPACE(_MAX_DESCRIPTORS * array.array("i").itemsize)


@dataclass(frozen=True, slots=True)
class BulkEvents:
    """What happens on a bulk channel, for the link's owner.

    Args:
        complete: takes a frame that has all its parts now; must not block or raise.
        ended: nothing more will come, for the given reason; called once.
    """

    complete: Callable[[Frame], None]
    ended: Callable[[str], None]


class _BulkChannel:
    def __init__(self, sender: Sender, link: Link, events: BulkEvents) -> None:
        self._sender = sender
        self._sock = sender.sock
        self._link = link
        self._events = events
        self._decoder = BulkDecoder(link.place)
        self._passes_descriptors = self._sock.family == socket.AF_UNIX
        self._descriptors: list[int] = []

    def handle(self, events: int) -> None:
        """Acts on readiness."""
        if events & select.EPOLLOUT:
            self._sender.writable()
        if events & ~select.EPOLLOUT:
            reason = self._read()
            if reason is not None:
                self._events.ended(reason)

    def _read(self) -> str | None:
        """Reads a few times; returns why the channel is over, if it is."""
        for _ in range(_READS_PER_TURN):
            try:
                count = self._receive(self._decoder.buffer())
            except BlockingIOError:
                return None
            except OSError as error:
                return f"a bulk connection broke: {error.strerror}"
            if not count:
                return "a bulk connection was closed by the other end"
            try:
                self._advance(count)
            except Exception as error:
                return f"what it sent in bulk cannot be read: {error}"
        return None

    def _receive(self, buffer: memoryview) -> int:
        if not self._passes_descriptors:
            return self._sock.recv_into(buffer)
        count, ancillary, _, _ = self._sock.recvmsg_into(
            [buffer], _ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC
        )
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                found = array.array("i")
                found.frombytes(data[: len(data) - len(data) % found.itemsize])
                self._descriptors.extend(found)
        return count

    def _advance(self, count: int) -> None:
        event = self._decoder.received(count)
        if event is not None:
            frame = self._link.bulk_event(event, self._sender, self._descriptors)
            if frame is not None:
                self._events.complete(frame)
        if len(self._descriptors) > _MAX_DESCRIPTORS:
            raise FrameError("descriptors that belong to no message")

    def drop_descriptors(self) -> None:
        """Closes descriptors that came with incomplete messages."""
        while self._descriptors:
            os.close(self._descriptors.pop())


class BulkMover:
    """The bulk channels of one worker, and the thread that serves them.

    Args:
        name: of the thread, which starts with the first channel.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._epoll = select.epoll()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._bell, select.EPOLLIN)
        self._channels: dict[int, _BulkChannel] = {}
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = False

    def add(self, sender: Sender, link: Link, events: BulkEvents) -> None:
        """Begins to serve a channel."""
        descriptor = sender.sock.fileno()
        self._channels[descriptor] = _BulkChannel(sender, link, events)
        self._epoll.register(descriptor, select.EPOLLIN)
        with self._lock:
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
                self._thread.start()

    def watch_writable(self, sock: socket.socket, wanted: bool) -> None:
        """Asks that the channel go on sending when its socket takes bytes, or not any more."""
        with contextlib.suppress(OSError, ValueError):
            self._epoll.modify(sock.fileno(), select.EPOLLIN | (select.EPOLLOUT if wanted else 0))

    def remove(self, sock: socket.socket) -> None:
        """Forgets a channel; to be called before its socket is closed."""
        channel = self._channels.pop(sock.fileno(), None)
        if channel is not None:
            channel.drop_descriptors()
        with contextlib.suppress(OSError, ValueError):
            self._epoll.unregister(sock.fileno())

    def is_moving_here(self) -> bool:
        """True on the thread that serves, which must not wait."""
        return self._thread is threading.current_thread()

    def _serve(self) -> None:
        while not self._closed:
            for descriptor, events in self._epoll.poll(-1, _EVENTS):
                channel = self._channels.get(descriptor)
                if channel is not None and not self._closed:
                    channel.handle(events)

    def close(self) -> None:
        """Stops; joins the thread."""
        with self._lock:
            self._closed = True
            thread = self._thread
        os.eventfd_write(self._bell, 1)
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        self._epoll.close()
        os.close(self._bell)
