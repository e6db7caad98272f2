"""The counts of ``rpc.metrics()``, and how they read in Prometheus' format."""

from __future__ import annotations

import math
import operator
import re
import threading
from itertools import pairwise
from typing import Any

import pytest
import torch

import rpc
from rpc.agent import Agent, AgentOptions
from rpc.errors import CallCancelledError, EncodeError, RpcTimeoutError, WorkerLostError
from rpc.observe.metrics import (
    BUCKET_BOUNDS,
    MAX_SERIES,
    OVERFLOW_METHOD,
    Book,
    CallMetrics,
    ErrorKind,
    Histogram,
    Series,
    Snapshot,
)
from rpc.observe.names import method_name, operator_name, text_of
from rpc.outcomes.sinks import WaitingCaller
from rpc.rrefs.rref import RRef, call_method
from rpc.testing import VirtualClock, as_worker, local_group
from rpc.wire import codec
from tests.rpc import gates
from tests.rpc.gates import wait_at_the_gate
from tests.waiting import until


class Counter:
    """Something to refer to."""

    def __init__(self) -> None:
        self.count = 0

    def increment(self, by: int) -> int:
        self.count += by
        return self.count


def identity(value: Any) -> Any:
    return value


def fail() -> None:
    raise ValueError("no")


@pytest.fixture
def gate() -> threading.Event:
    """Closed; ``wait_at_the_gate`` waits until it is set."""
    gates.reached.clear()
    gates.gate.clear()
    return gates.gate


@rpc.functions.idempotent
def wait_patiently() -> None:
    wait_at_the_gate()


async def double(value: int) -> int:
    return 2 * value


def row(rows: tuple[CallMetrics, ...], method: str) -> CallMetrics:
    (found,) = [r for r in rows if r.method == method]
    return found


def served(agent: Agent, method: str, calls: int) -> CallMetrics:
    """A row of requests served, once ``calls`` are over: a reply may outrun its own counting."""

    def over() -> bool:
        rows = agent.metrics().served
        return any(r.method == method and r.latency.count == calls for r in rows)

    until(over)
    return row(agent.metrics().served, method)


class TestCounting:
    def test_caller_and_callee_count_a_call_under_one_name(self) -> None:
        with local_group("alice", "bob") as (alice, bob):
            for number in range(3):
                alice.rpc_sync("bob", identity, (number,))
            made = row(alice.metrics().made, "identity")
            assert (made.peer, made.calls, made.in_flight, made.errors) == ("bob", 3, 0, {})
            there = served(bob, "identity", 3)
            assert (there.peer, there.calls, there.in_flight, there.errors) == ("alice", 3, 0, {})
            assert alice.metrics().worker == "alice"
            assert not bob.metrics().made

    def test_bytes_sent_are_bytes_received_and_contain_the_tensors(self) -> None:
        tensor = torch.zeros(100_000)
        with local_group("alice", "bob") as (alice, bob):
            alice.rpc_sync("bob", identity, (tensor,))
            made, there = row(alice.metrics().made, "identity"), served(bob, "identity", 1)
        assert made.bytes_out == there.bytes_in
        assert made.bytes_in == there.bytes_out
        assert 400_000 < made.bytes_out < 400_500
        assert 400_000 < made.bytes_in < 400_500

    def test_an_error_of_the_function_counts_on_both_sides(self) -> None:
        with local_group("alice", "bob") as (alice, bob):
            with pytest.raises(ValueError, match="no"):
                alice.rpc_sync("bob", fail)
            assert row(alice.metrics().made, "fail").errors == {ErrorKind.REMOTE: 1}
            assert served(bob, "fail", 1).errors == {ErrorKind.REMOTE: 1}

    def test_a_failed_creation_counts_where_it_failed(self) -> None:
        with local_group("alice", "bob") as (alice, bob):
            rref = alice.remote("bob", fail)
            with pytest.raises(ValueError, match="no"):
                rref.to_here()
            assert served(bob, "fail", 1).errors == {ErrorKind.REMOTE: 1}
            assert row(alice.metrics().made, "fail").errors == {}
            assert row(alice.metrics().made, "to_here").errors == {ErrorKind.REMOTE: 1}
            del rref

    def test_a_call_under_way_is_in_flight_until_it_is_over(self, gate: threading.Event) -> None:
        with local_group("alice", "bob") as (alice, bob):
            future = alice.rpc_async("bob", wait_at_the_gate)
            made = row(alice.metrics().made, "wait_at_the_gate")
            assert (made.calls, made.in_flight, made.latency.count) == (1, 1, 0)
            assert made.bytes_out > 0
            gate.set()
            future.wait()
            made = row(alice.metrics().made, "wait_at_the_gate")
            assert (made.calls, made.in_flight, made.latency.count) == (1, 0, 1)
            assert served(bob, "wait_at_the_gate", 1).in_flight == 0

    def test_timeouts_are_counted_with_their_length_and_late_replies_only_as_bytes(
        self, gate: threading.Event
    ) -> None:
        clock = VirtualClock()
        with local_group("alice", "bob", clock=clock) as (alice, bob):
            future = alice.rpc_async("bob", wait_at_the_gate, timeout=5)
            assert gates.reached.wait(20)  # what is given up before it begins is never served
            clock.advance(6)
            with pytest.raises(RpcTimeoutError):
                future.wait()
            made = row(alice.metrics().made, "wait_at_the_gate")
            assert made.errors == {ErrorKind.TIMEOUT: 1}
            assert (made.latency.count, made.latency.sum) == (1, 6.0)
            assert made.bytes_in == 0
            gate.set()
            replied = served(bob, "wait_at_the_gate", 1).bytes_out
            until(lambda: row(alice.metrics().made, "wait_at_the_gate").bytes_in > 0)
            made = row(alice.metrics().made, "wait_at_the_gate")
            assert (made.calls, made.latency.count, made.bytes_in) == (1, 1, replied)

    def test_every_attempt_is_served_under_the_name_of_the_function(
        self, gate: threading.Event
    ) -> None:
        often = rpc.Retry(attempts=1000, backoff=0.01, attempt_timeout=0.05)
        with local_group("alice", "bob") as (alice, bob):
            future = alice.rpc_async("bob", wait_patiently, retry=often)
            until(lambda: len(bob.callee.serving()) >= 3)
            assert {each["call"] for each in bob.callee.serving()} == {"wait_patiently"}
            gate.set()
            future.wait()
            until(lambda: not bob.callee.serving())
            assert [each.method for each in bob.metrics().served] == ["wait_patiently"]

    def test_what_waits_for_a_thread_is_served_under_its_name(self, gate: threading.Event) -> None:
        one = AgentOptions(num_worker_threads=1)
        with local_group("alice", "bob", options=one) as (alice, bob):
            bob.executor.stall_seconds = 3600.0  # no second thread
            value = alice.remote("bob", Counter)
            first = alice.rpc_async("bob", wait_at_the_gate)
            assert gates.reached.wait(20)
            calls = [alice.rpc_async("bob", identity, (1,)), value.rpc_async().increment(2)]
            until(lambda: len(bob.callee.serving()) == 3)
            names = {each["call"] for each in bob.callee.serving()}
            assert names == {"wait_at_the_gate", "identity", "RRef.increment"}
            assert calls[0].cancel()
            until(lambda: any(each["cancelled"] for each in bob.callee.serving()))
            gate.set()
            with pytest.raises(CallCancelledError):
                calls[0].wait()
            assert served(bob, "identity", 1).errors == {ErrorKind.REMOTE: 1}
            torch.futures.wait_all([first, calls[1]])
            del value

    def test_calls_of_a_lost_worker_are_lost(self, gate: threading.Event) -> None:
        with local_group("alice", "bob") as (alice, bob):
            future = alice.rpc_async("bob", wait_at_the_gate)
            alice.inbound.peer_lost(bob.life, "unplugged")
            with pytest.raises(WorkerLostError):
                future.wait()
            made = row(alice.metrics().made, "wait_at_the_gate")
            assert made.errors == {ErrorKind.LOST: 1}
            assert made.in_flight == 0
            gate.set()

    def test_a_request_the_transport_refuses_is_another_kind_of_error(self) -> None:
        with local_group("alice", "bob") as (alice, bob):
            bob.shutdown(graceful=False)
            alice.transport.remove_peer(1)
            with pytest.raises(RuntimeError):
                alice.caller.call(bob.info, identity, (1,), {}, -1, WaitingCaller())
            assert row(alice.metrics().made, "identity").errors == {ErrorKind.OTHER: 1}

    def test_arguments_that_cannot_be_sent_make_no_call(self) -> None:
        with local_group("alice", "bob") as (alice, _):
            with pytest.raises(EncodeError):
                alice.rpc_sync("bob", identity, (threading.Lock(),))
            assert sum(r.calls for r in alice.metrics().made) == 0

    def test_latency_is_what_the_clock_says(self, gate: threading.Event) -> None:
        clock = VirtualClock()
        with local_group("alice", "bob", clock=clock) as (alice, bob):
            future = alice.rpc_async("bob", wait_at_the_gate, timeout=0)
            until(lambda: len(bob.callee.serving()) == 1)
            clock.advance(0.5)
            gate.set()
            future.wait()
            for latency in (
                row(alice.metrics().made, "wait_at_the_gate").latency,
                served(bob, "wait_at_the_gate", 1).latency,
            ):
                assert latency.sum == 0.5
                ((bucket, count),) = [(i, c) for i, c in enumerate(latency.counts) if c]
                assert count == 1
                assert BUCKET_BOUNDS[bucket - 1] < 0.5 <= BUCKET_BOUNDS[bucket]

    def test_coroutines_count_from_arrival_to_reply(self) -> None:
        with local_group("alice", "bob") as (alice, bob):
            assert alice.rpc_sync("bob", double, (4,)) == 8
            assert served(bob, "double", 1).errors == {}

    def test_methods_called_through_a_reference_go_by_their_own_name(self) -> None:
        with local_group("alice", "bob") as (alice, bob):
            rref = alice.remote("bob", Counter)
            assert rref.rpc_sync().increment(2) == 2
            assert row(alice.metrics().made, "RRef.increment").calls == 1
            assert served(bob, "RRef.increment", 1).peer == "alice"
            del rref

    def test_threads_lose_no_count(self) -> None:
        def work(alice: Agent) -> None:
            for number in range(50):
                alice.rpc_sync("bob", identity, (number,))

        with local_group("alice", "bob") as (alice, bob):
            threads = [threading.Thread(target=work, args=(alice,)) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert row(alice.metrics().made, "identity").calls == 200
            assert served(bob, "identity", 200).calls == 200

    def test_the_public_function_reads_the_current_worker(self) -> None:
        with local_group("alice", "bob") as (alice, _), as_worker(alice):
            rpc.rpc_sync("bob", torch.add, (torch.ones(1), 1))
            assert [r.method for r in rpc.metrics().made] == ["torch.add"]
            assert isinstance(rpc.metrics(), Snapshot)


class TestMethodNames:
    def test_names_are_few_and_say_what_is_called(self) -> None:
        assert method_name(identity, ()) == "identity"
        assert method_name(Counter.increment, ()) == "Counter.increment"
        assert method_name(torch.nn.Linear(1, 1), ()) == "Linear"
        assert method_name(operator.itemgetter(1), ()) == "itemgetter"
        assert method_name(call_method, (RRef, "forward")) == "RRef.forward"
        assert text_of(method_name(torch.add, ())) == "torch.add"

    def test_functions_found_by_name_are_called_the_same(self) -> None:
        for function in (torch.add, operator.add, identity):
            named = codec.name_of(function)
            assert named is None or text_of(named) == text_of(method_name(function, ()))

    def test_profiles_name_operators_as_the_original_does(self) -> None:
        for function in (torch.add, identity):
            name = torch.jit._builtins._find_builtin(function) or function.__qualname__
            assert operator_name(text_of(method_name(function, ()))) == name


class TestHistogram:
    def test_buckets_include_their_upper_bound(self) -> None:
        series = Series()
        for seconds in (0.0, BUCKET_BOUNDS[0], BUCKET_BOUNDS[1], BUCKET_BOUNDS[-1], 1e9):
            series.ended(seconds, 0, 0)
        counts = series.read("m", "p", ()).latency.counts
        assert {i: c for i, c in enumerate(counts) if c} == {0: 2, 1: 1, 23: 1, 24: 1}

    def test_bounds_double_from_ten_microseconds_past_a_minute(self) -> None:
        assert BUCKET_BOUNDS[0] == 1e-5
        assert BUCKET_BOUNDS[-1] > 60
        ratios = [b / a for a, b in pairwise(BUCKET_BOUNDS)]
        assert ratios == [2.0] * (len(BUCKET_BOUNDS) - 1)

    def test_quantiles_lie_in_the_bucket_of_their_rank(self) -> None:
        counts = [0] * 25
        counts[3], counts[10] = 90, 10
        histogram = Histogram(tuple(counts), 1.0)
        assert BUCKET_BOUNDS[2] <= histogram.quantile(0.5) <= BUCKET_BOUNDS[3]
        assert BUCKET_BOUNDS[9] <= histogram.quantile(0.99) <= BUCKET_BOUNDS[10]
        assert histogram.quantile(0.9) == BUCKET_BOUNDS[3]
        assert math.isnan(Histogram((0,) * 25, 0.0).quantile(0.5))

    @pytest.mark.parametrize("fraction", [99, -0.1, math.nan])
    def test_a_quantile_is_of_a_fraction(self, fraction: float) -> None:
        with pytest.raises(ValueError, match=rf"fraction={fraction} must be from 0 to 1"):
            Histogram((1,) * 25, 1.0).quantile(fraction)


class TestBook:
    def test_the_number_of_series_is_bounded(self) -> None:
        book = Book()
        for number in range(MAX_SERIES + 10):
            book[f"method{number}", 0].ended(0.0, 0, 0)
        rows = book.read((), str)
        assert len(rows) == MAX_SERIES + 1
        assert row(rows, OVERFLOW_METHOD).calls == 10


# --- Prometheus


_SAMPLE = re.compile(
    r'^(?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*)\{(?P<labels>(?:[a-zA-Z_][a-zA-Z0-9_]*="'
    r'(?:[^"\\\n]|\\["\\n])*"(?:,|(?=\})))*)\} (?P<value>[0-9.e+-]+|\+Inf|NaN)$'
)
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\\n]|\\["\\n])*)"')

KINDS = [kind.value for kind in ErrorKind]

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def parse(text: str) -> tuple[dict[str, str], Samples]:
    """Reads the exposition format as its documentation describes it: types and samples."""
    assert text.endswith("\n")
    types: dict[str, str] = {}
    samples: Samples = {}
    for line in text[:-1].split("\n"):
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            assert name not in types
            types[name] = kind
        elif not line.startswith("# HELP "):
            match = _SAMPLE.match(line)
            assert match, line
            assert any(match["name"].startswith(name) for name in types)
            labels = frozenset(
                (k, re.sub(r"\\(.)", lambda m: {"n": "\n"}.get(m[1], m[1]), v))
                for k, v in _LABEL.findall(match["labels"])
            )
            assert (match["name"], labels) not in samples
            samples[match["name"], labels] = float(match["value"])
    return types, samples


def labels(**more: str) -> frozenset[tuple[str, str]]:
    return frozenset({"worker": "alice", "peer": "bob", **more}.items())


def a_row(method: str = "f") -> CallMetrics:
    counts = [0] * 25
    counts[0], counts[2], counts[24] = 3, 1, 1
    return CallMetrics(
        method, "bob", 7, 2, {ErrorKind.TIMEOUT: 1}, Histogram(tuple(counts), 2.5), 1000, 50
    )


class TestPrometheus:
    def test_every_number_is_exported_under_its_labels(self) -> None:
        types, samples = parse(Snapshot("alice", (a_row(),), ()).to_prometheus())
        made = "tensorwire_calls_made"
        assert types[f"{made}_total"] == "counter"
        assert types[f"{made}_in_flight"] == "gauge"
        assert types[f"{made}_latency_seconds"] == "histogram"
        at = labels(method="f")
        assert samples[f"{made}_total", at] == 7
        assert samples[f"{made}_in_flight", at] == 2
        assert samples[f"{made}_sent_bytes_total", at] == 1000
        assert samples[f"{made}_received_bytes_total", at] == 50
        errors = {k: samples[f"{made}_errors_total", labels(method="f", kind=k)] for k in KINDS}
        assert errors == {"remote": 0, "timeout": 1, "lost": 0, "other": 0}

    def test_histograms_are_cumulative_and_end_with_infinity(self) -> None:
        _, samples = parse(Snapshot("alice", (a_row(),), ()).to_prometheus())
        name = "tensorwire_calls_made_latency_seconds"
        buckets = sorted(
            (float(dict(at)["le"]), count)
            for (n, at), count in samples.items()
            if n == f"{name}_bucket"
        )
        assert [count for _, count in buckets] == [3, 3] + [4] * 22 + [5]
        assert buckets[-1][0] == math.inf
        assert [bound for bound, _ in buckets[:-1]] == list(BUCKET_BOUNDS)
        at = labels(method="f")
        assert samples[f"{name}_count", at] == 5
        assert samples[f"{name}_sum", at] == 2.5

    @pytest.mark.parametrize(
        "method", ['say "hi"', "back\\slash", "two\nlines", "naïve", "\\n", "}{,="]
    )
    def test_awkward_names_are_escaped(self, method: str) -> None:
        _, samples = parse(Snapshot("alice", (a_row(method),), ()).to_prometheus())
        assert samples["tensorwire_calls_made_total", labels(method=method)] == 7

    def test_what_was_served_is_told_apart_from_what_was_made(self) -> None:
        with local_group("alice", "bob") as (alice, bob):
            alice.rpc_sync("bob", identity, (1,))
            served(bob, "identity", 1)
            _, samples = parse(bob.metrics().to_prometheus())
        at = frozenset({"worker": "bob", "peer": "alice", "method": "identity"}.items())
        assert samples["tensorwire_calls_served_total", at] == 1
        assert ("tensorwire_calls_made_total", at) not in samples
