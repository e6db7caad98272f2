"""Spans in profiles of ``torch.profiler`` that end on any thread, or with the profile.

torch's profiler frees what it knows of a span when the profile stops, and the end
of a span that is still open writes there: a call that outlives the profile would
corrupt the process's memory. Owns the open spans, and ends them before a profile
stops: the first span puts a function of ours before the one that stops profiles.
"""

from __future__ import annotations

import functools
import threading
from typing import Any

import torch
from torch.autograd import profiler

__all__ = ["ProfilerSpan"]

# While it is held no profile stops. Reentrant: a finaliser may end a span anywhere.
_lock = threading.RLock()
_open: set[ProfilerSpan] = set()


class ProfilerSpan:
    """A span in the profile of the thread that makes it, from now until ``end``."""

    __slots__ = ("_ended",)

    def __init__(self, key: str) -> None:
        _stand_before_the_stop()
        span = profiler.record_function(key)
        self._ended: torch.futures.Future[None] = torch.futures.Future()
        with _lock:
            span.__enter__()  # type: ignore[no-untyped-call]
            # torch runs the end of the span with the profiler state of this thread.
            span._call_end_callbacks_on_future(self._ended)
            span.__exit__(None, None, None)
            _open.add(self)

    def end(self) -> None:
        """Ends the span; does nothing if it has ended, or its profile has."""
        with _lock:
            if self in _open:
                _open.remove(self)
                self._ended.set_result(None)


@functools.cache
def _stand_before_the_stop() -> None:
    stop = profiler._disable_profiler  # type: ignore[attr-defined]

    @functools.wraps(stop)
    def end_all_and_stop() -> Any:
        with _lock:
            for span in list(_open):
                span.end()
            return stop()

    profiler._disable_profiler = end_all_and_stop  # type: ignore[attr-defined]
