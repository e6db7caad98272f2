"""A timeline of all threads of this process, made by looking at their stacks some times a second.

Shows what any program does, whether or not it was told to record. What takes less than the time
between two looks may be missing. The result is in Chrome's trace format, which Perfetto reads.
"""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass
from typing import Final

from rpc.runtime.threads import Place, running_stacks

_LOOKS_A_SECOND: Final = 50
_DEEPEST: Final = 64
_MOST_EVENTS: Final = 50_000


@dataclass(slots=True)
class _Open:
    """A function that a thread is in, as far as looks have seen."""

    name: str
    where: str
    since: float


def sample(stop: threading.Event, seconds: float) -> dict[str, object]:
    """Looks at the stacks of all threads but this one.

    Args:
        stop: ends it early.
        seconds: how long to look.

    Returns:
        A Chrome trace: an event for each function of each thread, with its file and line.
    """
    me = threading.get_ident()
    begun = time.monotonic()
    stacks: dict[int, list[_Open]] = {}
    events: list[dict[str, object]] = []
    while (now := time.monotonic()) < begun + seconds and not stop.is_set():
        if len(events) >= _MOST_EVENTS:
            break
        seen = running_stacks()
        for thread in stacks.keys() - seen.keys():
            _end(events, thread, stacks.pop(thread), 0, now - begun)
        for thread, places in seen.items():
            if thread != me:
                _note(events, thread, stacks.setdefault(thread, []), places, now - begun)
        stop.wait(max(0.0, 1 / _LOOKS_A_SECOND - (time.monotonic() - now)))
    for thread, stack in stacks.items():
        _end(events, thread, stack, 0, time.monotonic() - begun)
    return {"traceEvents": [*_names(), *events]}


def _note(
    events: list[dict[str, object]],
    thread: int,
    stack: list[_Open],
    places: list[Place],
    now: float,
) -> None:
    """Ends the functions that a thread has left, and begins those that it is in now."""
    seen = [(place.function, place.file) for place in reversed(places)][:_DEEPEST]
    same = 0
    while same < min(len(stack), len(seen)) and seen[same] == (stack[same].name, stack[same].where):
        same += 1
    _end(events, thread, stack, same, now)
    stack += [_Open(name, where, now) for name, where in seen[same:]]


def _end(
    events: list[dict[str, object]], thread: int, stack: list[_Open], keep: int, now: float
) -> None:
    for each in stack[keep:]:
        events.append(
            {
                "ph": "X",
                "name": each.name,
                "args": {"where": each.where},
                "ts": each.since * 1e6,
                "dur": (now - each.since) * 1e6,
                "pid": os.getpid(),
                "tid": thread,
            }
        )
    del stack[keep:]


def _names() -> list[dict[str, object]]:
    return [
        {
            "ph": "M",
            "name": "thread_name",
            "pid": os.getpid(),
            "tid": thread.ident,
            "args": {"name": thread.name},
        }
        for thread in threading.enumerate()
    ]
