"""A reporter answers questions about its worker, and never ends it."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rpc.agent import Agent
from rpc.observe.metrics import CallMetrics, Histogram
from rpc.observe.reporter import WATCH, by_peer, quantile
from rpc.observe.sampling import sample
from rpc.observe.watching import report_to_launcher
from rpc.testing import local_group
from tests.rpc.gates import gates, pass_gate

Ask = Callable[[dict[str, object]], dict[str, Any]]


@pytest.fixture
def agents() -> Iterator[list[Agent]]:
    with local_group("here", "there") as group:
        yield group


@pytest.fixture
def ask(agents: list[Agent], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ask]:
    path = str(tmp_path / "watch")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        monkeypatch.setenv(WATCH, path)
        report_to_launcher(agents[0])
        connection, _ = listener.accept()
    with connection, connection.makefile("rwb") as lines:
        assert json.loads(lines.readline())["name"] == "here"

        def ask(question: dict[str, object]) -> dict[str, Any]:
            lines.write(json.dumps(question).encode() + b"\n")
            lines.flush()
            answer: dict[str, Any] = json.loads(lines.readline())
            return answer

        yield ask
        agents[0].states.close()


def test_facts_are_what_the_worker_counts(agents: list[Agent], ask: Ask) -> None:
    for _ in range(3):
        agents[0].rpc_sync("there", abs, (-1,))
    facts = ask({"number": 1, "ask": "facts"})["answer"]
    (row,) = [each for each in facts["made"] if each["peer"] == "there"]
    assert (row["calls"], row["errors"], sum(row["buckets"])) == (3, 0, 3)
    assert facts["progress"]["steps"] == 0
    assert facts["waiting"] == []


def test_of_many_peers_those_with_few_calls_are_told_as_one() -> None:
    latency = Histogram((1, 0), 0.5)
    rows = [CallMetrics("f", f"w:{n}", n, 0, {}, latency, 10, 1) for n in range(1000)]
    told = {row["peer"]: row for row in by_peer(rows)}
    assert len(told) == 51
    assert set(told) == {f"w:{n}" for n in range(950, 1000)} | {"950 others"}
    assert sum(row["calls"] for row in told.values()) == sum(range(1000))
    assert told["950 others"]["buckets"] == [950, 0]


def test_a_call_that_hangs_is_told_with_its_destination(agents: list[Agent], ask: Ask) -> None:
    future = agents[0].rpc_async("there", pass_gate, ("reporter",))
    try:
        assert gates["reporter"].reached.wait(60)
        (row,) = ask({"number": 1, "ask": "facts"})["answer"]["waiting"]
        assert row["to"] == "there"
    finally:
        gates["reporter"].open.set()
        future.wait()


def test_stacks_and_samples_show_what_threads_do(ask: Ask) -> None:
    assert "test_reporter.py" in ask({"number": 1, "ask": "stacks"})["answer"]
    sampled = ask({"number": 2, "ask": "trace", "seconds": 0.2})["answer"]
    names = {event["name"] for event in sampled["traceEvents"]}
    assert any("test_stacks_and_samples" in name for name in names)


def test_a_question_that_nobody_knows_is_answered_with_an_error(ask: Ask) -> None:
    answer = ask({"number": 7, "ask": "secrets"})
    assert answer["number"] == 7
    assert "must be facts, stacks or trace" in answer["error"]
    assert "answer" in ask({"number": 8, "ask": "facts"})


def test_a_worker_whose_launcher_is_gone_goes_on(
    agents: list[Agent], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(WATCH, "/nowhere/at/all")
    report_to_launcher(agents[1])
    assert "nobody can watch this worker" in caplog.text
    assert agents[0].rpc_sync("there", abs, (-1,)) == 1


def test_a_sample_ends_early_when_the_worker_leaves() -> None:
    stop = threading.Event()
    stop.set()
    assert sample(stop, 3600.0)["traceEvents"]


def test_a_quantile_of_told_buckets_is_near_what_was_measured() -> None:
    assert 1e-5 < quantile([0, 10, 0], 0.5) <= 2e-5
