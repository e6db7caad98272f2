"""Spans of calls for OpenTelemetry: names, parents and failures, on several workers."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import pytest
import torch
from opentelemetry import baggage, context, trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode, Tracer

import autograd_dist
import rpc
from rpc.agent import Agent
from rpc.testing import as_worker, local_group
from tensorwire import parameter_server as ps
from tensorwire.integrations.opentelemetry import WithoutSpans, trace_calls
from tests.rpc.worker_processes import WorkerProcess, join, leave
from tests.waiting import until


class Spans:
    """The spans that the workers of a test made."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))

    @property
    def tracer(self) -> Tracer:
        return self.provider.get_tracer("test")

    def ended(self, count: int) -> list[ReadableSpan]:
        """All spans, once there are so many; the later of two ends may come from any thread."""
        until(lambda: len(self.exporter.get_finished_spans()) >= count)
        found = list(self.exporter.get_finished_spans())
        assert len(found) == count, [span.name for span in found]
        return found

    def one(self, count: int, name: str, kind: SpanKind) -> ReadableSpan:
        (found,) = [s for s in self.ended(count) if s.name == name and s.kind is kind]
        return found


@pytest.fixture
def spans() -> Spans:
    return Spans()


@pytest.fixture
def group(spans: Spans) -> Iterator[list[Agent]]:
    """Three workers that make spans; code in the test runs as the first."""
    with local_group("alice", "bob", "carol") as agents:
        for agent in agents:
            with as_worker(agent):
                trace_calls(spans.provider)
        with as_worker(agents[0]):
            yield agents


def parent_of(span: ReadableSpan) -> int | None:
    return span.parent.span_id if span.parent is not None else None


def id_of(span: ReadableSpan) -> int:
    return span.context.span_id


def pass_on(to: str) -> str:
    return str(rpc.rpc_sync(to, rpc.get_worker_info).name)


async def wait_and_fail() -> None:
    await asyncio.sleep(0)
    raise LookupError("nothing there")


@rpc.functions.async_execution
def fail_later(to: str) -> torch.futures.Future[int]:
    return rpc.rpc_async(to, fail)


def fail() -> None:
    raise LookupError("nothing there")


def baggage_here() -> object:
    return baggage.get_baggage("user")


def test_nested_calls_are_one_trace(group: list[Agent], spans: Spans) -> None:
    with spans.tracer.start_as_current_span("step") as step:
        assert rpc.rpc_sync("bob", pass_on, ("carol",)) == "carol"
    of = {(span.name, span.kind): span for span in spans.ended(5)}
    call, handler = of["pass_on", SpanKind.CLIENT], of["pass_on", SpanKind.SERVER]
    inner, last = of["get_worker_info", SpanKind.CLIENT], of["get_worker_info", SpanKind.SERVER]
    assert {span.context.trace_id for span in of.values()} == {step.get_span_context().trace_id}
    assert parent_of(call) == step.get_span_context().span_id
    assert parent_of(handler) == id_of(call)
    assert parent_of(inner) == id_of(handler)
    assert parent_of(last) == id_of(inner)
    assert dict(inner.attributes or {}) == {
        "rpc.system": "tensorwire",
        "rpc.method": "get_worker_info",
        "tensorwire.kind": "sync",
        "tensorwire.worker": "bob",
        "tensorwire.peer": "carol",
    }
    assert [event.name for event in call.events] == ["replied"]
    assert call.start_time <= handler.start_time <= handler.end_time <= call.end_time  # type: ignore[operator]


def test_calls_that_follow_each_other_are_no_parents_of_each_other(
    group: list[Agent], spans: Spans
) -> None:
    rpc.rpc_sync("bob", baggage_here)
    rpc.rpc_sync("bob", baggage_here)
    found = spans.ended(4)
    assert len({span.context.trace_id for span in found}) == 2
    assert [parent_of(span) for span in found if span.kind is SpanKind.CLIENT] == [None, None]


@pytest.mark.parametrize("function", [fail, wait_and_fail])
def test_failures_are_recorded_at_both_ends(
    group: list[Agent], spans: Spans, function: Callable[[], object]
) -> None:
    with pytest.raises(LookupError, match="nothing there"):
        rpc.rpc_sync("bob", function)
    for span in spans.ended(2):
        assert span.status.status_code is StatusCode.ERROR
        assert span.status.description == "LookupError: nothing there"
        (event,) = [event for event in span.events if event.name == "exception"]
        assert (event.attributes or {})["exception.type"] == "LookupError"


def test_a_handler_that_returns_a_future_ends_with_it(group: list[Agent], spans: Spans) -> None:
    with pytest.raises(LookupError, match="nothing there"):
        rpc.rpc_async("bob", fail_later, ("carol",)).wait()
    assert {span.status.status_code for span in spans.ended(4)} == {StatusCode.ERROR}
    handler = spans.one(4, "fail_later", SpanKind.SERVER)
    inner = spans.one(4, "fail", SpanKind.CLIENT)
    assert parent_of(inner) == id_of(handler)
    assert handler.end_time >= inner.end_time  # type: ignore[operator]


def test_a_call_that_is_never_sent_ends_as_failed(group: list[Agent], spans: Spans) -> None:
    with pytest.raises(rpc.EncodeError):
        rpc.rpc_sync("bob", id, (sys._getframe(),))
    (span,) = spans.ended(1)
    assert (span.name, span.status.status_code) == ("id", StatusCode.ERROR)


def test_references_and_their_values_have_spans(group: list[Agent], spans: Spans) -> None:
    rref = rpc.remote("bob", torch.nn.Linear, (2, 2))
    rref.rpc_sync().forward(torch.ones(2))
    rref.to_here()
    made = [span for span in spans.ended(5) if span.kind is SpanKind.CLIENT]
    told = [(span.name, (span.attributes or {})["tensorwire.kind"]) for span in made]
    assert told == [("Linear", "remote"), ("RRef.forward", "sync"), ("to_here", "to_here")]


def test_baggage_goes_along(group: list[Agent]) -> None:
    token = context.attach(baggage.set_baggage("user", "ada"))
    try:
        assert rpc.rpc_sync("bob", baggage_here) == "ada"
    finally:
        context.detach(token)
    assert rpc.rpc_sync("bob", baggage_here) is None


def test_messages_of_a_backward_pass_are_in_its_trace(group: list[Agent], spans: Spans) -> None:
    weight = torch.ones(2, requires_grad=True)
    with spans.tracer.start_as_current_span("step") as step, autograd_dist.context() as number:
        loss = rpc.rpc_sync("bob", torch.mul, (weight, 2.0)).sum()
        autograd_dist.backward(number, [loss])
    names = "autograd_dist message"
    until(lambda: names in [span.name for span in spans.exporter.get_finished_spans()])
    found = [s for s in spans.exporter.get_finished_spans() if s.name == names]
    assert {s.context.trace_id for s in found} == {step.get_span_context().trace_id}


def test_a_step_with_parameter_servers_has_pushes_and_pulls(spans: Spans) -> None:
    with local_group("ps0", "trainer") as (_, trainer), as_worker(trainer):
        trace_calls(spans.provider)
        cluster = ps.connect(["ps0"], trainers=1)
        model = ps.EmbeddingBag(cluster.table("words", dim=4, optimizer=ps.SGD(lr=0.1)))
        optimizer = ps.Optimizer(cluster, model)
        for _ in range(2):
            model(torch.tensor([1, 2]), torch.tensor([0])).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    names = {s.name for s in spans.exporter.get_finished_spans() if s.kind is SpanKind.CLIENT}
    assert {"push", "pull"} <= names


def test_a_worker_without_opentelemetry_serves_calls_that_carry_a_trace(
    spans: Spans, monkeypatch: pytest.MonkeyPatch
) -> None:
    with local_group("alice", "bob") as (alice, bob), as_worker(alice):
        trace_calls(spans.provider)
        monkeypatch.setattr("tensorwire.integrations.opentelemetry.RPC_EXTENSION", WithoutSpans)
        assert rpc.rpc_sync("bob", pass_on, ("bob",)) == "bob"
        assert not bob.extensions.observers
        spans.ended(1)
        monkeypatch.setattr("tensorwire.integrations.opentelemetry.IS_INSTALLED", False)
        with pytest.raises(ImportError, match=r"tensorwire\[opentelemetry\]"):
            trace_calls()


def test_metadata_that_is_no_context_fails_the_call(
    group: list[Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    (extension,) = group[0].extensions.observers
    monkeypatch.setattr(extension, "outgoing_request", lambda to, tensors: b"[1]")
    with pytest.raises(RuntimeError, match="is no context of a trace"):
        rpc.rpc_sync("bob", baggage_here)


def functions_called(count: int) -> list[str]:
    """The Python functions that this thread enters during so many calls, by file and name."""
    found: list[str] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            found.append(f"{frame.f_code.co_filename}:{frame.f_code.co_name}")

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        for _ in range(count):
            rpc.rpc_sync("bob", baggage_here)
    finally:
        sys.setprofile(before)
    return found


def test_a_call_without_observers_enters_no_function_of_theirs(spans: Spans) -> None:
    with local_group("alice", "bob") as (alice, _), as_worker(alice):
        rpc.rpc_sync("bob", baggage_here)
        without = functions_called(3)
        trace_calls(spans.provider)
        rpc.rpc_sync("bob", baggage_here)
        watched = functions_called(3)
    parts = ("observe/spans", "calls/extension_set", "opentelemetry")
    assert [each for each in without if any(part in each for part in parts)] == []
    assert any("opentelemetry" in each for each in watched)


@pytest.mark.slow
@pytest.mark.usefixtures("process_server")
def test_a_call_between_two_processes_is_one_trace(tmp_path: Path) -> None:
    """Both import all that they need by themselves; the second loads what the first uses."""
    workers = [WorkerProcess(), WorkerProcess()]
    try:
        url = f"file://{tmp_path / 'store'}"
        for rank, worker in enumerate(workers):
            worker.begin(_join_and_trace, ("alice", "bob")[rank], rank, url)
        for worker in workers:
            worker.result()
        workers[0].do(rpc.rpc_sync, "bob", pass_on, ("bob",))
        made = [worker.do(_finished_spans) for worker in workers]
        for worker in workers:
            worker.begin(leave)
        for worker in workers:
            worker.result()
    finally:
        for worker in workers:
            worker.end()
    assert [(name, kind) for _, name, kind in made[0]] == [("pass_on", "CLIENT")]
    assert ("pass_on", "SERVER") in [(name, kind) for _, name, kind in made[1]]
    assert len({trace for spans in made for trace, _, _ in spans}) == 1


def _join_and_trace(name: str, rank: int, url: str) -> None:
    """Sets up the process's exporter; ``bob`` makes spans of what comes with a trace alone."""
    spans = Spans()
    trace.set_tracer_provider(spans.provider)
    _kept.append(spans)
    join("TENSORWIRE", url, name, rank, 2)
    if name == "alice":
        trace_calls()


_kept: list[Spans] = []


def _finished_spans() -> list[tuple[int, str, str]]:
    found = _kept[0].exporter.get_finished_spans()
    return [(span.context.trace_id, span.name, span.kind.name) for span in found]
