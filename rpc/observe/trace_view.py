"""Draws the records of many workers as one Chrome trace. Sans-IO.

Owns what it looks like in chrome://tracing or Perfetto: a process per worker; a
row per thread with what ran on it, each handler with its stages, operators and
nested calls beneath it; rows for asynchronous calls, queued requests and
unfinished asynchronous handlers; arrows from every call through the queue to
its handler, and back. Slices on one row always nest: what would not goes to
another row.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rpc.observe.names import span_name
from rpc.observe.trace_clocks import Offset
from rpc.observe.trace_records import (
    CallKind,
    CallRecord,
    HandlerRecord,
    OperatorRecord,
    WorkerTrace,
)

Event = dict[str, Any]

_CALL_TIMES = ("begun", "sent", "replied", "ended")
_HANDLER_TIMES = ("arrived", "started", "running", "returned", "ran", "encoded", "replied")
_OPERATOR_TIMES = ("began", "ended")


@dataclass(frozen=True, slots=True)
class Slice:
    """One rectangle on a row; times in seconds on the common clock.

    Args:
        row: title of the row.
        name: what it shows.
        category: what kind of thing it is.
        begin: its left edge.
        end: its right edge.
        stages: what it consists of, with the end of each; the first starts at ``begin``.
        span: of the call it belongs to, 0 for operators.
        failed: it raised.
        nests: it may be drawn beneath a slice that it lies within.
    """

    row: str
    name: str
    category: str
    begin: float
    end: float
    stages: tuple[tuple[str, float], ...] = ()
    span: int = 0
    failed: bool = False
    nests: bool = True


@dataclass(frozen=True, slots=True)
class Placed:
    """A slice and the row it got: a process and a thread, as the viewer sees them."""

    item: Slice
    pid: int
    tid: int


def chrome_trace(
    workers: Sequence[WorkerTrace], offsets: Mapping[int, Offset], origin: float
) -> dict[str, Any]:
    """The records as Chrome's JSON object format.

    Args:
        workers: their records; drawn in this order.
        offsets: how to read each worker's clock; without one it is taken as it is.
        origin: what becomes time 0, in seconds on the common clock.
    """
    aligned = [_aligned(trace, offsets.get(trace.worker)) for trace in workers]
    slices = _Painter(aligned).slices()
    events: list[Event] = []
    placed: list[Placed] = []
    for index, trace in enumerate(aligned):
        events += _process_events(trace, index)
        rows, here = _lay_out(trace.worker, slices[trace.worker])
        events += rows
        placed += here
    for one in placed:
        events += _slice_events(one, origin)
    events += _arrows(placed, origin)
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "clock_offsets_s": {
                t.name: offsets[t.worker].seconds for t in _known(workers, offsets)
            },
            "clock_errors_s": {t.name: offsets[t.worker].error for t in _known(workers, offsets)},
            "dropped": {trace.name: trace.dropped for trace in workers if trace.dropped},
        },
    }


def _known(workers: Sequence[WorkerTrace], offsets: Mapping[int, Offset]) -> Iterator[WorkerTrace]:
    return (trace for trace in workers if trace.worker in offsets)


def _aligned(trace: WorkerTrace, offset: Offset | None) -> WorkerTrace:
    """The same records on the common clock."""
    if offset is None:
        return trace
    seconds = offset.seconds

    def shifted(record: Any, times: Sequence[str]) -> Any:
        values = {name: getattr(record, name) for name in record.__slots__}
        for name in times:
            values[name] = values[name] and values[name] - seconds
        return type(record)(**values)

    return WorkerTrace(
        trace.worker,
        trace.name,
        trace.process,
        [shifted(record, _CALL_TIMES) for record in trace.calls],
        [shifted(record, _HANDLER_TIMES) for record in trace.handlers],
        [shifted(record, _OPERATOR_TIMES) for record in trace.operators],
        trace.threads,
        trace.dropped,
    )


# --- From records to slices


class _Painter:
    """Draws records; the look of one depends on others, so it knows all."""

    def __init__(self, workers: Sequence[WorkerTrace]) -> None:
        self._workers = workers
        self._names = {trace.worker: trace.name for trace in workers}
        self._handlers = {h.span: h for trace in workers for h in trace.handlers}
        self._runs = _Runs(workers)

    def slices(self) -> dict[int, list[Slice]]:
        """The slices to draw for each worker."""
        by_worker: dict[int, list[Slice]] = {trace.worker: [] for trace in self._workers}
        for trace in self._workers:
            mine = by_worker[trace.worker]
            mine += (self._call(trace, call) for call in trace.calls)
            for handler in trace.handlers:
                mine += self._handler(trace, handler)
            for operator in trace.operators:
                run = self._runs.around(trace, operator)
                by_worker[run.trace.worker].append(_operator(run, operator))
        return by_worker

    def _call(self, trace: WorkerTrace, call: CallRecord) -> Slice:
        row = _thread(trace, call.thread)
        waits = call.kind in (CallKind.SYNC, CallKind.TO_HERE)
        return Slice(
            row if waits else f"{row}: calls under way",
            span_name(call.kind.value, call.name, trace.name, self._name(call.to)),
            "call",
            call.begun,
            max(call.begun, call.sent, call.replied, call.ended),
            self._call_stages(call),
            call.span,
            call.failed,
            waits,
        )

    def _call_stages(self, call: CallRecord) -> tuple[tuple[str, float], ...]:
        handler = self._handlers.get(call.span)
        if handler is None:
            return ("encode", call.sent), ("waiting", call.replied), ("decode", call.ended)
        return (
            ("encode", call.sent),
            ("on the wire", handler.arrived),
            ("at the callee", handler.left),
            ("on the wire back", call.replied),
            ("decode", call.ended),
        )

    def _handler(self, trace: WorkerTrace, handler: HandlerRecord) -> Iterator[Slice]:
        title = f"{handler.name} for {self._name(handler.sender)}"
        span, failed = handler.span, handler.failed
        arrived, started, returned = handler.arrived, handler.started, handler.returned
        if arrived:
            row = "queued requests"
            yield Slice(row, title, "queue", arrived, started, span=span, nests=False)
        row = _thread(trace, handler.thread)
        over = max(started, handler.running, handler.ran, handler.encoded, handler.replied)
        begun = ("decode", handler.running)
        finish = (("encode", handler.encoded), ("replying", handler.replied))
        stages: tuple[tuple[str, float], ...]
        if not handler.running:  # not a function: it may have waited for a value, on no thread
            row, stages = "values and messages", (("answering", handler.encoded), finish[1])
            yield Slice(row, title, "handler", started, over, stages, span, failed, nests=False)
            return
        if handler.ran <= returned:
            stages = (begun, ("running", handler.ran), *finish)
            yield Slice(row, title, "handler", started, over, stages, span, failed)
            return
        stages = (begun, ("running", returned))
        yield Slice(row, title, "handler", started, returned, stages, span, failed)
        row, stages = "unfinished handlers", (("waiting", handler.ran), *finish)
        yield Slice(row, title, "unfinished", returned, over, stages, span, failed, nests=False)

    def _name(self, worker: int) -> str:
        return self._names.get(worker, f"worker {worker}")


@dataclass(frozen=True, slots=True)
class _Run:
    """A stretch of a thread in which one worker used it."""

    trace: WorkerTrace
    begin: float
    end: float


class _Runs:
    """The runs on each thread; workers in one process share threads and profiler."""

    def __init__(self, workers: Sequence[WorkerTrace]) -> None:
        self._by_thread: dict[tuple[str, int], list[_Run]] = {}
        for trace in workers:
            for h in trace.handlers:
                runs = self._by_thread.setdefault((trace.process, h.thread), [])
                runs.append(_Run(trace, h.running, h.returned))
        for runs in self._by_thread.values():
            runs.sort(key=lambda run: run.begin)

    def around(self, reporter: WorkerTrace, operator: OperatorRecord) -> _Run:
        """The handler an operator ran in; else all of the worker that reports it."""
        runs = self._by_thread.get((reporter.process, operator.thread), ())
        middle = (operator.began + operator.ended) / 2
        index = bisect_right(runs, middle, key=lambda run: run.begin) - 1
        if operator.device or index < 0 or runs[index].end < middle:
            return _Run(reporter, operator.began, operator.ended)
        return runs[index]


def _operator(run: _Run, operator: OperatorRecord) -> Slice:
    """An operator; the profiler's clock is not quite ours, so it is fitted into its handler."""
    row = operator.device or _thread(run.trace, operator.thread)
    began, ended = max(operator.began, run.begin), min(operator.ended, run.end)
    return Slice(row, operator.name, "operator", began, ended)


def _thread(trace: WorkerTrace, thread: int) -> str:
    return f"{trace.threads.get(thread, 'thread')} [{thread}]"


# --- From slices to rows


class _Rows:
    """The rows of one title: as many as it takes for slices to nest."""

    def __init__(self) -> None:
        self.lanes: list[list[Slice]] = []
        self._open: list[list[Slice]] = []

    def place(self, item: Slice) -> None:
        """Puts a slice on the first row where it fits; to be called in order of begin."""
        lane = next((i for i, opened in enumerate(self._open) if _fits(item, opened)), -1)
        if lane < 0:
            self.lanes.append([])
            self._open.append([])
        self.lanes[lane].append(item)
        self._open[lane].append(item)


def _fits(item: Slice, opened: list[Slice]) -> bool:
    """True if a slice may go on a row where these are still open, the innermost last."""
    while opened and opened[-1].end <= item.begin:
        opened.pop()
    if not opened:
        return True
    within = opened[-1]
    crosses = any(item.begin < end < item.end for _, end in within.stages)
    return item.nests and item.end <= within.end and not crosses


def _lay_out(worker: int, slices: Sequence[Slice]) -> tuple[list[Event], list[Placed]]:
    """Gives each slice of a worker its row; also the events that name the rows."""
    rows: dict[str, _Rows] = {}
    for item in sorted(slices, key=lambda s: (s.begin, -s.end)):
        rows.setdefault(item.row, _Rows()).place(item)
    events: list[Event] = []
    placed: list[Placed] = []
    for title, group in rows.items():
        for lane, items in enumerate(group.lanes):
            tid = len(events) + 1
            name = title if not lane else f"{title} ({lane + 1})"
            events.append(_metadata("thread_name", worker, tid, name=name))
            placed += (Placed(item, worker, tid) for item in items)
    for event in [*events]:
        events.append(_metadata("thread_sort_index", worker, event["tid"], sort_index=event["tid"]))
    return events, placed


# --- From rows to events


def _metadata(kind: str, pid: int, tid: int, **args: object) -> Event:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": args}


def _process_events(trace: WorkerTrace, index: int) -> list[Event]:
    return [
        _metadata("process_name", trace.worker, 0, name=trace.name),
        _metadata("process_sort_index", trace.worker, 0, sort_index=index),
    ]


def _slice_events(placed: Placed, origin: float) -> Iterator[Event]:
    item = placed.item
    args: Event = {"call": f"{item.span:x}"} if item.span else {}
    if item.failed:
        args["failed"] = True
    yield _complete(placed, item.name, item.category, item.begin, item.end, origin, args)
    begin = item.begin
    for name, end in item.stages:
        end = min(end, item.end)
        if end > begin:
            yield _complete(placed, name, "stage", begin, end, origin, {})
            begin = end


def _complete(
    placed: Placed, name: str, category: str, begin: float, end: float, origin: float, args: Event
) -> Event:
    start, stop = _nanoseconds(begin - origin), _nanoseconds(end - origin)
    return {
        "ph": "X", "name": name, "cat": category, "pid": placed.pid, "tid": placed.tid,
        "ts": start / 1000, "dur": (stop - start) / 1000, "args": args,
    }  # fmt: skip


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


def _arrows(placed: Sequence[Placed], origin: float) -> Iterator[Event]:
    """From each call through the queue to its handler, and from there back.

    Both ends lie within their slices, and never back in time, though clocks are
    only nearly aligned and a reply may arrive before its sender knows it has left.
    """
    by_kind: dict[tuple[str, int], Placed] = {(p.item.category, p.item.span): p for p in placed}
    for (category, span), call in by_kind.items():
        handler = by_kind.get(("handler", span))
        if category != "call" or handler is None:
            continue
        queue = by_kind.get(("queue", span))
        last = by_kind.get(("unfinished", span), handler)
        stages = dict(call.item.stages)
        arrived = (queue or handler).item.begin
        leaves = _within(call, min(stages.get("encode", 0.0), arrived))
        yield _arrow("s", "request", f"{span:x}", call, leaves, origin)
        if queue is not None:
            yield _arrow("t", "request", f"{span:x}", queue, arrived, origin)
        yield _arrow("f", "request", f"{span:x}", handler, handler.item.begin, origin)
        replied = stages.get("on the wire back", 0.0)
        if replied:
            returns = _within(last, min(last.item.end, replied))
            yield _arrow("s", "reply", f"{span:x}r", last, returns, origin)
            replied = _within(call, max(replied, returns))
            yield _arrow("f", "reply", f"{span:x}r", call, replied, origin)


def _within(placed: Placed, when: float) -> float:
    return min(max(when, placed.item.begin), placed.item.end)


def _arrow(phase: str, name: str, key: str, at: Placed, when: float, origin: float) -> Event:
    event: Event = {
        "ph": phase, "name": name, "cat": "rpc", "id": key, "pid": at.pid, "tid": at.tid,
        "ts": _nanoseconds(when - origin) / 1000,
    }  # fmt: skip
    if phase == "f":
        event["bp"] = "e"
    return event
