"""One-way messages on named channels: sends them, and hands them to subscribers.

Owns the handlers of one worker and the layout of a message's header. A message is a
NOTICE frame with a header (control messages have none): ``version u8, length of the
channel's name u8``, the name, and the table of the tensors; the body is the payload.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial

import torch

from rpc.calls.call_parts import CallParts
from rpc.errors import FrameError, WorkerLostError
from rpc.ids import Life
from rpc.runtime import finalizers, streams
from rpc.runtime.executor import Executor
from rpc.runtime.signals import restore, shut_out
from rpc.runtime.stack_room import require as require_room
from rpc.transports.base import Frame, FrameKind
from rpc.wire.callables import require_callable
from rpc.wire.tensor_table import INLINE_LIMIT, pack_tensors, unpack_tensors

Handler = Callable[[Life, bytes, list[torch.Tensor]], object]
"""Takes one message: its sender, its body and its tensors."""

_VERSION = 1
_HEAD_BYTES = 2
_MAX_NAME_BYTES = 255

_logger = logging.getLogger("rpc")


class Channels:
    """The channels of one worker.

    Args:
        shared: with the other parts of the worker's calls.
        executor: runs handlers.
    """

    def __init__(self, shared: CallParts, executor: Executor) -> None:
        self._shared = shared
        self._executor = executor
        self._lock = threading.Lock()
        self._handlers: dict[str, Handler] = {}
        self._dropped: set[str] = set()

    def subscribe(self, channel: str, handler: Handler) -> Callable[[], None]:
        """Hands the messages of a channel to ``handler``; returns what ends that.

        Raises:
            ValueError: the channel has a handler, or its name is too long.
        """
        _encoded(channel)
        require_callable("handler", handler)
        with self._lock:
            if channel in self._handlers:
                raise ValueError(f"channel={channel!r} has a handler on this worker already")
            self._handlers[channel] = handler

        def unsubscribe() -> None:
            with self._lock:
                if self._handlers.get(channel) is handler:
                    del self._handlers[channel]

        return unsubscribe

    def post(
        self, to: Life, channel: str, body: bytes, tensors: Sequence[torch.Tensor] = ()
    ) -> None:
        """Sends one message.

        Raises:
            WorkerLostError: that life of the worker is over.
            EncodeError: a tensor cannot be sent.
        """
        if not isinstance(body, bytes | bytearray | memoryview):
            raise TypeError(f"body={body!r} is a {type(body).__name__}, not bytes")
        for each in tensors:
            if not isinstance(each, torch.Tensor):
                raise TypeError(f"of tensors={tensors!r}, {each!r} is a {type(each).__name__}")
        name = _encoded(channel)
        if finalizers.running():
            self._shared.references.do_later(partial(self._send, to, name, body, tuple(tensors)))
            return
        before = shut_out()
        try:
            self._send(to, name, body, tensors)
        finally:
            restore(before)

    def _send(self, to: Life, name: bytes, body: bytes, tensors: Sequence[torch.Tensor]) -> None:
        require_room()
        shared = self._shared
        if not shared.group.has(to):
            peer = shared.group.peer(to.worker)
            raise WorkerLostError(peer.info.name, to.incarnation, "that life of it is over")
        table: bytes = b""
        slots: tuple[torch.Tensor, ...] = ()
        if tensors:
            inline = -1 if (to.worker, True) in shared.host_moves else INLINE_LIMIT
            table, slots = pack_tensors(tensors, inline)
            streams.leave_tensors(slots)
        header = bytes((_VERSION, len(name))) + name + table
        shared.control.post_begins(to.worker)
        try:
            shared.transport.send(to.worker, Frame(FrameKind.NOTICE, 0, header, body, slots))
        except BaseException:
            shared.control.post_failed(to.worker)
            shared.shutdown.activity_changed()
            raise

    def arrived(self, sender: Life, frame: Frame, guests: int | None = None) -> None:
        """Hands a message to its handler; called on the transport's thread.

        Args:
            sender: of the message.
            frame: the message.
            guests: how many handlers may run on threads like this one; the transport
                decides if None.

        Raises:
            FrameError: it is none.
        """
        channel, table = _decode(frame.header)
        handler = self._handlers.get(channel)
        if handler is None:
            self._drop(sender, channel)
            return
        inline = self._shared.transport.inline_handlers if guests is None else guests
        self._executor.run_here(partial(self._handle, handler, sender, frame, table), inline)

    def _handle(self, handler: Handler, sender: Life, frame: Frame, table: bytes) -> None:
        try:
            tensors: list[torch.Tensor] = []
            if frame.tensors:
                streams.take_tensors(frame.tensors)
            if table:
                tensors = unpack_tensors(table, frame.tensors).finish()
            handler(sender, bytes(frame.payload), tensors)
        except Exception:
            channel, _ = _decode(frame.header)
            _logger.exception("a handler of channel %r failed for %s", channel, sender)
        finally:
            self._shared.control.post_handled(sender)
            self._shared.shutdown.activity_changed()

    def _drop(self, sender: Life, channel: str) -> None:
        self._shared.control.post_handled(sender)
        with self._lock:
            is_first = channel not in self._dropped
            self._dropped.add(channel)
        if is_first:
            _logger.warning(
                "a message of %s on channel %r is dropped, as will be others: nobody subscribed",
                sender,
                channel,
            )


def _encoded(channel: str) -> bytes:
    if not isinstance(channel, str):
        raise TypeError(f"channel={channel!r} is a {type(channel).__name__}, not a str")
    name = channel.encode()
    if not 0 < len(name) <= _MAX_NAME_BYTES:
        raise ValueError(f"channel={channel!r} must have from 1 to {_MAX_NAME_BYTES} bytes")
    return name


def _decode(header: bytes) -> tuple[str, bytes]:
    """The channel that a header names, and its table of tensors.

    Raises:
        FrameError: it is no such header.
    """
    try:
        version, length = header[:_HEAD_BYTES]
        end = _HEAD_BYTES + length
        if version != _VERSION or len(header) < end:
            raise FrameError(f"a channel message of version {version} and {len(header)} bytes")
        return header[_HEAD_BYTES:end].decode(), header[end:]
    except ValueError as error:
        raise FrameError(f"the header of a channel message is malformed: {error}") from None
