"""Moves large data: one thread per worker that reads and writes all bulk channels.

Large transfers copy for milliseconds inside system calls, where they hold no
interpreter lock; here they do so beside the small frames, not in their way.
Also passes shared segments from and to Unix bulk channels. Frames that become
complete here are handed on.
"""

from __future__ import annotations

import array
import contextlib
import logging
import os
import select
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass

from rpc.errors import FrameError
from rpc.protocol.resumption import Receipts
from rpc.runtime.text import says
from rpc.runtime.threads import Thread
from rpc.transports.base import Frame
from rpc.transports.late_receipts import Acknowledging
from rpc.transports.tensorwire.channel import Sender
from rpc.transports.tensorwire.framing import Acknowledged, BulkDecoder, Chunk
from rpc.transports.tensorwire.link import Link
from rpc.transports.tensorwire.wakeup import WakeUp

_log = logging.getLogger("rpc.transports.tensorwire")

_EVENTS = 32
_READS_PER_TURN = 4
_MAX_DESCRIPTORS = 4
_ANCILLARY_BYTES = socket.CMSG_SPACE(_MAX_DESCRIPTORS * array.array("i").itemsize)
_BYTES_NOW = 8 << 20


@dataclass(frozen=True, slots=True)
class BulkEvents:
    """Callbacks of a bulk channel, for the link's owner.

    Args:
        complete: takes a frame that has all its parts now; must not block or raise.
        ended: nothing more will come, for the given reason; called once.
    """

    complete: Callable[[Frame], None]
    ended: Callable[[str], None]


class BulkChannel:
    """One bulk channel: reads it and takes what it brings.

    Args:
        sender: the writing half.
        link: builds frames.
        events: what happens.
        late: told that an acknowledgement is to be sent some time, by :meth:`acknowledge`.

    Attributes:
        garbled: what arrived cannot be read, so that no other connection can help.
        silent: nothing has ever been received.
    """

    def __init__(
        self,
        sender: Sender,
        link: Link,
        events: BulkEvents,
        late: Callable[[Acknowledging], None],
    ) -> None:
        self._sender = sender
        self._sock = sender.sock
        self._link = link
        self._events = events
        self._decoder = BulkDecoder(link.place)
        self._receipts = Receipts(1, _BYTES_NOW, lambda: late(self))
        link.bulk_readers.append(self)
        self.garbled = False
        self.silent = True
        self._passes_descriptors = self._sock.family == socket.AF_UNIX
        self._descriptors: list[int] = []
        self._drops_descriptors = False

    def handle(self, events: int) -> None:
        """Acts on readiness."""
        if events & select.EPOLLOUT:
            self._sender.writable()
        if events & ~select.EPOLLOUT:
            reason = self._read()
            if reason is not None:
                self._events.ended(reason)

    def fail(self, error: BaseException) -> None:
        """Ends as unreadable: dealing with what happened here failed in the middle."""
        self.garbled = True
        self._events.ended(f"a bulk connection cannot be served: {type(error).__name__}: {error}")

    def _read(self) -> str | None:
        """Reads a few times; returns why the channel is over, if it is."""
        for _ in range(_READS_PER_TURN):
            buffer = self._decoder.buffer()
            try:
                count = self._receive(buffer)
            except BlockingIOError:
                return None
            except OSError as error:
                return f"a bulk connection broke: {error.strerror}"
            except MemoryError:  # what is lost with the connection comes again on another
                return "a bulk connection was given up: there is no memory to receive anything"
            if not count:
                return "a bulk connection was closed by the other end"
            self.silent = False
            try:
                self._advance(count)
            except Exception as error:
                self.garbled = True
                return f"what it sent in bulk cannot be read: {says(error)}"
        return None

    def _receive(self, buffer: memoryview) -> int:
        if not self._passes_descriptors:
            return self._sock.recv_into(buffer)
        count, ancillary, _, _ = self._sock.recvmsg_into(
            [buffer], _ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC
        )
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                descriptors = array.array("i")
                descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
                self._descriptors.extend(descriptors)
                if self._drops_descriptors:  # since before they came
                    self.drop_descriptors()
        return count

    def _advance(self, count: int) -> None:
        event = self._decoder.advance(count)
        if isinstance(event, Acknowledged):
            self._sender.acknowledged(event.count)
        elif event is not None:
            if isinstance(event, Chunk):
                self._owe(event.length)
            else:
                self.acknowledge()
            frame = self._link.bulk_event(event, self._sender, self._descriptors)
            if isinstance(event, Chunk) and self._link.is_whole(event.transfer):
                for channel in self._link.bulk_readers:
                    channel.acknowledge_owed()
            if frame is not None:
                self._events.complete(frame)
        if len(self._descriptors) > _MAX_DESCRIPTORS:
            raise FrameError("descriptors that belong to no message")

    def _owe(self, length: int) -> None:
        receipts = self._receipts
        receipts.owed += length
        if receipts.owed >= receipts.limit and receipts.due():
            self.acknowledge()

    def acknowledge(self) -> None:
        """Tells the other end what has arrived."""
        self._receipts.paid()
        self._sender.acknowledge_bulk(self._decoder.received)

    def acknowledge_owed(self) -> None:
        """Tells it if there is anything to tell: a transfer is whole, its memory free again."""
        if self._receipts.owed:
            self.acknowledge()

    @property
    def received(self) -> int:
        """The number of messages that have arrived whole."""
        return self._decoder.received

    def restart(self) -> None:
        """Goes on with another connection, which took the place of the last."""
        self._drops_descriptors = False
        self._decoder.restart()

    def drop_descriptors(self) -> None:
        """Closes descriptors that came with incomplete messages, and those still to come."""
        self._drops_descriptors = True
        with contextlib.suppress(IndexError):  # the thread that reads may take them, too
            while True:
                os.close(self._descriptors.pop())


class BulkMover:
    """The bulk channels of one worker, and the thread that serves them.

    Args:
        name: of the thread, which starts with the first channel.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        with contextlib.ExitStack() as made:  # what is closed if something cannot be made
            self._epoll = made.enter_context(select.epoll())
            self._wake_up = made.enter_context(contextlib.closing(WakeUp()))
            self._epoll.register(self._wake_up.descriptor, select.EPOLLIN)
            made.pop_all()
        self._channels: dict[int, BulkChannel] = {}
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = False

    def add(self, sock: socket.socket, channel: BulkChannel) -> None:
        """Begins to serve a channel; see :meth:`start`."""
        self.start()
        descriptor = sock.fileno()
        self._channels[descriptor] = channel
        self._epoll.register(descriptor, select.EPOLLIN)

    def start(self) -> None:
        """Has the thread run, for good.

        Raises:
            RuntimeError: there cannot be another thread at the moment.
        """
        with self._lock:
            if self._thread is None and not self._closed:
                thread = Thread(target=self._serve, name=self._name, daemon=True)
                thread.start()
                self._thread = thread

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
                    self._handle(descriptor, channel, events)

    def _handle(self, descriptor: int, channel: BulkChannel, events: int) -> None:
        try:
            channel.handle(events)
        except BaseException as error:  # the other channels must not end with this one
            _log.exception("%s: what arrived was not dealt with", self._name)
            try:
                channel.fail(error)
            except BaseException:
                _log.exception("%s: a channel could not be ended", self._name)
                self._drop(descriptor, channel)

    def _drop(self, descriptor: int, channel: BulkChannel) -> None:
        """Serves a channel no more, which would be ready again at once."""
        if self._channels.get(descriptor) is channel:
            del self._channels[descriptor]
            channel.drop_descriptors()
            with contextlib.suppress(OSError, ValueError):
                self._epoll.unregister(descriptor)

    def close(self) -> None:
        """Stops; joins the thread."""
        with self._lock:
            self._closed = True
            thread = self._thread
        self._wake_up.set()
        try:
            if thread is not None and thread is not threading.current_thread():
                thread.join()
        finally:
            self._epoll.close()
            self._wake_up.close()
