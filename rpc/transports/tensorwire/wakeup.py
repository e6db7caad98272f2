"""Wakes a thread that waits in epoll."""

from __future__ import annotations

import contextlib
import os
import threading


class WakeUp:
    """An eventfd, to be registered with an epoll; may be set at any time, also once closed.

    The lock keeps a late call from reaching whatever got the descriptor's number next.

    Attributes:
        descriptor: the eventfd's.
    """

    def __init__(self) -> None:
        self.descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()
        self._closed = False

    def set(self) -> None:
        """Makes the descriptor readable."""
        with self._lock:
            if not self._closed:
                os.eventfd_write(self.descriptor, 1)

    def clear(self) -> None:
        """Makes the descriptor unreadable again."""
        with self._lock:
            if not self._closed:
                with contextlib.suppress(BlockingIOError):  # nobody rang
                    os.eventfd_read(self.descriptor)

    def close(self) -> None:
        """Gives the descriptor back."""
        with self._lock:
            self._closed = True
            os.close(self.descriptor)
