"""Threads that can be started as long as Python code runs, and what each runs.

Owns one way round Python 3.12, which starts none any more once the main module has ended,
although exit hooks and other threads run on; earlier and later releases do. A call made
there, or an exit itself, needs them, and the operating system still has them.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import os
import re
import sys
import threading
from typing import Final, NamedTuple

from rpc.ids import new_tuple

_REFUSED = "at interpreter shutdown"
_THREAD: Final = re.compile(r"(?:Current t|T)hread 0x([0-9a-f]+) .*\(most recent call first\):")
_PLACE: Final = re.compile(r'  File "(.*)", line (\d+|\?\?\?) in (.*)')
_MOST_THREADS: Final = 100
"""Threads that ``faulthandler`` tells of at most."""
_looking = threading.Lock()
"""Held while the collector is off for the sake of a look at the threads."""
_ESCAPED: Final = re.compile(r"\\(?:x[0-9a-f]{2}|u[0-9a-f]{4}|U[0-9a-f]{8})")


class Thread(threading.Thread):
    """A ``threading.Thread`` that can also be started in exit hooks."""

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


class Place(NamedTuple):
    """The point that a thread has reached in one function.

    Args:
        function: its name.
        file: of its code.
        line: that runs, or that called the next function; 0 if Python does not know.
    """

    function: str
    file: str
    line: int


def running_stacks() -> dict[int, list[Place]]:
    """The functions that each thread which runs Python code is in, innermost first, by its ident.

    The innermost 100 functions of the 100 youngest threads, as ``faulthandler`` tells them while
    no other thread runs; of older threads beyond them the innermost function. Frames of other
    threads, as ``sys._current_frames`` gives them, must not be followed: their ``f_back`` is read
    while those threads return, and in CPython 3.11 it then leads to memory that is other
    objects' by now.
    """
    told = os.memfd_create("stacks", os.MFD_CLOEXEC)
    try:
        faulthandler.dump_traceback(told, all_threads=True)
        text = os.pread(told, os.fstat(told).st_size, 0).decode("ascii", "backslashreplace")
    finally:
        os.close(told)
    stacks: dict[int, list[Place]] = {}
    stack: list[Place] = []
    for line in (_unescaped(text) if "\\" in text else text).splitlines():
        if thread := _THREAD.match(line):
            stack = stacks[int(thread[1], 16)] = []
        elif place := _PLACE.match(line):
            file, number, function = place.groups()
            where = int(number) if number.isdecimal() else 0
            stack.append(new_tuple(Place, (function, file, where)))
    if len(stacks) >= _MOST_THREADS:
        _add_older(stacks)
    return {ident: stack for ident, stack in stacks.items() if stack}


def _add_older(stacks: dict[int, list[Place]]) -> None:
    """Adds the innermost function of threads that are not there.

    Python holds a lock over all threads meanwhile. A collection of garbage, if that call set it
    off, could free a ``threading.local``, which waits for the same lock, for ever: so none may.
    """
    with _looking:
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            frames = sys._current_frames()
        finally:
            if was_enabled:
                gc.enable()
    for ident in frames.keys() - stacks.keys():
        frame = frames[ident]
        code = frame.f_code
        stacks[ident] = [Place(code.co_name, code.co_filename, frame.f_lineno or 0)]


def _unescaped(text: str) -> str:
    """Restores characters beyond ASCII, which ``faulthandler`` escapes."""
    return _ESCAPED.sub(lambda found: chr(int(found[0][2:], 16)), text)
