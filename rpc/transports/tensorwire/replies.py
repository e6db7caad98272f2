"""Reads the links this worker opened: replies, in the thread that waits for one.

All readers sleep in the same epoll instance, edge-triggered. Linux wakes the one
that came last, which is the thread that just sent a request and now waits; a
background thread lies below it and wakes when nobody waits. So nothing is
handed from thread to thread, and no reply ever goes unread.

At most one waiting thread reads, the *leader*; others sleep in their own way
and are woken by what is delivered to them.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty, SimpleQueue

from rpc.transports.base import Frame
from rpc.transports.tensorwire.main_reader import MainReader

_EDGE = select.EPOLLIN | select.EPOLLRDHUP | select.EPOLLET
_GONE = select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR
_EVENTS = 16
_RECHECK_SECONDS = 0.05
"""A leader looks at its ``done()`` this often even if nobody calls ``wake``."""


@dataclass(frozen=True, slots=True)
class ChannelEvents:
    """What happens on a main channel, for the link's owner.

    Args:
        deliver: takes a frame; must not raise.
        writable: the socket takes bytes again.
        ended: nothing more will come, for the given reason; called once.
    """

    deliver: Callable[[Frame], None]
    writable: Callable[[], None]
    ended: Callable[[str], None]


class _Channel:
    """One main channel among the reply side's."""

    def __init__(self, reader: MainReader, events: ChannelEvents) -> None:
        self._reader = reader
        self._deliver = events.deliver
        self._writable = events.writable
        self._ended = events.ended
        self._reading = threading.Lock()
        self._again = False
        self._over = False

    def handle(self, events: int) -> None:
        """Acts on an edge."""
        if events & select.EPOLLOUT:
            self._writable()
        if events & ~select.EPOLLOUT:
            self._drain(bool(events & _GONE))

    def _drain(self, to_the_end: bool) -> None:
        """Reads until nothing is left, unless another thread is doing so: then it will."""
        reader = self._reader
        while True:
            if not self._reading.acquire(False):
                self._again = True
                if not self._reading.acquire(False):
                    return
            self._again = False
            try:
                if self._over:
                    return
                frames = reader.read()
                more, over = reader.more, reader.over
                self._over = bool(over)
            finally:
                self._reading.release()
            for frame in frames:
                self._deliver(frame)
            if over:
                self._ended(over)
                return
            if not (more or to_the_end or self._again):
                return


class ReplySide:
    """The reading of replies.

    Args:
        name: of the background thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._epoll = select.epoll()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._bell, select.EPOLLIN)
        self._channels: dict[int, _Channel] = {}
        self._leading = threading.Lock()
        self._leader_done: Callable[[], bool] | None = None
        self._leader_thread = 0
        self._leader_left: SimpleQueue[None] = SimpleQueue()
        self._standing_aside = False
        self._background_thread = 0
        self._threads: list[threading.Thread] = []
        self._closed = False

    def start(self) -> None:
        """Starts the background reader."""
        thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def add(self, sock: socket.socket, reader: MainReader, events: ChannelEvents) -> None:
        """Begins to read a channel."""
        self._channels[sock.fileno()] = _Channel(reader, events)
        self._epoll.register(sock.fileno(), _EDGE)

    def watch_writable(self, sock: socket.socket, wanted: bool) -> None:
        """Asks that the channel be told when its socket takes bytes, or not any more."""
        with contextlib.suppress(OSError, ValueError):
            self._epoll.modify(sock.fileno(), _EDGE | (select.EPOLLOUT if wanted else 0))

    def remove(self, sock: socket.socket) -> None:
        """Forgets a channel; to be called before its socket is closed."""
        self._channels.pop(sock.fileno(), None)
        with contextlib.suppress(OSError, ValueError):
            self._epoll.unregister(sock.fileno())

    def is_reading_here(self) -> bool:
        """True on a thread that reads for others, which therefore must not wait."""
        return threading.get_ident() in (self._leader_thread, self._background_thread)

    def wait(self, done: Callable[[], bool], block: Callable[[], None]) -> None:
        """Reads until ``done()``, or calls ``block`` if another thread does already."""
        if not self._leading.acquire(False):
            if threading.get_ident() == self._background_thread:
                self.start()
            block()
            return
        self._leader_thread = threading.get_ident()
        self._leader_done = done
        try:
            while not (done() or self._closed):
                self._poll(_RECHECK_SECONDS)
        finally:
            self._leader_done = None
            self._leader_thread = 0
            self._leading.release()
            if self._standing_aside:
                self._leader_left.put(None)
        if not done():
            block()

    def wake(self) -> bool:
        """Makes the leader look at its ``done()`` again; True if it had to be told."""
        done = self._leader_done
        if done is None or not done():
            return False
        os.eventfd_write(self._bell, 1)
        return True

    def _serve(self) -> None:
        me = threading.get_ident()
        self._background_thread = me
        while not self._closed and self._background_thread == me:
            self._poll(-1)
            if self._leader_done is not None and self.wake():
                self._stand_aside()

    def _stand_aside(self) -> None:
        """Leaves the reading to the leader until it is done, or a while."""
        self._standing_aside = True
        if self._leader_done is not None:
            with contextlib.suppress(Empty):
                self._leader_left.get(timeout=_RECHECK_SECONDS)
        self._standing_aside = False

    def _poll(self, timeout: float) -> None:
        for descriptor, events in self._epoll.poll(timeout, _EVENTS):
            channel = self._channels.get(descriptor)
            if channel is not None:
                channel.handle(events)
            elif descriptor == self._bell and not self._closed:
                self._answer_bell()

    def _answer_bell(self) -> None:
        """The bell is the leader's, if there is one, who may not have fallen asleep yet."""
        if self._leader_thread in (0, threading.get_ident()):
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._bell)
        else:
            self._stand_aside()

    def close(self) -> None:
        """Stops reading; joins the background reader."""
        self._closed = True
        os.eventfd_write(self._bell, 1)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()
        here = self._leader_thread == threading.get_ident()
        with contextlib.nullcontext() if here else self._leading:
            self._epoll.close()
            os.close(self._bell)
