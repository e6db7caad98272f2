"""Records arrive as they were sent."""

from __future__ import annotations

from rpc.observe.trace_records import (
    CallKind,
    CallRecord,
    HandlerRecord,
    OperatorRecord,
    WorkerTrace,
    from_json,
    to_json,
)


def test_records_arrive_as_they_were() -> None:
    trace = WorkerTrace(3, "bob", "17")
    trace.calls.append(CallRecord(1 << 60, CallKind.TO_HERE, "naïve\n", 2, 5, 0.1, 0.2, 0.3, 0.4))
    trace.handlers.append(HandlerRecord(2, "f", 0, 6, 1e9 + 1e-6, failed=True))
    trace.operators.append(OperatorRecord("aten::add", 6, 1.5, 1.75, "GPU 0 stream 7"))
    trace.threads = {5: "MainThread", 6: "x"}
    trace.dropped = 4
    assert from_json(to_json(trace)) == trace


def test_a_reply_left_when_it_was_encoded_and_an_error_when_it_was_handed_over() -> None:
    times = (1.0, 0.5, 2.0, 3.0, 3.0, 4.0, 5.0)
    assert HandlerRecord(1, "f", 0, 1, *times).left == 4.0
    assert HandlerRecord(1, "f", 0, 1, *times, failed=True).left == 5.0
    created = HandlerRecord(1, "f", 0, 1, 1.0, 0.5, 2.0, 3.0, 3.0, 0.0, 5.0)
    assert created.left == 3.0
