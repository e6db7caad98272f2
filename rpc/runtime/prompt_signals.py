"""Has the main thread run the handler of a signal at once, whichever thread the kernel chose.

Python's own part of a signal handler sets a flag and writes the signal's number to the *wakeup
fd*; the program's part runs on the main thread, between two of its instructions. If the main
thread sleeps in a lock, a poll or a sleep, it looks at the flag only if the kernel interrupts
that. But the kernel may give a signal to any thread of the process, and then the main thread
sleeps on. So a thread of ours reads the wakeup fd and interrupts the main thread by SIGURG, which
the system ignores where nobody handles it, until the main thread has run our handler of it: by
then it has run those of the signals before. All waits of the main thread are so interrupted,
the program's own too, except those inside C++.

If an asyncio loop of the main thread has the wakeup fd, it keeps it.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Final

from rpc.runtime import forks
from rpc.runtime.threads import Thread

_STOP: Final = 0
_NUDGE: Final = signal.SIGURG
_ANSWERS: Final = 2
"""Answers to wait for; the first may belong to a nudge for an earlier signal."""
_FIRST_PAUSE: Final = 0.01
_LONGEST_PAUSE: Final = 0.1

Heard = Callable[[], object]


class _Watch(forks.ForkAware):
    """The wakeup fd, and the thread that reads it. Made and ended on the main thread."""

    def __init__(self) -> None:
        self.listeners: dict[int, Heard] = {}
        self._answers = 0
        """Counts the runs of SIGURG's handler on the main thread; only it changes this."""
        self._main = threading.main_thread().ident or 0
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._handler_before = signal.signal(_NUDGE, self._nudged)
        self.take_wakeup_fd()
        forks.join(self)
        self._thread = Thread(target=self._run, name="rpc-signals", daemon=True)
        self._thread.start()

    def take_wakeup_fd(self) -> None:
        """Becomes the one that hears of signals, unless somebody else is."""
        current = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        if current not in (-1, self._write):
            signal.set_wakeup_fd(current)

    def has_wakeup_fd(self) -> bool:
        """True if the thread hears of signals."""
        current = signal.set_wakeup_fd(-1)
        signal.set_wakeup_fd(current, warn_on_full_buffer=current != self._write)
        return current == self._write

    def end(self) -> None:
        """Puts back what was there before, and joins the thread."""
        forks.leave(self)
        if self.has_wakeup_fd():
            signal.set_wakeup_fd(-1)
        if signal.getsignal(_NUDGE) == self._nudged:
            signal.signal(_NUDGE, self._handler_before or signal.SIG_DFL)
        os.set_blocking(self._write, True)
        os.write(self._write, bytes([_STOP]))
        self._thread.join()
        self._close()

    def after_fork_in_child(self) -> None:
        """Drops the thread, which is the parent's, as is the other end of the pipe."""
        global _watch
        if self.has_wakeup_fd():
            signal.set_wakeup_fd(-1)
        forks.leave(self)
        self._close()
        _watch = None

    def _close(self) -> None:
        os.close(self._read)
        os.close(self._write)

    def _nudged(self, number: int, frame: FrameType | None) -> None:
        self._answers += 1
        if callable(self._handler_before):
            self._handler_before(number, frame)
        _end_if_unused()

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._read, select.POLLIN)
        wanted, pause = 0, _FIRST_PAUSE
        while True:
            is_asleep = self._answers < wanted
            if poll.poll(pause * 1000 if is_asleep else None):
                numbers = os.read(self._read, 512)
                if _STOP in numbers:
                    return
                if self._hear(numbers):
                    wanted, pause = self._answers + _ANSWERS, _FIRST_PAUSE
                    self.nudge()
            elif is_asleep:
                pause = min(2 * pause, _LONGEST_PAUSE)
                self.nudge()

    def _hear(self, numbers: bytes) -> bool:
        """Tells the listeners; False if the signals were nudges only."""
        signals = set(numbers) - {_NUDGE}
        for number in signals:
            heard = self.listeners.get(number)
            if heard is not None:
                heard()
        return bool(signals)

    def nudge(self) -> None:
        """Interrupts the main thread, which then runs the handlers of all signals that came."""
        with contextlib.suppress(ProcessLookupError):  # the main thread has ended
            signal.pthread_kill(self._main, _NUDGE)


_lock: Final = threading.RLock()  # a signal handler may shut down
_watch: _Watch | None = None
_users = 0


def use() -> bool:
    """Begins to watch for signals, or takes the wakeup fd again if that was taken away.

    Returns:
        True if :func:`stop` must follow; False on another thread than the main one, where
        nobody can begin.
    """
    global _watch, _users
    if threading.current_thread() is not threading.main_thread():
        return False
    with _lock:
        _users = _users + 1 if _watch is not None else 1
        if _watch is None:
            _watch = _Watch()
        else:
            _watch.take_wakeup_fd()
    return True


def stop() -> None:
    """Ends what :func:`use` began, with the last user.

    On another thread than the main one, where the wakeup fd cannot be given back, the main thread
    is nudged to do so.
    """
    global _users
    with _lock:
        _users = max(0, _users - 1)
        if threading.current_thread() is threading.main_thread():
            _end_if_unused()
        elif _users == 0 and _watch is not None:
            _watch.nudge()


def _end_if_unused() -> None:
    """Ends the watch if it is unused; may interrupt anything on the main thread, as handlers do."""
    global _watch
    with _lock:
        if _users == 0 and _watch is not None:
            watch, _watch = _watch, None
            watch.end()


@contextlib.contextmanager
def prompt_signals() -> Iterator[None]:
    """Has the main thread hear of signals at once for the block, however it waits there.

    Does nothing on another thread than the main one.
    """
    is_used = use()
    try:
        yield
    finally:
        if is_used:
            stop()


def listen(number: int, heard: Heard) -> Callable[[], None]:
    """Has ``heard`` called at each signal, before its handler.

    Args:
        number: of the signal, for which there is a handler.
        heard: called by the thread that hears of them, also while the main one is in C++; must
            not block.

    Returns:
        What ends that; to be called on the main thread, as this is.
    """
    use()
    watch = _watch
    assert watch is not None
    watch.listeners[number] = heard

    def stop_listening() -> None:
        watch.listeners.pop(number, None)
        stop()

    return stop_listening


def is_heard() -> bool:
    """True if listeners hear of signals; else an asyncio loop has the wakeup fd, or nobody."""
    return _watch is not None and _watch.has_wakeup_fd()
