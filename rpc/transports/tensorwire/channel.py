"""Sending on one socket: from the caller's thread if possible, queued if not.

Owns the socket's writing half. Whoever takes the *writing role* sends; others
leave their frames in the queue, which the one in the role empties before it is
done. When the socket takes no more, the channel asks to be told when it does,
and the thread that is told goes on. Nobody ever blocks here.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import itertools
import os
import socket
import termios
import threading
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from rpc.transports.tensorwire.framing import Buffer, pack_fixed

_BATCH_FRAMES = 64
_BATCH_BYTES = 1 << 20
_BATCH_BUFFERS = 512
_JOIN_BYTES = 16384


class Outgoing(NamedTuple):
    """A frame on its way to the socket; ``descriptor`` is closed once it was passed on."""

    kind: int
    correlation: int
    header: bytes
    table: bytes = b""
    parts: tuple[Buffer, ...] = ()
    inline: int = 0
    descriptor: int = -1

    def size(self) -> int:
        """Bytes it will take on the wire, but for the fixed part."""
        return len(self.header) + len(self.table) + self.inline


class Unsent:
    """Counts the bytes that one link accepted and no socket has taken yet."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._waiters = 0
        self.count = 0

    def add(self, count: int) -> None:
        """Counts bytes, or with a negative count forgets them."""
        with self._lock:
            self.count += count
            if self._waiters and count < 0:
                self._changed.notify_all()

    def wait(self, at_most: int, timeout: float | None) -> bool:
        """Waits until no more than ``at_most`` bytes are left; False when time is up."""
        with self._changed:
            self._waiters += 1
            try:
                return self._changed.wait_for(lambda: self.count <= at_most, timeout)
            finally:
                self._waiters -= 1


class Sender:
    """The writing half of a non-blocking stream socket.

    Args:
        sock: owned by the sender from now on.
        unsent: where queued bytes are counted.
        watch_writable: called with True when :meth:`writable` is wanted as soon
            as the socket takes bytes again, with False when it is not any more.
    """

    def __init__(
        self, sock: socket.socket, unsent: Unsent, watch_writable: Callable[[bool], None]
    ) -> None:
        self.sock = sock
        self._counter = unsent
        self._watch_writable = watch_writable
        self._role = threading.Lock()
        self._queue: deque[Outgoing] = deque()
        self._unsent: deque[memoryview] = deque()
        self._descriptor = -1
        self._sequence = 0
        self._blocked = False
        self._broken = False

    def send(self, item: Outgoing) -> None:
        """Sends or queues a frame; on a broken socket it is dropped."""
        self._queue.append(item)
        self._counter.add(item.size())
        self.flush()

    def send_small(
        self, kind: int, correlation: int, header: bytes, table: bytes, inline: Buffer
    ) -> None:
        """The same for a frame of few bytes, the usual case, without detours."""
        if self._queue or self._unsent or not self._role.acquire(False):
            self._queue_small(kind, correlation, header, table, inline)
            self.flush()
            return
        try:
            if self._queue or self._unsent:
                self._queue_small(kind, correlation, header, table, inline)
            else:
                lengths = (len(header), len(table), len(inline))
                fixed = pack_fixed(kind, correlation, self._sequence, *lengths)
                self._sequence += 1
                self._write(fixed + header + table + inline)
        finally:
            self._role.release()
        # Others may have left work while the role was ours, ``writable`` included.
        if self._queue or self._unsent:
            self.flush()

    def hold_small(
        self, kind: int, correlation: int, header: bytes, table: bytes, inline: Buffer
    ) -> None:
        """Keeps a frame of few bytes until someone calls :meth:`flush`, who must."""
        if not self._queue and self._role.acquire(False):
            try:
                if not (self._queue or self._broken):
                    lengths = (len(header), len(table), len(inline))
                    fixed = pack_fixed(kind, correlation, self._sequence, *lengths)
                    self._sequence += 1
                    data = fixed + header + table + inline
                    self._unsent.append(memoryview(data))
                    self._counter.add(len(data))
                    return
            finally:
                self._role.release()
        self._queue_small(kind, correlation, header, table, inline)

    def _queue_small(
        self, kind: int, correlation: int, header: bytes, table: bytes, inline: Buffer
    ) -> None:
        parts = (inline,) if inline else ()
        item = Outgoing(kind, correlation, header, table, parts, len(inline))
        self._queue.append(item)
        self._counter.add(item.size())

    def queued(self) -> int:
        """Frames that wait to be sent, or what is left of them."""
        return len(self._queue) + len(self._unsent)

    def _write(self, data: bytes) -> None:
        """Sends as much as the socket takes, keeps the rest; called in the writing role."""
        try:
            sent = self.sock.send(data)
        except BlockingIOError:
            sent = 0
        except OSError:
            self._break()
            return
        if sent < len(data):
            self._unsent.append(memoryview(data)[sent:])
            self._counter.add(len(data) - sent)
            self._wait_writable()

    def flush(self) -> None:
        """Sends what is queued, unless another thread is doing so or the socket is full."""
        while (self._queue or self._unsent) and not self._blocked:
            if not self._role.acquire(False):
                return
            try:
                self._write_batch()
            finally:
                self._role.release()

    def _write_batch(self) -> None:
        """Sends as much as one system call takes; called in the writing role."""
        if self._broken:
            self._drop_all()
            return
        if self._descriptor < 0:
            self._load_batch()
        if not self._unsent:
            return
        buffers = list(itertools.islice(self._unsent, _BATCH_BUFFERS))
        try:
            if self._descriptor >= 0:
                sent = socket.send_fds(self.sock, buffers, [self._descriptor])
                self._close_descriptor()
            else:
                sent = self.sock.sendmsg(buffers)
        except BlockingIOError:
            self._wait_writable()
        except OSError:
            self._break()
        else:
            self._advance(sent)

    def _load_batch(self) -> None:
        """Moves frames from the queue to ``_unsent``; one with a descriptor comes alone."""
        if self._unsent:
            return
        size = 0
        for _ in range(_BATCH_FRAMES):
            if not self._queue or size > _BATCH_BYTES:
                return
            if self._queue[0].descriptor >= 0:
                if not self._unsent:
                    item = self._queue.popleft()
                    self._descriptor = item.descriptor
                    self._load(item)
                return
            size += self._load(self._queue.popleft())

    def _load(self, item: Outgoing) -> int:
        kind, correlation, header, table, parts, inline, _ = item
        fixed = pack_fixed(kind, correlation, self._sequence, len(header), len(table), inline)
        self._sequence += 1
        if inline <= _JOIN_BYTES:
            head = b"".join((fixed, header, table, *parts))
            self._unsent.append(memoryview(head))
        else:
            self._unsent.append(memoryview(b"".join((fixed, header, table))))
            self._unsent.extend(memoryview(part) for part in parts if len(part))
        self._counter.add(len(fixed))
        return len(fixed) + item.size()

    def _close_descriptor(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _advance(self, sent: int) -> None:
        """Forgets the first ``sent`` bytes of ``_unsent``."""
        left = sent
        while left:
            first = self._unsent[0]
            if left < len(first):
                self._unsent[0] = first[left:]
                break
            left -= len(first)
            self._unsent.popleft()
        self._counter.add(-sent)

    def _wait_writable(self) -> None:
        self._blocked = True
        self._watch_writable(True)

    def writable(self) -> None:
        """The socket takes bytes again: goes on with the queue."""
        self._watch_writable(False)
        self._blocked = False
        self.flush()

    def _break(self) -> None:
        """The other end is gone; the reading half will find out by itself."""
        self._broken = True
        self.shutdown()
        self._drop_all()

    def _drop_all(self) -> None:
        self._close_descriptor()
        self._counter.add(-sum(len(view) for view in self._unsent))
        self._unsent.clear()
        while self._queue:
            item = self._queue.popleft()
            self._counter.add(-item.size())
            if item.descriptor >= 0:
                os.close(item.descriptor)

    def in_kernel(self) -> bool:
        """True while bytes have not been acknowledged by the other host."""
        if self.sock.family == socket.AF_UNIX:
            return False
        unacknowledged = array.array("i", [0])
        try:
            fcntl.ioctl(self.sock.fileno(), termios.TIOCOUTQ, unacknowledged)
        except (OSError, ValueError):
            return False
        return unacknowledged[0] > 0

    def shutdown(self) -> None:
        """Ends the connection; what has arrived can still be read."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Closes the socket, never under the hands of a thread that is sending."""
        with self._role:
            self._broken = True
            self._drop_all()
            self.sock.close()
