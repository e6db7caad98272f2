"""How torch's profilers get to see a backward pass.

A profiler records the thread that started it. Gradients that come back would be
worked on where they arrive; while a profiler records the thread that runs the
backward pass, that thread does all the pass's work on this worker. The spans are named
as torch names its own, for programs that look for them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from queue import SimpleQueue

from torch.autograd.profiler import record_function

from rpc.executor import blocking
from rpc.observation import profiler_enabled

PASS = "torch::distributed::autograd::backward"
SEND = "torch::distributed::autograd::SendRpcBackward"

_NOT_RECORDED: AbstractContextManager[object] = nullcontext()


def is_recorded() -> bool:
    """True if a profiler records the calling thread."""
    return profiler_enabled()


def span(name: str) -> AbstractContextManager[object]:
    """A span in the calling thread's profile, if there is one."""
    return record_function(name) if profiler_enabled() else _NOT_RECORDED


class Home:
    """Has work done by the thread that made this."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()

    def take(self, work: Callable[[], None]) -> bool:
        """Leaves ``work`` to the thread; False if it is the calling one, which does it itself."""
        if threading.get_ident() == self._thread:
            return False
        self._queue.put(work)
        return True

    def close(self) -> None:
        """There is no more to do."""
        self._queue.put(None)

    def work(self) -> None:
        """Does what there is to do until the end."""
        while (work := self._next()) is not None:
            work()

    def _next(self) -> Callable[[], None] | None:
        with blocking():
            return self._queue.get()
