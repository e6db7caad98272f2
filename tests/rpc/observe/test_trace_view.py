"""The contents of a Chrome trace of several workers."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from typing import Any

import pytest

from rpc.observe.trace_clocks import Offset, estimate, samples_of
from rpc.observe.trace_records import (
    CallKind,
    CallRecord,
    HandlerRecord,
    OperatorRecord,
    WorkerTrace,
)
from rpc.observe.trace_view import chrome_trace

Event = dict[str, Any]

CALL = CallRecord(1, CallKind.SYNC, "aten::add", 1, 5, 1.0, 1.1, 1.9, 2.0)
HANDLER = HandlerRecord(1, "aten::add", 0, 6, 1.3, 1.2, 1.4, 1.6, 1.6, 1.7, 1.8)


def alice(*calls: CallRecord) -> WorkerTrace:
    return WorkerTrace(0, "alice", "p0", list(calls), threads={5: "MainThread"})


def bob(*handlers: HandlerRecord) -> WorkerTrace:
    return WorkerTrace(1, "bob", "p1", [], list(handlers), threads={6: "handler"})


def draw(*workers: WorkerTrace, **kwargs: Any) -> list[Event]:
    arguments = {"offsets": {}, "origin": 1.0, **kwargs}
    drawn = chrome_trace(workers, **arguments)
    json.dumps(drawn)
    events: list[Event] = drawn["traceEvents"]
    return events


def slices(events: list[Event], category: str = "") -> list[Event]:
    return [e for e in events if e["ph"] == "X" and category in ("", e["cat"])]


def row(events: list[Event], item: Event) -> str:
    """The title of the row an event is on."""
    (name,) = [
        e["args"]["name"]
        for e in events
        if e["name"] == "thread_name" and (e["pid"], e["tid"]) == (item["pid"], item["tid"])
    ]
    return str(name)


def microseconds(item: Event) -> tuple[int, int]:
    return round(item["ts"]), round(item["ts"] + item["dur"])


def assert_rows_nest(events: list[Event]) -> None:
    """No slice may reach over the end of one that it begins in."""
    rows: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for item in slices(events):
        start = round(item["ts"] * 1000)
        rows[item["pid"], item["tid"]].append((start, start + round(item["dur"] * 1000)))
    for items in rows.values():
        opened: list[int] = []
        for begin, end in sorted(items, key=lambda i: (i[0], -i[1])):
            while opened and opened[-1] <= begin:
                opened.pop()
            assert not opened or end <= opened[-1]
            opened.append(end)


def test_every_worker_is_a_process_with_named_rows() -> None:
    events = draw(alice(CALL), bob(HANDLER))
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {0: "alice", 1: "bob"}
    (call,), (handler,) = slices(events, "call"), slices(events, "handler")
    assert (call["pid"], row(events, call)) == (0, "MainThread [5]")
    assert (handler["pid"], row(events, handler)) == (1, "handler [6]")


def test_a_call_is_a_slice_with_its_stages() -> None:
    events = draw(alice(CALL), bob(HANDLER))
    (call,) = slices(events, "call")
    assert call["name"] == "rpc_sync#aten::add(alice -> bob)"
    assert microseconds(call) == (0, 1_000_000)
    stages = [(e["name"], *microseconds(e)) for e in slices(events, "stage") if e["pid"] == 0]
    assert stages == [
        ("encode", 0, 100_000),
        ("on the wire", 100_000, 200_000),
        ("at the callee", 200_000, 700_000),
        ("on the wire back", 700_000, 900_000),
        ("decode", 900_000, 1_000_000),
    ]


def test_a_handler_is_queued_and_then_a_slice_with_its_stages() -> None:
    events = draw(alice(CALL), bob(HANDLER))
    (queued,) = slices(events, "queue")
    assert (row(events, queued), *microseconds(queued)) == ("queued requests", 200_000, 300_000)
    stages = [(e["name"], *microseconds(e)) for e in slices(events, "stage") if e["pid"] == 1]
    assert stages == [
        ("decode", 300_000, 400_000),
        ("running", 400_000, 600_000),
        ("encode", 600_000, 700_000),
        ("replying", 700_000, 800_000),
    ]


def test_arrows_lead_from_the_call_through_the_queue_to_the_handler_and_back() -> None:
    events = draw(alice(CALL), bob(HANDLER))
    arrows = [e for e in events if e["ph"] in "stf"]
    assert [(e["ph"], e["name"], e["pid"], round(e["ts"])) for e in arrows] == [
        ("s", "request", 0, 100_000),
        ("t", "request", 1, 200_000),
        ("f", "request", 1, 300_000),
        ("s", "reply", 1, 800_000),
        ("f", "reply", 0, 900_000),
    ]
    assert len({e["id"] for e in arrows if e["name"] == "request"}) == 1
    assert len({e["id"] for e in arrows}) == 2
    for arrow in arrows:
        assert any(
            (e["pid"], e["tid"]) == (arrow["pid"], arrow["tid"])
            and e["ts"] <= arrow["ts"] <= e["ts"] + e["dur"]
            for e in slices(events)
        )


@pytest.mark.parametrize("seconds", [-0.5, -0.05, 0.0, 0.05, 0.5])
def test_arrows_never_lead_back_in_time_if_they_can_help_it(seconds: float) -> None:
    events = draw(alice(CALL), bob(HANDLER), offsets={1: Offset(seconds, 0.5)})
    handler, call = slices(events, "handler")[0], slices(events, "call")[0]
    times = {(e["name"], e["ph"]): e["ts"] for e in events if e["ph"] in "stf"}
    if handler["ts"] >= call["ts"] + 100_000:  # the request can have come from the call
        assert times["request", "s"] <= times["request", "t"] <= times["request", "f"]
    if handler["ts"] <= call["ts"] + call["dur"]:
        assert times["reply", "s"] <= times["reply", "f"]


def test_clocks_are_aligned() -> None:
    late = HandlerRecord(
        1, "aten::add", 0, 6, *(t + 50.0 for t in (1.3, 1.2, 1.4, 1.6, 1.6, 1.7, 1.8))
    )
    workers = (alice(CALL), bob(late))
    offsets = estimate(0, samples_of(workers))
    assert offsets[1].seconds == pytest.approx(49.95)  # its way back takes 0.1 s longer
    drawn = chrome_trace(workers, {1: Offset(50.0, 0.05)}, 1.0)
    (queued,) = slices(drawn["traceEvents"], "queue")
    assert microseconds(queued) == (200_000, 300_000)
    assert drawn["otherData"]["clock_offsets_s"] == {"bob": 50.0}
    assert drawn["otherData"]["clock_errors_s"] == {"bob": 0.05}


def test_calls_that_overlap_get_rows_of_their_own() -> None:
    first = CallRecord(1, CallKind.ASYNC, "f", 1, 5, 1.0, 1.1, 3.0, 3.1)
    second = CallRecord(2, CallKind.REMOTE, "g", 1, 5, 1.5, 1.6, 2.0, 2.1)
    events = draw(alice(first, second))
    rows = {e["name"]: row(events, e) for e in slices(events, "call")}
    assert rows == {
        "rpc_async#f(alice -> bob)".replace("bob", "worker 1"): "MainThread [5]: calls under way",
        "rpc_remote#g(alice -> worker 1)": "MainThread [5]: calls under way (2)",
    }
    assert_rows_nest(events)


def test_messages_of_extensions_are_named_after_them() -> None:
    message = CallRecord(1, CallKind.MESSAGE, "autograd_dist message", 1, 5, 1.0, 1.1, 1.9, 2.0)
    (item,) = slices(draw(alice(message)), "call")
    assert item["name"] == "autograd_dist message(alice -> worker 1)"


def test_an_unanswered_call_ends_where_it_was_last_seen() -> None:
    events = draw(alice(CallRecord(1, CallKind.SYNC, "f", 1, 5, 1.0, 1.1, 1.6, 1.6, True)))
    (call,) = slices(events, "call")
    assert microseconds(call) == (0, 600_000)
    assert call["args"]["failed"] is True
    assert [e["name"] for e in slices(events, "stage")] == ["encode", "waiting"]
    assert not [e for e in events if e["ph"] in "stf"]


def test_nested_calls_and_operators_lie_beneath_their_handler() -> None:
    nested = CallRecord(2, CallKind.SYNC, "g", 0, 6, 1.42, 1.43, 1.5, 1.51)
    server = bob(HANDLER)
    server.calls = [nested]
    server.operators = [OperatorRecord("aten::add", 6, 1.52, 1.55)]
    events = draw(alice(CALL), server)
    (handler,) = slices(events, "handler")
    for category, at in (("call", 1), ("operator", 1)):
        (item,) = [e for e in slices(events, category) if e["pid"] == at]
        assert item["tid"] == handler["tid"]
    assert_rows_nest(events)


def test_operators_go_to_the_worker_whose_handler_they_ran_in() -> None:
    reporter = WorkerTrace(0, "alice", "shared", [CALL], threads={5: "MainThread", 6: "handler"})
    reporter.operators = [
        OperatorRecord("inside", 6, 1.45, 1.5),
        OperatorRecord("before", 6, 1.0, 1.05),
        OperatorRecord("kernel", 0, 1.45, 1.5, "GPU 0 stream 7"),
    ]
    server = bob(HANDLER)
    server.process = "shared"
    events = draw(reporter, server)
    places = {e["name"]: (e["pid"], row(events, e)) for e in slices(events, "operator")}
    assert places == {
        "inside": (1, "handler [6]"),
        "before": (0, "handler [6]"),
        "kernel": (0, "GPU 0 stream 7"),
    }


def test_an_asynchronous_handler_gives_its_thread_back_and_is_unfinished_until_it_is_done() -> None:
    handler = HandlerRecord(1, "f", 0, 6, 1.3, 1.2, 1.4, 1.45, 1.7, 1.75, 1.8)
    other = HandlerRecord(2, "g", 0, 6, 1.5, 1.4, 1.5, 1.6, 1.6, 1.65, 1.7)
    events = draw(alice(CALL), bob(handler, other))
    spans = {e["name"]: microseconds(e) for e in slices(events, "handler")}
    assert spans["f for alice"] == (300_000, 450_000)
    (unfinished,) = slices(events, "unfinished")
    assert (row(events, unfinished), *microseconds(unfinished)) == (
        "unfinished handlers", 450_000, 800_000,
    )  # fmt: skip
    assert_rows_nest(events)


def test_fetching_a_value_occupies_no_thread() -> None:
    fetch = HandlerRecord(1, "to_here", 0, 6, 1.3, 1.2, encoded=1.7, replied=1.8)
    call = CallRecord(1, CallKind.TO_HERE, "to_here", 1, 5, 1.0, 1.1, 1.9, 2.0)
    events = draw(alice(call), bob(fetch))
    assert slices(events, "call")[0]["name"] == "to_here#(alice)->(bob)"
    (item,) = slices(events, "handler")
    assert row(events, item) == "values and messages"
    stages = [e["name"] for e in slices(events, "stage") if e["pid"] == 1]
    assert stages == ["answering", "replying"]


@pytest.mark.parametrize("seed", range(20))
def test_rows_nest_whatever_was_recorded(seed: int) -> None:
    chance = random.Random(seed)

    def times(count: int) -> list[float]:
        return sorted(chance.uniform(1, 2) for _ in range(count))

    client, server = alice(), bob()
    for span in range(1, 30):
        kind = chance.choice(list(CallKind))
        client.calls.append(CallRecord(span, kind, "f", 1, 5, *times(4)))
        arrived, started, *rest = times(7)
        record = HandlerRecord(span, "f", 0, chance.choice([6, 7]), started, arrived, *rest)
        server.handlers.append(record)
        server.operators.append(OperatorRecord("op", chance.choice([6, 7]), *times(2)))
    events = draw(client, server, offsets={1: Offset(chance.uniform(-0.1, 0.1), 0.1)})
    assert_rows_nest(events)
    assert len(slices(events, "call")) == len(slices(events, "handler")) == 29


def test_what_was_too_much_is_said() -> None:
    full = alice(CALL)
    full.dropped = 12
    assert chrome_trace([full], {}, 0.0)["otherData"]["dropped"] == {"alice": 12}
