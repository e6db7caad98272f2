"""Threads that can be started as long as Python code runs, and what each runs.

Owns one way round Python 3.12, which starts none any more once the main module has ended,
although exit hooks and other threads run on; earlier and later releases do. A call made
there, or an exit itself, needs them, and the operating system still has them.
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import threading
from types import FrameType

_REFUSED = "at interpreter shutdown"
_looking = threading.Lock()
"""Held while the collector is off for the sake of a look at the threads."""


class Thread(threading.Thread):
    """As ``threading.Thread``, and can be started in exit hooks."""

    def start(self) -> None:
        """See ``threading.Thread.start``.

        Raises:
            RuntimeError: there cannot be another thread, or it was started before.
        """
        try:
            super().start()
        except RuntimeError as error:
            if _REFUSED not in str(error) or sys.is_finalizing():
                raise
            _begin(self)
            self._started.wait()  # type: ignore[attr-defined]


_begun: dict[int, threading.Thread] = {}


def _run(key: int) -> None:
    _begun.pop(key)._bootstrap()  # type: ignore[attr-defined]


_ENTRY = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(_run)


def _begin(thread: threading.Thread) -> None:
    """Has the operating system run what Python would have it run."""
    key = id(thread)
    _begun[key] = thread
    starting, lock = threading._limbo, threading._active_limbo_lock  # type: ignore[attr-defined]
    with lock:
        starting[thread] = thread
    system = ctypes.CDLL(None)
    handle = ctypes.c_void_p()
    failure = system.pthread_create(ctypes.byref(handle), None, _ENTRY, ctypes.c_void_p(key))
    if failure:
        del _begun[key]
        with lock:
            del starting[thread]
        raise RuntimeError(f"can't start new thread: {os.strerror(failure)}")
    system.pthread_detach(handle)


def running_frames() -> dict[int, FrameType]:
    """The frame that each thread runs, by its ident.

    Python holds a lock over all threads meanwhile. A collection of garbage, if that call set it
    off, could free a ``threading.local``, which waits for the same lock, for ever: so none may.
    """
    with _looking:
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            return sys._current_frames()
        finally:
            if was_enabled:
                gc.enable()
