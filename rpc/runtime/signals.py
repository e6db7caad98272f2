"""Keeps Ctrl-C out of half-done work.

Python runs signal handlers on the main thread, between any two of its instructions. The
``KeyboardInterrupt`` that its own handler of SIGINT raises there ends whatever the thread was
doing: a frame that was read would be lost, a call would be counted that was never sent. So
while the main thread does such work it *holds back* interrupts; one that comes meanwhile is
raised when the work is done, or as soon as the thread begins to wait.

Only Python's default handler is treated so. A program's own handler, of this or another
signal, runs at once wherever it may be; let it set a flag rather than raise.

:func:`shut_out` and :func:`restore` are two assignments to :data:`here`; ``Caller.run``,
which every call passes, makes these itself.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Final

DEAF_SECONDS: Final = 0.1
"""Seconds that an interrupt may have to wait for a wait that must not be cut off."""


class _InterruptState(threading.local):
    """The running thread's own state; only the main thread's ever matters."""

    held: bool = False
    """True while interrupts are held back."""
    due: bool = False
    """True if one came meanwhile."""


here: Final = _InterruptState()


def _interrupted(number: int, frame: FrameType | None) -> None:
    if here.held:
        here.due = True
    else:
        signal.default_int_handler(number, frame)


def use() -> None:
    """Begins to hold back what Python's handler of SIGINT raises, if that is the handler now.

    Does nothing on another thread than the main one, where no handler can be set.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupted)


def stop() -> None:
    """Puts Python's handler back, if ours is in its place."""
    if threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(signal.SIGINT) is _interrupted:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def shut_out() -> bool:
    """Holds interrupts back; returns what :func:`restore` takes.

    To be followed at once by ``try``, with :func:`restore` in its ``finally``.
    """
    before = here.held
    here.held = True
    return before


def restore(before: bool) -> None:
    """Holds interrupts back or not, as before; raises one that is due if it may."""
    here.held = before
    if here.due and not before:
        raise_due()


def let_in() -> bool:
    """Lets interrupts come while the thread waits; otherwise does as :func:`shut_out`."""
    before = here.held
    if here.due:
        raise_due()
    here.held = False
    return before


def let_in_for_a_moment() -> None:
    """Raises an interrupt that is due, between two of the short waits that make up a long one.

    For waits that must not be cut off: ``Thread.join`` takes a thread for ended then.
    """
    restore(let_in())


def raise_due() -> None:
    """Raises the interrupt that was held back."""
    here.due = False
    signal.default_int_handler(signal.SIGINT, None)
