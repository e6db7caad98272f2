"""Records when the threads at both ends of an operation wait, send and serve, and prints it.

The methods in ``WATCHED`` are wrapped, which costs about half a microsecond for each call, and
shows nothing of compiled modules.
All processes of a host share the clock.
"""

from __future__ import annotations

import functools
import importlib
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from benchmarks.commands import Column, Span
from benchmarks.group import Group, Launch
from benchmarks.workloads import ROWS, Operation, Row

OPERATIONS = 200
_OPERATION = "operation"
_WAITS = "waits for the reply"
_SERVES = "serves a request"
_TENSORWIRE = "rpc.transports.tensorwire"
WATCHED = (
    (f"{_TENSORWIRE}.transport", "TensorWireTransport.wait", _WAITS),
    (f"{_TENSORWIRE}.channel", "Sender.send_small", "sends"),
    (f"{_TENSORWIRE}.busy_polling", "BusyPoller._sleep", "sleeps"),
    ("rpc.calls.callee", "Callee.take_request", _SERVES),
    ("rpc.runtime.executor", "Executor.run_here", "runs it"),
    ("autograd_dist.local_engine", "LocalPass.run_wave", "runs torch's engine"),
    ("optim_dist.local_optimizer", "LocalOptimizer.step_with", "runs torch's optimizer"),
)
"""Module, method, and what a thread does in it."""
_spans: list[Span] = []


def begin() -> None:
    """Records what this process does from now on."""
    for module, path, what in WATCHED:
        owner, name = path.split(".")
        kind = getattr(importlib.import_module(module), owner)
        setattr(kind, name, _timed(getattr(kind, name), what))


def watched(operation: Operation) -> Operation:
    """The operation, recorded as a whole."""
    return _timed(operation, _OPERATION)


def _timed(function: Callable[..., object], what: str) -> Callable[..., object]:
    clock, note, thread = time.perf_counter_ns, _spans.append, threading.current_thread

    @functools.wraps(function)
    def timed(*arguments: object, **named: object) -> object:
        began = clock()
        try:
            return function(*arguments, **named)
        finally:
            note(Span(began, clock(), thread().name, what))

    return timed


def take() -> list[Span]:
    """The spans that were recorded since this was asked last."""
    taken = _spans[:]
    del _spans[: len(taken)]
    return taken


@dataclass(frozen=True, slots=True)
class Timeline:
    """One operation at both ends.

    Args:
        whole: the operation.
        caller: what threads of the process that made it did meanwhile, as it began.
        callee: those of its peer.
    """

    whole: Span
    caller: tuple[Span, ...]
    callee: tuple[Span, ...]

    @property
    def own(self) -> int:
        """The nanoseconds in which the caller does not wait for a reply."""
        return self.whole.nanoseconds - sum(span.nanoseconds for span in self._waits)

    @property
    def served(self) -> int:
        """The nanoseconds in which the caller waits and the peer serves a request."""
        serves = [span for span in self.callee if span.what == _SERVES]
        return sum(_both(wait, served) for wait in self._waits for served in serves)

    @property
    def road(self) -> int:
        """The nanoseconds in which the caller waits and the peer serves nothing."""
        return self.whole.nanoseconds - self.own - self.served

    @property
    def threads(self) -> tuple[int, int]:
        """The number of threads that work on it, at the caller and at its peer."""
        caller = {span.thread for span in self.caller if span.what == _WAITS}
        callee = {span.thread for span in self.callee if span.what == _SERVES}
        return len(caller), len(callee)

    @property
    def _waits(self) -> list[Span]:
        return [span for span in self.caller if span.what == _WAITS]


def _both(one: Span, other: Span) -> int:
    """The nanoseconds that two spans have in common."""
    return max(0, min(one.ended, other.ended) - max(one.began, other.began))


def median_of(caller: Iterable[Span], callee: Iterable[Span]) -> Timeline:
    """The timeline of the operation that took the median time; of two, the shorter one's."""
    caller, callee = tuple(caller), tuple(callee)
    wholes = sorted((s for s in caller if s.what == _OPERATION), key=lambda s: s.nanoseconds)
    whole = wholes[(len(wholes) - 1) // 2]
    return Timeline(whole, _within(whole, caller), _within(whole, callee))


def _within(whole: Span, spans: Iterable[Span]) -> tuple[Span, ...]:
    found = (s for s in spans if whole.began <= s.began < whole.ended and s != whole)
    return tuple(sorted(found, key=lambda span: (span.began, -span.ended)))


def record(rows: Sequence[Row], column: Column) -> list[Timeline]:
    """Records operations of rows in the same processes; returns one timeline for each."""
    size = max(row.group_size for row in rows)
    with Group(column, size, Launch.APART, timeline=True) as group, group.awake():
        return [_record(row, group) for row in rows]


def _record(row: Row, group: Group) -> Timeline:
    group.prepare(row)
    timeline = median_of(*group.record(row, OPERATIONS))
    group.forget(row)
    return timeline


def report(row: Row, timeline: Timeline) -> str:
    """The timeline as a table, with its sums beneath."""
    lines = [f"{row.title}: microseconds since its begin, and for how long", ""]
    spans = [(span, "caller") for span in timeline.caller]
    spans += [(span, "callee") for span in timeline.callee]
    open_spans: dict[tuple[str, str], list[Span]] = {}
    for span, end in sorted(spans, key=lambda each: (each[0].began, -each[0].ended)):
        outer = open_spans.setdefault((end, span.thread), [])
        while outer and outer[-1].ended <= span.began:
            outer.pop()
        at, took = (span.began - timeline.whole.began) / 1e3, span.nanoseconds / 1e3
        what = "  " * len(outer) + span.what
        lines.append(f"{at:8.0f} {took:7.0f}  {end}  {what:<30}{span.thread}")
        outer.append(span)
    caller, callee = timeline.threads
    own, served, road = (each / 1e3 for each in (timeline.own, timeline.served, timeline.road))
    return "\n".join(
        [
            *lines,
            "",
            f"{timeline.whole.nanoseconds / 1e3:.0f} µs: {own:.0f} at the caller, {served:.0f} at "
            f"the callee, {road:.0f} for messages and wake-ups; {caller} and {callee} threads",
        ]
    )


def main(column: Column, keys: Iterable[str]) -> None:
    """Records rows and prints their timelines."""
    rows = [ROWS[key] for key in keys]
    for row, timeline in zip(rows, record(rows, column), strict=True):
        print(report(row, timeline), end="\n\n", flush=True)


__all__ = ["Timeline", "begin", "main", "median_of", "record", "report", "take", "watched"]
