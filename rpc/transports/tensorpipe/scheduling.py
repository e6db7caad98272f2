"""Shortens the time slices of threads that poll without a pause.

torch's reactor polls for messages and never sleeps. Where there are no more cores than
reactors, a thread that wakes to act on a message waits until a reactor's time slice is over,
which takes milliseconds by default. Since version 6.12 Linux lets a thread have time slices of
its own length (the runtime of ``sched_setattr``, see sched(7)); before, it takes no notice.
"""

from __future__ import annotations

import ctypes
import logging
import os
import platform
import struct
from pathlib import Path
from typing import Final

SHORTEST_SECONDS: Final = 100e-6
"""The shortest time slice that Linux grants."""

_REACTOR: Final = "TP_SHM_reactor"
_ATTRIBUTES: Final = struct.Struct("=IIQiIQQQ")
_NUMBERS: Final = {"x86_64": (314, 315), "aarch64": (274, 275)}
_ORDINARY: Final = (0, 3)  # SCHED_OTHER and SCHED_BATCH
_log: Final = logging.getLogger(__name__)
_system: Final = ctypes.CDLL(None, use_errno=True)


def shorten_slice(thread: int, seconds: float = SHORTEST_SECONDS) -> None:
    """Asks the system for short time slices for a thread of this process.

    Args:
        thread: the system's id of it.
        seconds: how long a time slice is to be.

    Raises:
        OSError: the system refuses.
    """
    *rest, _, deadline, period = _get(thread)
    if rest[1] in _ORDINARY:
        attributes = _ATTRIBUTES.pack(*rest, round(seconds * 1e9), deadline, period)
        _call(0, thread, ctypes.create_string_buffer(attributes), 0)


def slice_seconds(thread: int) -> float:
    """Returns how long a thread's time slices are; 0.0 where the system does not say so.

    Raises:
        OSError: the system refuses.
    """
    return float(_get(thread)[5]) / 1e9


def shorten_reactors() -> None:
    """Lets other threads run between two polls of torch's reactors, which never sleep."""
    for thread in reactors():
        try:
            shorten_slice(thread)
        except OSError as error:
            _log.debug("thread %d, which polls without a pause, keeps its slice: %s", thread, error)


def reactors() -> list[int]:
    """Returns the threads of this process that poll without a pause."""
    threads = []
    for task in Path("/proc/self/task").iterdir():
        try:
            name = (task / "comm").read_text()
        except OSError:  # it has ended
            continue
        if name.startswith(_REACTOR):
            threads.append(int(task.name))
    return threads


def _get(thread: int) -> tuple[int, ...]:
    buffer = ctypes.create_string_buffer(_ATTRIBUTES.size)
    _call(1, thread, buffer, _ATTRIBUTES.size, 0)
    return _ATTRIBUTES.unpack(buffer.raw)


def _call(which: int, *arguments: object) -> None:
    """``sched_setattr`` or ``sched_getattr``, for which the C library has no functions."""
    numbers = _NUMBERS.get(platform.machine())
    if numbers is None:
        raise OSError(
            f"which calls set the time slices of threads on {platform.machine()} is not known"
        )
    if _system.syscall(numbers[which], *arguments) < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
