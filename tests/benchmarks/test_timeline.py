"""A timeline shows what both ends of a call do when, and that no thread hands it to another."""

from __future__ import annotations

import pytest

from benchmarks import bindings
from benchmarks.commands import Answer, Column, Span
from benchmarks.timeline import median_of, record, report
from benchmarks.workloads import ROWS

CALLER = [
    Span(0, 9_000, "main", "operation"),
    Span(10_000, 15_000, "main", "operation"),
    Span(10_500, 11_000, "main", "sends"),
    Span(11_000, 14_000, "main", "waits for the reply"),
    Span(12_000, 12_500, "main", "sleeps"),
    Span(20_000, 21_000, "main", "operation"),
]
CALLEE = [
    Span(8_000, 8_900, "requests", "serves a request"),
    Span(11_500, 13_500, "requests", "serves a request"),
    Span(13_000, 13_400, "requests", "sends"),
    Span(14_500, 15_500, "requests", "serves a request"),
]


def test_the_operation_of_the_median_time_is_shown_with_what_both_ends_did_in_it() -> None:
    timeline = median_of(CALLER, CALLEE)
    assert timeline.whole == CALLER[1]
    assert timeline.caller == (CALLER[2], CALLER[3], CALLER[4])
    assert timeline.callee == tuple(CALLEE[1:])
    assert (timeline.own, timeline.served, timeline.road) == (2_000, 2_000, 1_000)
    assert timeline.threads == (1, 1)


def test_the_report_orders_both_ends_by_time_and_indents_what_lies_in_something_else() -> None:
    lines = [line.split() for line in report(ROWS["empty"], median_of(CALLER, CALLEE)).splitlines()]
    ends = [(line[0], line[2], line[3]) for line in lines[2:-2]]
    assert ends == [
        ("0", "caller", "sends"),
        ("1", "caller", "waits"),
        ("2", "callee", "serves"),
        ("2", "caller", "sleeps"),
        ("3", "callee", "sends"),
        ("4", "callee", "serves"),
    ]
    assert lines[-1][:5] == ["5", "µs:", "2", "at", "the"]


def test_an_answer_carries_spans() -> None:
    answer = Answer(spans=tuple(CALLER))
    assert Answer.from_json(answer.to_json()) == answer


@pytest.mark.slow
@pytest.mark.interpreted
@pytest.mark.xdist_group("benchmarks")
def test_no_thread_hands_a_step_over_tensorwire_to_another() -> None:
    column = Column("ours", bindings.OURS, "TENSORWIRE", {}, {})
    (timeline,) = record([ROWS["optimizer"]], column)
    assert timeline.threads == (1, 1)
    did = {span.what for span in timeline.callee}
    assert did >= {"serves a request", "runs torch's engine", "runs torch's optimizer", "sends"}
    requests = [span for span in timeline.callee if span.what == "serves a request"]
    waits = [span for span in timeline.caller if span.what == "waits for the reply"]
    assert len(requests) >= len(waits) == 3
    assert min(timeline.own, timeline.served, timeline.road) > 0
