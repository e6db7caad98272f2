"""The way of frames from a worker to itself, for transports that need no wire for it.

What travels is copied, as on any other way: who sends and who receives never share
memory. One thread delivers, in the order in which frames were sent; it is started by
the first.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue

from rpc.runtime import streams
from rpc.runtime.threads import Thread
from rpc.transports.base import Frame

_log = logging.getLogger(__name__)


class Loopback:
    """Delivers what a worker sends to itself.

    Args:
        name: of the thread.
        deliver: takes each frame, on that thread, and must not block it.
    """

    def __init__(self, name: str, deliver: Callable[[Frame], None]) -> None:
        self._name = name
        self._deliver = deliver
        self._lock = threading.Lock()
        self._queue: SimpleQueue[Frame | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False

    def send(self, frame: Frame) -> bool:
        """Queues a copy of a frame with host tensors; False if this is closed."""
        copied = copy(frame)
        with self._lock:
            if self._closed:
                return False
            if self._thread is None:
                self._thread = Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            self._queue.put(copied)
        return True

    def is_here(self) -> bool:
        """Returns whether the running thread is the one that delivers."""
        return threading.current_thread() is self._thread

    def close(self, deadline: float) -> None:
        """Takes no more, and waits until what was sent has been delivered.

        Args:
            deadline: how long to wait, in seconds of the monotonic clock.
        """
        with self._lock:
            self._closed = True
            thread = self._thread
        if thread is not None:
            self._queue.put(None)
            thread.join(max(0.0, deadline - time.monotonic()))

    def _run(self) -> None:
        while (frame := self._queue.get()) is not None:
            try:
                self._deliver(frame)
            except Exception:
                _log.exception("%s could not deliver a frame", self._name)
            del frame


def copy(frame: Frame) -> Frame:
    """A frame that shares no memory with this one which anybody could change."""
    tensors = tuple(tensor.detach().clone() for tensor in frame.tensors)
    if tensors:
        streams.leave_tensors(tensors)
    return frame._replace(payload=bytes(frame.payload), tensors=tensors)
