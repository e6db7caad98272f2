"""Keeps what a signal handler raises, Ctrl-C above all, out of half-done work.

Python runs signal handlers on the main thread, between any two of its instructions. What
one raises there, ``KeyboardInterrupt`` or the exception of somebody's own time limit, ends
whatever the thread was doing: a frame that was read would be lost, a call would be counted
that was never sent. So while the main thread does such work it *shuts out* handlers; one
that is due meanwhile runs when the work is done, or as soon as the thread begins to wait.

For that, a handler in Python is called through one of ours, from the first call made on
the main thread after it was set. That of a signal which is not in :data:`SIGNALS` is not,
nor is one that C code set.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # it has no stubs
import signal
import threading
from _thread import get_ident
from collections.abc import Callable
from types import FrameType
from typing import Final, cast

DEAF_SECONDS: Final = 0.1
"""How long a handler may have to wait for a wait that must not be cut off."""

SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)

_Handler = Callable[[int, FrameType | None], object]

_numbers: Final = tuple(int(number) for number in SIGNALS)
_handler_of: Final = _signal.getsignal  # signal.getsignal takes a microsecond
_main: Final = threading.main_thread().ident

_shut = False
_due: list[tuple[_Handler, int]] = []


class _Deferring:
    """What is set as the handler of a signal in the place of another."""

    __slots__ = ("handler",)

    def __init__(self, handler: _Handler) -> None:
        self.handler = handler

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if _shut:
            _due.append((self.handler, number))
        else:
            self.handler(number, frame)


def shut_out() -> bool | None:
    """Shuts out handlers; returns what :func:`restore` takes.

    To be followed at once by ``try``, with :func:`restore` in its ``finally``.
    """
    global _shut
    if get_ident() != _main:
        return None
    before = _shut
    if not before:
        for number in _numbers:
            handler = _handler_of(number)
            if type(handler) is not _Deferring and callable(handler):
                signal.signal(number, _Deferring(cast(_Handler, handler)))
    _shut = True
    return before


def restore(before: bool | None) -> None:
    """Shuts out handlers or not, as before; runs those that are due if they may."""
    global _shut
    if before is None:
        return
    _shut = before
    if _due and not before:
        _run_due()


def let_in() -> bool | None:
    """Lets handlers run while the thread waits; otherwise as :func:`shut_out`."""
    global _shut
    if get_ident() != _main:
        return None
    before = _shut
    _shut = False
    if _due:
        try:
            _run_due()
        except BaseException:
            _shut = before
            raise
    return before


def let_in_for_a_moment() -> None:
    """Runs handlers that are due, between two of the short waits that make up a long one.

    For waits that must not be cut off: ``Thread.join`` takes a thread for ended then.
    """
    restore(let_in())


def _run_due() -> None:
    """As the signals came; what one raises ends it, and the rest run with the next."""
    while _due:
        handler, number = _due.pop(0)
        handler(number, None)


def stop() -> None:
    """Puts the handlers back that others have set."""
    if get_ident() != _main:
        return
    for number in _numbers:
        handler = _handler_of(number)
        if type(handler) is _Deferring:
            signal.signal(number, handler.handler)
