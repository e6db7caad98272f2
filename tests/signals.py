"""Signals, for tests that are sent some."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.waiting import until

_SECONDS_TO_SLEEP = 60.0


def freeze(pid: int) -> None:
    """Stops a process; returns when it has, as the signal alone does not wait for that.

    What runs on another core goes on for a while, and may answer what it is sent.
    """
    os.kill(pid, signal.SIGSTOP)
    threads = Path("/proc", str(pid), "task")
    until(lambda: all(_state(thread) == "T" for thread in threads.iterdir()))


def _state(thread: Path) -> str:
    """The state of ``man 5 proc``; the name, which comes before, is in parentheses."""
    try:
        return (thread / "stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "gone"  # since it was listed


@contextmanager
def heeding_interrupts() -> Iterator[None]:
    """This process, and what it starts inside, heeds Ctrl-C, although it may run in the background.

    A shell has what it puts there ignore it.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def signalled_elsewhere(
    number: int = signal.SIGTERM, when: Callable[[], bool] | None = None
) -> Iterator[None]:
    """Sends this process a signal, by ``tgkill``, to another thread than the main one.

    A handler that raises may do so as soon as this is entered: what expects that, such as
    ``pytest.raises``, goes around this and not into it.

    Args:
        number: of the signal.
        when: it is sent once this is true and the main thread sleeps.
    """
    entered = threading.Event()

    def send() -> None:
        entered.wait(_SECONDS_TO_SLEEP)
        until(lambda: _sleeps() and (when is None or when()) and _sleeps(), _SECONDS_TO_SLEEP)
        signal.pthread_kill(threading.get_ident(), number)

    other = threading.Thread(target=send)
    other.start()
    try:
        entered.set()
        yield
    finally:
        other.join()


def functions_of_the_main_thread() -> list[str]:
    """Their names, innermost first. To be asked while it sleeps: its frames are followed."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    names = []
    while frame is not None:
        names.append(frame.f_code.co_name)
        frame = frame.f_back
    return names


def _sleeps() -> bool:
    """True if the main thread, whose id is the process's, waits in the kernel."""
    return _state(Path("/proc/self/task", str(os.getpid()))) == "S"
