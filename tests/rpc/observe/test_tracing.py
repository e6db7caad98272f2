"""Traces of calls between agents: who records what, and when it is over."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import operator
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import autograd_dist
import rpc
from rpc.agent import Agent
from rpc.errors import FrameError
from rpc.functions import async_execution
from rpc.observe.trace_records import CallKind, CallRecord, HandlerRecord, WorkerTrace
from rpc.observe.tracing import MAX_RECORDS, Trace, Tracing, trace
from rpc.runtime.clock import MonotonicClock
from rpc.testing import as_worker, local_group
from rpc.transports.base import Frame, FrameKind
from tests.rpc.gates import gate, wait_at_the_gate
from tests.torch_features import needs_profiles_of_all_threads
from tests.waiting import until

Group = list[Agent]


@pytest.fixture
def group() -> Iterator[Group]:
    """Three workers; code in the test runs as alice."""
    with local_group("alice", "bob", "carol") as agents, as_worker(agents[0]):
        yield agents


def identity(value: Any) -> Any:
    return value


def pass_on(names: list[str]) -> int:
    """Visits the workers in turn, each call nested in the one before."""
    return 0 if not names else 1 + rpc.rpc_sync(names[0], pass_on, (names[1:],))


async def doze(value: int) -> int:
    await asyncio.sleep(0.01)
    return value


@async_execution
def ask_carol(value: int) -> Any:
    return rpc.rpc_async("carol", identity, (value,))


@rpc.functions.idempotent
def wait_patiently() -> None:
    wait_at_the_gate()


@rpc.functions.idempotent
def nothing() -> None: ...


def add_up(count: int) -> torch.Tensor:
    total = torch.zeros(4)
    for _ in range(count):
        total = total + 1
    return total


def multiply_at(worker: str, value: torch.Tensor) -> torch.Tensor:
    return rpc.rpc_sync(worker, operator.mul, (value, value))


@contextlib.contextmanager
def trace_to_the_end(group: Group) -> Iterator[Trace]:
    """Traces like :func:`trace`, but ends when every handler has noted that it replied."""

    def noted(agent: Agent) -> bool:
        tracing = agent.extensions.load("rpc.tracing")
        assert isinstance(tracing, Tracing)
        recordings = list(tracing._recordings.values())
        return all(handler.replied for each in recordings for handler in each.records.handlers)

    with trace() as found:
        yield found
        until(lambda: all(map(noted, group)))


def of(found: Trace, name: str) -> WorkerTrace:
    (worker,) = [w for w in found.workers if w.name == name]
    return worker


def pair_of(found: Trace, caller: str, callee: str) -> tuple[CallRecord, HandlerRecord]:
    """The only call from one worker to another, as both recorded it."""
    agents = {w.name: w for w in found.workers}
    (call,) = [c for c in agents[caller].calls if c.to == agents[callee].worker]
    (handler,) = [h for h in agents[callee].handlers if h.span == call.span]
    return call, handler


class TestRecording:
    def test_both_ends_of_a_call_are_recorded_under_one_number(self, group: Group) -> None:
        with trace_to_the_end(group) as found:
            rpc.rpc_sync("bob", identity, (1,))
        call, handler = pair_of(found, "alice", "bob")
        assert (call.kind, call.name, call.to, call.failed) == (CallKind.SYNC, "identity", 1, False)
        assert (handler.name, handler.sender, handler.failed) == ("identity", 0, False)
        assert call.begun < call.sent < call.replied < call.ended
        assert handler.arrived < handler.started < handler.running <= handler.returned
        assert handler.returned == handler.ran < handler.encoded < handler.replied
        assert call.sent < handler.arrived
        assert handler.encoded < call.replied

    def test_calls_made_by_handlers_are_followed_over_all_workers(self, group: Group) -> None:
        with trace() as found:
            assert rpc.rpc_sync("bob", pass_on, (["carol", "alice", "bob"],)) == 3
        visited = [(w.name, len(w.calls), len(w.handlers)) for w in found.workers]
        assert visited == [("alice", 2, 1), ("bob", 1, 2), ("carol", 1, 1)]
        outer, inner = pair_of(found, "bob", "carol")
        spans = [c.span for w in found.workers for c in w.calls]
        assert len(set(spans)) == len(spans)
        assert {h.span for w in found.workers for h in w.handlers} == set(spans)
        assert outer.begun < inner.running

    def test_each_way_of_calling_is_recorded_as_such(self, group: Group) -> None:
        with trace_to_the_end(group) as found:
            future = rpc.rpc_async("bob", identity, (1,))
            rref = rpc.remote("bob", identity, ([2],))
            assert (future.wait(), rref.to_here()) == (1, [2])
            rref._get_future().wait()
        kinds = {call.kind: call for call in of(found, "alice").calls}
        assert set(kinds) == {CallKind.ASYNC, CallKind.REMOTE, CallKind.TO_HERE}
        assert all(call.ended >= call.replied > call.sent for call in kinds.values())
        fetch = next(h for h in of(found, "bob").handlers if h.name == "to_here")
        assert fetch.started <= fetch.encoded <= fetch.replied
        del rref

    def test_asynchronous_handlers_run_until_their_result_is_there(self, group: Group) -> None:
        with trace_to_the_end(group) as found:
            rpc.rpc_sync("bob", doze, (1,))
            assert rpc.rpc_sync("bob", ask_carol, (2,)) == 2
        dozed, asked = of(found, "bob").handlers
        assert dozed.ran - dozed.returned > 0.005
        assert asked.returned < asked.ran < asked.replied
        call, handler = pair_of(found, "bob", "carol")
        assert asked.running < call.begun < asked.returned
        assert handler.encoded < asked.encoded < asked.replied

    def test_a_call_that_may_be_tried_again_is_shown_as_it_was_made(self, group: Group) -> None:
        retry = rpc.Retry(attempts=2)
        with trace() as found:
            rpc.rpc_sync("bob", nothing, retry=retry)
            rpc.rpc_async("bob", nothing, retry=retry).wait()
            rpc.remote("bob", nothing, retry=retry).to_here()
        kinds = [call.kind for call in of(found, "alice").calls]
        assert kinds[:3] == [CallKind.SYNC, CallKind.ASYNC, CallKind.REMOTE]

    def test_attempts_that_waited_for_the_first_leave_its_record_as_it_was(
        self, group: Group
    ) -> None:
        gate.clear()
        often = rpc.Retry(attempts=1000, backoff=0.01, attempt_timeout=0.05)
        with trace_to_the_end(group) as found:
            future = rpc.rpc_async("bob", wait_patiently, retry=often)
            until(lambda: len(group[1].callee.serving()) >= 3)
            gate.set()
            future.wait()
        (handler,) = of(found, "bob").handlers
        assert handler.arrived <= handler.started < handler.running
        assert handler.ran < handler.encoded <= handler.replied

    def test_messages_of_extensions_are_followed_too(self, group: Group) -> None:
        leaf = torch.ones(2, requires_grad=True)
        with trace() as found, autograd_dist.context() as context:
            loss = rpc.rpc_sync("bob", multiply_at, ("carol", leaf))
            autograd_dist.backward(context, [loss.sum()])
            assert autograd_dist.get_gradients(context)[leaf].tolist() == [2.0, 2.0]
        names = {h.name for h in of(found, "carol").handlers}
        assert names == {"mul", "autograd_dist message"}
        for name, to in (("alice", 1), ("bob", 2)):
            calls = of(found, name).calls
            assert to in {c.to for c in calls if c.kind is CallKind.MESSAGE and c.replied}

    def test_a_failed_call_is_marked_at_both_ends(self, group: Group) -> None:
        with trace_to_the_end(group) as found, pytest.raises(ZeroDivisionError):
            rpc.rpc_sync("bob", operator.truediv, (1, 0))
        call, handler = pair_of(found, "alice", "bob")
        assert call.failed
        assert handler.failed
        assert handler.replied > handler.ran > 0

    @pytest.mark.parametrize(("divisor", "fails"), [(2, False), (0, True)])
    def test_records_are_complete_before_the_reply_leaves(
        self, group: Group, divisor: int, fails: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        records: list[HandlerRecord] = []
        bob = group[1]
        send = bob.transport.send

        def look_and_send(to: int, frame: Frame) -> None:
            if frame.kind is FrameKind.REPLY:
                tracing = bob.extensions.load("rpc.tracing")
                for recording in tracing._recordings.values():
                    records.extend(map(dataclasses.replace, recording.records.handlers))
            send(to, frame)

        with trace():
            monkeypatch.setattr(bob.transport, "send", look_and_send)
            with pytest.raises(ZeroDivisionError) if fails else contextlib.nullcontext():
                rpc.rpc_sync("bob", operator.truediv, (1, divisor))
            monkeypatch.undo()
        (record,) = records
        assert record.failed is fails
        assert 0 < record.arrived < record.started < record.left <= record.replied

    def test_what_cannot_be_sent_is_a_failed_call(self, group: Group) -> None:
        with trace() as found, pytest.raises(RuntimeError):
            rpc.rpc_sync("bob", identity, (threading.Lock(),))
        (call,) = of(found, "alice").calls
        assert call.failed

    def test_only_what_is_made_inside_is_recorded(self, group: Group) -> None:
        rpc.rpc_sync("bob", identity, (1,))
        with trace() as found, ThreadPoolExecutor(1) as elsewhere:
            elsewhere.submit(group[2].rpc_sync, "bob", identity, (1,)).result()
            group[1].rpc_sync("carol", identity, (1,))
        rpc.rpc_sync("bob", identity, (1,))
        assert not any(w.calls or w.handlers for w in found.workers)

    def test_traces_do_not_mix(self, group: Group) -> None:
        def work(agent: Agent) -> Trace:
            with as_worker(agent), trace() as found:
                rpc.rpc_sync("bob", pass_on, (["carol"],))
            return found

        with ThreadPoolExecutor(2) as pool:
            both = list(pool.map(work, (group[0], group[2])))
        for found in both:
            assert sum(len(w.calls) for w in found.workers) == 2
            assert sum(len(w.handlers) for w in found.workers) == 2
        assert both[1].workers[0].name == "carol"

    def test_records_beyond_the_limit_are_counted_only(self, group: Group) -> None:
        with trace() as found:
            rpc.rpc_sync("bob", identity, (1,))
            mine = group[0].extensions.load("rpc.tracing")
            assert isinstance(mine, Tracing)
            (recording,) = mine._recordings.values()
            recording.records.calls *= MAX_RECORDS
            rpc.rpc_sync("bob", identity, (1,))
            del recording.records.calls[1:]
        assert of(found, "alice").dropped == 1
        assert len(of(found, "bob").handlers) == 2


class TestEnding:
    def test_nobody_remembers_a_trace_that_is_over(self, group: Group) -> None:
        with trace():
            rpc.rpc_sync("bob", pass_on, (["carol"],))
            assert group[1].debug_info()["traces"] == 1
        assert [agent.debug_info()["traces"] for agent in group] == [0, 0, 0]

    def test_a_call_that_outlives_its_trace_is_no_longer_recorded(self, group: Group) -> None:
        gate.clear()
        with trace() as found:
            future = rpc.rpc_async("bob", wait_at_the_gate)
            until(lambda: bool(group[1].callee.serving()))
        gate.set()
        future.wait()
        (call,) = of(found, "alice").calls
        assert call.sent > 0
        assert group[1].debug_info()["traces"] == 0
        found.chrome_trace()

    def test_a_lost_worker_is_named_and_does_not_hold_up_the_others(self, group: Group) -> None:
        with trace() as found:
            rpc.rpc_sync("bob", identity, (1,))
            rpc.rpc_sync("carol", identity, (1,))
            group[2].transport.close(0)
            group[0].transport.remove_peer(2)
        assert [w.name for w in found.workers] == ["alice", "bob"]
        (problem,) = found.problems
        assert problem.startswith("carol: ")
        assert found.chrome_trace()["otherData"]["problems"] == [problem]

    def test_one_whose_loss_is_known_before_the_end_is_named_too(self, group: Group) -> None:
        with trace() as found:
            group[0].inbound.peer_lost(group[2].life, "unplugged")
        (problem,) = found.problems
        assert problem.startswith("carol: ")
        assert "unplugged" in problem

    def test_traces_of_a_lost_worker_are_forgotten(self, group: Group) -> None:
        extension = group[1].extensions.load("rpc.tracing")
        assert isinstance(extension, Tracing)
        assert extension.recording(7, owner=2) is not None
        assert extension.recording(8, owner=0) is not None
        group[1].inbound.peer_lost(group[2].life, "unplugged")
        assert extension.debug_info() == {"traces": 1}
        assert extension.recording(7, owner=2) is None

    def test_an_error_inside_ends_the_trace_and_goes_on(self, group: Group, tmp_path: Path) -> None:
        path = tmp_path / "trace.json"
        with pytest.raises(KeyError), trace(path) as found:  # noqa: PT012
            rpc.rpc_sync("bob", identity, (1,))
            raise KeyError
        assert len(of(found, "bob").handlers) == 1
        assert json.loads(path.read_text())["traceEvents"]

    def test_a_trace_within_a_trace_is_refused(self, group: Group) -> None:
        with trace(), pytest.raises(RuntimeError, match="already"), trace():
            pass


class TestResult:
    def test_the_file_holds_the_chrome_trace(self, group: Group, tmp_path: Path) -> None:
        path = tmp_path / "trace.json"
        with trace(path) as found:
            rpc.rpc_sync("bob", torch.add, (torch.ones(2), 1))
        written = json.loads(path.read_text())
        assert written == json.loads(json.dumps(found.chrome_trace()))
        names = [e["name"] for e in written["traceEvents"] if e.get("cat") == "call"]
        assert names == ["rpc_sync#aten::add(alice -> bob)"]
        assert {e["ph"] for e in written["traceEvents"]} == {"M", "X", "s", "t", "f"}

    def test_clocks_that_are_apart_are_aligned(self) -> None:
        apart = {1: 1000.0, 2: -500.0}
        clocks = {"alice": _Shifted(0.0), "bob": _Shifted(1000.0), "carol": _Shifted(-500.0)}
        with local_group(*clocks, clock=clocks) as agents, as_worker(agents[0]), trace() as found:
            for _ in range(5):
                rpc.rpc_sync("bob", pass_on, (["carol"],))
        for worker, seconds in apart.items():
            offset = found.offsets[worker]
            assert abs(offset.seconds - seconds) <= offset.error + 1e-6
            assert offset.error < 1.0
        events = found.chrome_trace()["traceEvents"]
        times = [e["ts"] + e["dur"] for e in events if e["ph"] == "X"]
        assert max(times) < 20e6

    @needs_profiles_of_all_threads
    def test_operators_lie_beneath_the_handlers_that_ran_them(self, group: Group) -> None:
        with trace(operators=True) as found:
            rpc.rpc_sync("bob", add_up, (3,))
            torch.ones(1).mul(2)
        events = found.chrome_trace()["traceEvents"]
        (handler,) = [e for e in events if e.get("cat") == "handler"]
        (running,) = [e for e in events if e["name"] == "running" and e["pid"] == 1]
        beneath = [
            e["name"]
            for e in events
            if e.get("cat") == "operator" and (e["pid"], e["tid"]) == (1, handler["tid"])
        ]
        assert beneath.count("aten::add") == 3
        for event in events:
            if event["name"] == "aten::add":
                assert running["ts"] - 50 <= event["ts"] <= running["ts"] + running["dur"] + 50
        (own,) = [e for e in events if e["name"] == "aten::mul"]
        assert own["pid"] == 0

    def test_a_torch_that_cannot_record_operators_is_refused(
        self, group: Group, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def without_threads() -> None:
            return

        monkeypatch.setattr(torch._C._profiler, "_ExperimentalConfig", without_threads)
        with pytest.raises(RuntimeError, match="operators of all threads"), trace(operators=True):
            pass
        assert group[0].debug_info()["traces"] == 0
        with trace() as found:
            rpc.rpc_sync("bob", identity, (1,))
        assert len(of(found, "bob").handlers) == 1

    def test_operators_are_left_to_a_profiler_that_runs_already(self, group: Group) -> None:
        with torch.profiler.profile() as profile, trace(operators=True) as found:
            rpc.rpc_sync("bob", identity, (1,))
            torch.ones(1)
        assert not any(w.operators for w in found.workers)
        names = {event.name for event in profile.events()}
        assert {"aten::ones", "rpc_sync#identity(alice -> bob)"} <= names


class _Shifted(MonotonicClock):
    """A clock that is ahead of the machine's."""

    def __init__(self, seconds: float) -> None:
        self.now = lambda: time.monotonic() + seconds


def test_metadata_that_is_too_short_is_refused(group: Group) -> None:
    with pytest.raises(FrameError, match="trace metadata"):
        Tracing(group[0].worker).incoming_request(1, b"short", [])


def test_what_is_no_path_is_refused_before_anything_is_recorded(group: Group) -> None:
    descriptor: Any = os.open(os.devnull, os.O_WRONLY)
    with (
        pytest.raises(TypeError, match=r"path=.* is a int, not the path of a file"),
        trace(descriptor),
    ):
        pass
    os.close(descriptor)


@pytest.mark.parametrize(
    ("path", "kind", "reason"),
    [
        ("", FileNotFoundError, "No such file"),
        ("missing/trace.json", FileNotFoundError, "No such file"),
        (".", IsADirectoryError, "Is a directory"),
        ("file/trace.json", NotADirectoryError, "Not a directory"),
        ("a" * 300, OSError, "too long"),
        ("a\0b", ValueError, "null"),
    ],
)
def test_a_file_that_cannot_be_written_is_refused_before_anything_is_recorded(
    group: Group,
    path: str,
    kind: type[Exception],
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    entered = False
    with pytest.raises(kind, match=reason) as raised, trace(path):
        entered = True
    assert not entered
    assert f"path={path!r}" in str(raised.value)
    with trace():  # none is being recorded
        pass


def test_the_trace_is_written_to_the_file_that_was_meant_when_it_began(
    group: Group, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "trace.json").write_text("what was there before")
    monkeypatch.chdir(tmp_path)
    with trace("trace.json"):
        assert (tmp_path / "trace.json").read_text() == "what was there before"
        monkeypatch.chdir(tmp_path / "elsewhere")
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]


def test_without_rpc_there_is_nothing_to_trace() -> None:
    with pytest.raises(RuntimeError), trace():
        pass
