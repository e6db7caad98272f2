"""Keeps Python's state of torch's pool threads from one call to the next.

torch enters Python for each call, on threads that Python did not start. By itself
CPython then makes a thread state, maps memory for its frames, and unmaps it on the
way out, which interrupts every core that runs a thread of the process: three times
per call at the callee, once at the caller. A state that is referred to once more
than it is used stays.

Nor may such a thread be in Python when the interpreter ends: up to 3.13 it is then
ended where it comes back to Python, through C++ of torch's that cannot be left so,
which aborts the process.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from threading import get_ident

from rpc.runtime.threads import running_stacks

_ensure = ctypes.pythonapi.PyGILState_Ensure
_release = ctypes.pythonapi.PyGILState_Release
_raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc
_STAY_LOCKED = 0
_SECONDS_TO_MEET = 0.5


class _ThreadState(threading.local):
    """The state of the running thread."""

    kept: bool = False


class PoolThreads:
    """The pool of one agent.

    Args:
        count: how many threads it has.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._here = _ThreadState()
        self._over = False
        self._kept: set[int] = set()  # changed in single steps, so without a lock
        self._gate = threading.Barrier(count)

    def is_here(self) -> bool:
        """Returns whether the running thread is one of them."""
        return self._here.kept

    def keep(self) -> None:
        """Keeps the state of the thread that calls, from the first time on."""
        if not (self._here.kept or self._over):
            self._here.kept = True
            self._kept.add(get_ident())
            _ensure()

    def in_python(self) -> set[int]:
        """Those that run something now, by what Python identifies threads with."""
        return self._kept & {*running_stacks()}

    def interrupt(self) -> None:
        """Raises ``SystemExit`` in what they run; what waits learns of it when it has waited."""
        for thread in self.in_python():
            _raise_in(ctypes.c_ulong(thread), ctypes.py_object(SystemExit))

    def let_go(self) -> None:
        """Lets the state of the thread that calls go when its call returns.

        To be called ``count`` times at once: each waits for the others, so that no thread
        is called twice. One that a handler holds is not waited for long; its state, some
        20 KB, then stays until the process ends. A handler that is there itself can
        :meth:`meet` the others.
        """
        if self._here.kept:
            self._here.kept = False
            self._kept.discard(get_ident())
            _release(_STAY_LOCKED)
        self.meet()

    def meet(self) -> None:
        """Waits for those that are let go; the state of the thread that calls stays."""
        self._over = True
        with contextlib.suppress(threading.BrokenBarrierError):
            self._gate.wait(_SECONDS_TO_MEET)
