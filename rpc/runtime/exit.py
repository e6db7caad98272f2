"""Brings a worker to rest whose process ends without ``shutdown``.

A daemon thread that comes back from an operator of torch after the interpreter has ended
is ended by Python in the middle of C++, which aborts the process. So once the program's
own exit hooks have run, nothing more is begun, and what runs is waited for.
"""

from __future__ import annotations

import contextlib
import os
import time
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final, Protocol, TypeVar

ENDING_FILE: Final = "RPC_ENDING_FILE"
"""Names the file by which a worker of rpcrun says that its program is over."""
SECONDS_TO_END = 1.0
"""Seconds for all handlers together to end. One in an operator for longer aborts its process."""
_SECONDS_FOR_THE_IDLE = 0.1
"""Seconds that each kind of thread gets at least, although others needed all of that."""


class Stops(Protocol):
    """Something that runs in this process until it ends, such as a worker."""

    def steps_to_rest(self) -> Iterator[Callable[[float], object]]:
        """The steps that bring it to rest; each is told how many seconds it may take."""


Running = TypeVar("Running", bound=Stops)


def await_end(running: Running) -> weakref.finalize[[], Running]:
    """Stops something when this process ends; ``detach`` the finalizer if it stops before.

    Finalizers run after the program's own exit hooks, which may still call
    and shut down. What a forked child has of its parent's is not its to end.
    """
    return weakref.finalize(running, partial(_process_ends, weakref.ref(running), os.getpid()))


def _process_ends(reference: weakref.ref[Any], process: int) -> None:
    running = reference()
    if running is not None and process == os.getpid():
        _tell_the_launcher()
        _bring_to_rest(running, time.monotonic() + SECONDS_TO_END)


def _tell_the_launcher() -> None:
    """Tells rpcrun that this worker ends by itself, so as not to be killed when taken for lost."""
    path = os.environ.get(ENDING_FILE)
    if path:
        with contextlib.suppress(OSError), open(path, "wb"):
            pass


def _bring_to_rest(running: Stops, until: float) -> None:
    """Tells nobody: to the others, this worker is lost."""
    for step in running.steps_to_rest():
        step(max(_SECONDS_FOR_THE_IDLE, until - time.monotonic()))
