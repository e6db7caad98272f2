"""Sending on one socket: from the caller's thread if possible, queued if not.

Owns the socket's writing half. Whoever takes the *writing role* sends; others
leave their frames in the queue, which the one in the role empties before it is
done. When the socket takes no more, the channel asks to be told when it does,
and the thread that is told goes on. Nobody ever blocks here.

What was sent is remembered until it is acknowledged. When the connection breaks,
frames wait until another one takes its place, which is sent first what got lost.
"""

from __future__ import annotations

import array
import contextlib
import errno
import fcntl
import itertools
import os
import socket
import termios
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import NamedTuple
from zlib import crc32

from rpc.protocol.resumption import SentMessages
from rpc.transports.tensorwire.framing import (
    CHECKSUM,
    FIXED,
    FIXED_SIZE,
    MAGIC,
    VERSION,
    Buffer,
    WireKind,
    pack_fixed,
    pack_pair,
)
from rpc.transports.tensorwire.tls_socket import take_the_place

_BATCH_FRAMES = 64
_BATCH_BYTES = 1 << 20
_BATCH_BUFFERS = 512
_JOIN_BYTES = 16384
_OUR_FAULTS = frozenset(
    {errno.EFAULT, errno.EINVAL, errno.EBADF, errno.EMSGSIZE, errno.ENOTSOCK, errno.EOPNOTSUPP}
)
"""Errors of what is sent, not of the connection: on another one they would come again."""
_GAP = memoryview(b"\0")
"""Stands among the unsent bytes while there is no connection, so that every frame is queued."""


class QueuedFrame(NamedTuple):
    """A frame on its way to the socket; ``descriptor`` is closed once it has arrived."""

    kind: int
    correlation: int
    header: bytes
    table: bytes = b""
    parts: tuple[Buffer, ...] = ()
    inline: int = 0
    descriptor: int = -1

    def size(self) -> int:
        """Bytes it will take on the wire."""
        return FIXED_SIZE + len(self.header) + len(self.table) + self.inline


class _Sent(NamedTuple):
    """A frame as it was sent that is not just a few bytes."""

    buffers: tuple[Buffer, ...]
    descriptor: int


def pack_small(
    kind: int, correlation: int, sequence: int, header: bytes, table: bytes, inline: Buffer
) -> bytes:
    """A whole frame, of few bytes."""
    lengths = len(header), len(table), len(inline)
    head = FIXED.pack(MAGIC, VERSION, kind, *lengths, correlation, sequence)
    return head + CHECKSUM.pack(crc32(head)) + header + table + inline


class Unsent:
    """Counts the bytes that one link accepted and no socket has taken yet."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self.waiters = 0
        self._moves = 0
        self.count = 0

    def add(self, count: int) -> None:
        """Counts bytes, or with a negative count forgets them."""
        with self._lock:
            self.count += count
            if self.waiters and count < 0:
                self._moves += 1
                self._changed.notify_all()

    def wait(self, at_most: int, timeout: float | None) -> bool:
        """Waits until no more than ``at_most`` bytes are left; False when time is up."""
        with self._changed:
            self.waiters += 1
            try:
                return self._changed.wait_for(lambda: self.count <= at_most, timeout)
            finally:
                self.waiters -= 1

    def wait_while_moving(self, at_most: int, patience: float) -> bool:
        """Waits as long as some leave; False if none have for ``patience`` seconds."""
        with self._changed:
            self.waiters += 1
            try:
                while self.count > at_most:
                    if not self._changed.wait_for(
                        partial(self._moved_since, self._moves), patience
                    ):
                        return False
            finally:
                self.waiters -= 1
        return True

    def _moved_since(self, seen: int) -> bool:
        return self._moves != seen


class Sender:
    """The writing half of a non-blocking stream socket.

    Args:
        sock: owned by the sender from now on.
        unsent: where queued bytes are counted.
        watch_writable: called with True when :meth:`writable` is wanted as soon
            as the socket takes bytes again, with False when it is not any more.
        remember: how many frames to remember until they are acknowledged; 0 if a
            connection that breaks is not to be replaced.

    Attributes:
        fault: why what is to be sent can be sent on no connection; empty while it can.
    """

    def __init__(
        self,
        sock: socket.socket,
        unsent: Unsent,
        watch_writable: Callable[[bool], None],
        remember: int = 0,
    ) -> None:
        self.sock = sock
        self.fault = ""
        self._counter = unsent
        self._watch_writable = watch_writable
        self._role = threading.Lock()
        self._queue: deque[QueuedFrame] = deque()
        self._unsent: deque[memoryview] = deque()
        self._loaded = 0
        """Bytes of the counter that do not stand in the queue."""
        self._sent: SentMessages[bytes | _Sent] = SentMessages(remember)
        self.unacknowledged = self._sent.messages
        self._remembers = remember > 0
        self._again: list[bytes | _Sent] = []
        self._generation = 0
        self._passing: list[int] = []
        self._sequence = 0
        self._blocked = False
        self._broken = False
        self._closed = False

    def send(self, item: QueuedFrame) -> None:
        """Sends or queues a frame; dropped if the socket is broken for good.

        Raises:
            MemoryError: there is none for it; it is not sent, as with the other methods that
                take a frame.
        """
        self._enqueue(item)
        self.flush()

    def _enqueue(self, item: QueuedFrame) -> None:
        size = item.size()
        self._counter.add(size)
        try:
            self._queue.append(item)
        except BaseException:
            self._counter.add(-size)
            raise

    def send_small(
        self, kind: int, correlation: int, header: bytes, table: bytes, inline: Buffer
    ) -> None:
        """Sends or queues a frame of few bytes, the usual case, without detours."""
        if self._queue or self._unsent or not self._role.acquire(False):
            self._queue_small(kind, correlation, header, table, inline)
            self.flush()
            return
        try:
            if self._queue or self._unsent:
                self._queue_small(kind, correlation, header, table, inline)
            else:
                sequence = self._sequence
                data = pack_small(kind, correlation, sequence, header, table, inline)
                after = sequence + 1  # before it is remembered: there may be no memory
                self.unacknowledged.append(data)
                self._sequence = after
                try:
                    sent = self.sock.send(data)
                    if sent < len(data):
                        self._keep_rest(data, sent)
                except BlockingIOError:
                    self._keep_rest(data, 0)
                except OSError as error:
                    self._failed(error)
                except BaseException as error:
                    self._spoiled(error)
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
                    sequence = self._sequence
                    data = pack_small(kind, correlation, sequence, header, table, inline)
                    after = sequence + 1  # as above
                    self.unacknowledged.append(data)
                    self._sequence = after
                    try:
                        self._keep(memoryview(data))
                    except BaseException as error:
                        self._spoiled(error)
                    return
            finally:
                self._role.release()
        self._queue_small(kind, correlation, header, table, inline)

    def _keep(self, data: memoryview) -> None:
        """Remembers bytes of a frame that was not queued; called in the writing role."""
        loaded = self._loaded + len(data)
        self._counter.add(len(data))
        self._loaded = loaded
        self._unsent.append(data)

    def _queue_small(
        self, kind: int, correlation: int, header: bytes, table: bytes, inline: Buffer
    ) -> None:
        parts = (inline,) if inline else ()
        self._enqueue(QueuedFrame(kind, correlation, header, table, parts, len(inline)))

    def queued(self) -> int:
        """Frames that wait to be sent, or what is left of them."""
        return len(self._queue) + len(self._unsent)

    def _keep_rest(self, data: bytes, sent: int) -> None:
        """Keeps what the socket did not take; called in the writing role."""
        try:
            self._keep(memoryview(data)[sent:])
            self._wait_writable()
        except BaseException as error:
            self._spoiled(error)

    def flush(self) -> None:
        """Sends what is queued, unless another thread is doing so or the socket is full."""
        while (self._queue or self._unsent) and not self._blocked:
            if not self._role.acquire(False):
                return
            try:
                self._write_batch()
            except BaseException as error:
                self._spoiled(error)
                return
            finally:
                self._role.release()

    def _spoiled(self, error: BaseException) -> None:
        """Ends sending in the middle: what was not sent whole is, on another connection.

        Nothing else would do: what has left of a frame nobody knows, and the frame may be one
        of another thread's. Called in the writing role, where there may be neither memory nor
        stack for much.
        """
        self._broken = True
        try:  # noqa: SIM105, which would take more stack
            self.sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        if not self._remembers:
            self.fault = f"what was to be sent to it could not be sent: {type(error).__name__}"
        if not isinstance(error, Exception):
            raise error

    def _write_batch(self) -> None:
        """Sends as much as one system call takes; called in the writing role."""
        if self._broken:
            self._stop()
            return
        if not self._passing:
            self._load_batch()
        if not self._unsent:
            return
        buffers = list(itertools.islice(self._unsent, _BATCH_BUFFERS))
        try:
            sent = self._pass_on(buffers) if self._passing else self.sock.sendmsg(buffers)
        except BlockingIOError:
            self._wait_writable()
        except OSError as error:
            self._failed(error)
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
            descriptor = self._queue[0].descriptor
            if descriptor >= 0:
                if not self._unsent:
                    self._load()
                    self._passing.append(descriptor)
                return
            size += self._load()

    def _load(self) -> int:
        """Moves one frame. Copies little: without memory, it stays where it is.

        Once it is remembered, nothing that may fail comes before it has left the queue.
        """
        item = self._queue[0]
        kind, correlation, header, table, parts, inline, descriptor = item
        fixed = pack_fixed(kind, correlation, self._sequence, len(header), len(table), inline)
        buffers: tuple[Buffer, ...]
        sent: bytes | _Sent
        if inline <= _JOIN_BYTES and len(header) + len(table) <= _JOIN_BYTES:
            head = b"".join((fixed, header, table, *parts))
            buffers = (head,)
            sent = head if descriptor < 0 else _Sent(buffers, descriptor)
        else:
            buffers = (fixed, header, table, *parts)
            sent = _Sent(buffers, descriptor)
        views = [memoryview(part) for part in buffers if len(part)]
        frames = self.unacknowledged
        forgotten = [frames[0]] if self._remembers and len(frames) == frames.maxlen else None
        size = item.size()
        sequence, loaded = self._sequence + 1, self._loaded + size
        frames.append(sent)
        self._sequence, self._loaded = sequence, loaded
        self._queue.popleft()
        self._unsent.extend(views)
        if forgotten:
            _close_descriptors(forgotten)
        return size

    def _pass_on(self, buffers: list[memoryview]) -> int:
        """Sends bytes and the descriptors that go with them.

        Without these, where the system has too many on their way: what they are for is
        refused by the other end then, as where they get lost there, and tried again later.
        """
        try:
            sent = socket.send_fds(self.sock, buffers, self._passing)
        except OSError as error:
            if error.errno != errno.ETOOMANYREFS:
                raise
            sent = self.sock.sendmsg(buffers)
        self._passed_on()
        return sent

    def _passed_on(self) -> None:
        """Lets go of descriptors that left, or never will; what is remembered keeps its own."""
        if not self._remembers:
            for descriptor in self._passing:
                os.close(descriptor)
        self._passing.clear()

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
        loaded = self._loaded - sent
        self._counter.add(-sent)
        self._loaded = loaded

    def _wait_writable(self) -> None:
        self._blocked = True
        self._watch_writable(True)

    def writable(self) -> None:
        """Goes on with the queue, as the socket takes bytes again."""
        self._watch_writable(False)
        self._blocked = False
        self.flush()

    def _failed(self, error: OSError) -> None:
        """Stops, as the system does not send; called in the writing role."""
        if error.errno in _OUR_FAULTS and not self._closed:
            self.fault = f"what was to be sent to it cannot be sent: {error.strerror}"
        self._stop()

    def _stop(self) -> None:
        """Stops, as the connection is gone; the reading half will find out by itself."""
        self._broken = True
        self.shutdown()
        self._forget_unsent()
        if self._closed or not self._remembers:
            self._blocked = False
            self._drop_queue()
        else:
            self._blocked = True
            self._keep(_GAP)

    def _forget_unsent(self) -> None:
        self._passed_on()
        self._counter.add(-self._loaded)
        self._loaded = 0
        self._unsent.clear()

    def _drop_queue(self) -> None:
        while self._queue:
            item = self._queue.popleft()
            self._counter.add(-item.size())
            if item.descriptor >= 0:
                os.close(item.descriptor)

    def acknowledged(self, received: int) -> None:
        """Notes that ``received`` of the frames sent have arrived.

        Raises:
            FrameError: so many were never sent.
        """
        with self._role:
            forgotten = self._sent.acknowledged(self._sequence, received)
        self.flush()
        _close_descriptors(forgotten)

    def acknowledge(self, received: int) -> None:
        """Tells the other end that ``received`` frames of its have arrived on a main channel."""
        self.send_small(WireKind.ACKNOWLEDGE, received, b"", b"\1", b"")

    def acknowledge_bulk(self, received: int) -> None:
        """Tells the other end that ``received`` messages have arrived on a bulk channel."""
        self.send(QueuedFrame(WireKind.ACKNOWLEDGE, received, pack_pair(0, 0)))

    def stop(self) -> None:
        """Queues what is sent from now on, until another connection takes the socket's place."""
        with self._role:
            self._generation += 1  # who was about to go on with the connection does not
            self._stop()

    def replace(self, sock: socket.socket, received: int, greeting: bytes = b"") -> int:
        """Puts a new connection in the place of the broken one, behind the same socket.

        To be called after :meth:`stop`, while nobody reads. Nothing is sent on it, but for
        the greeting, before :meth:`resume`.

        Args:
            sock: the new connection; closed, as the socket takes its place.
            received: how many frames have arrived at the other end.
            greeting: to be sent before anything else.

        Returns:
            What :meth:`resume` takes.

        Raises:
            CannotResumeError: what the other end lacks is not remembered any more.
        """
        with self._role:
            self._again = self._sent.missing(self._sequence, received)
            with sock, contextlib.suppress(OSError):  # what is wrong, the reader will see
                if greeting:
                    sock.send(greeting)
                take_the_place(self.sock, sock)
            self._generation += 1
            return self._generation

    def resume(self, generation: int) -> None:
        """Sends what got lost, and goes on; to be called when the new connection is read.

        Does nothing if that broke meanwhile, and another takes its place. Breaks it if what
        is to be sent cannot be.
        """
        with self._role:
            if generation != self._generation:
                return
            try:
                self._go_on()
            except BaseException as error:
                self._spoiled(error)
                return
        self.flush()

    def _go_on(self) -> None:
        """Sends the queue on a new connection; called in the writing role."""
        again, self._again = self._again, []
        self._forget_unsent()
        self._blocked = False
        if self._closed:
            return
        for frame in again:
            buffers, descriptor = ((frame,), -1) if isinstance(frame, bytes) else frame
            for part in buffers:
                if len(part):
                    self._keep(memoryview(part))
            if descriptor >= 0:
                self._passing.append(descriptor)
        if again:
            self._sent.sent_again()
        self._watch_writable(False)
        self._broken = False

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
            self._closed = True
            self._stop()
            self.sock.close()
            forgotten = self._sent.forget()
        self.flush()  # drops what was queued by those who found the role taken
        _close_descriptors(forgotten)


def _close_descriptors(frames: list[bytes | _Sent]) -> None:
    for frame in frames:
        if isinstance(frame, _Sent) and frame.descriptor >= 0:
            os.close(frame.descriptor)
