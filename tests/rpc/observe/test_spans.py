"""Calls as torch's profilers show them."""

from __future__ import annotations

import operator
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd import profiler
from torch.profiler import ProfilerActivity

import rpc
from rpc.agent import Agent
from rpc.calls import caller
from rpc.observe import spans as observation
from rpc.testing import as_worker, local_group
from tests.rpc.gates import gate, wait_at_the_gate
from tests.torch_features import needs_profiles_of_all_threads

Profile = Any


@pytest.fixture
def group() -> Iterator[list[Agent]]:
    """Two workers; code in the test runs as the first."""
    with local_group("worker0", "worker1") as agents, as_worker(agents[0]):
        yield agents


def kineto() -> AbstractContextManager[Profile]:
    return torch.profiler.profile(activities=[ProfilerActivity.CPU])


def autograd() -> AbstractContextManager[Profile]:
    return profiler.profile(use_kineto=True)


def all_threads() -> AbstractContextManager[Profile]:
    return torch.profiler.profile(
        activities=[ProfilerActivity.CPU],
        experimental_config=torch._C._profiler._ExperimentalConfig(profile_all_threads=True),
    )


profiles = pytest.mark.parametrize(
    "make", [kineto, autograd, pytest.param(all_threads, marks=needs_profiles_of_all_threads)]
)


def events(profile: Profile) -> dict[str, Any]:
    found = profile.function_events if hasattr(profile, "function_events") else profile.events()
    return {event.name: event for event in found}


def add_up(value: torch.Tensor) -> torch.Tensor:
    return value + value


@profiles
def test_every_way_of_calling_has_its_span(group: list[Agent], make: Any) -> None:
    with make() as profile:
        rpc.rpc_sync("worker1", add_up, (torch.ones(2),))
        rpc.rpc_async("worker1", torch.add, (torch.ones(2), 1)).wait()
        rref = rpc.remote("worker1", add_up, (torch.ones(2),))
        rref._get_profiling_future().wait()
        rref.to_here()
    names = set(events(profile))
    assert {
        "rpc_sync#add_up(worker0 -> worker1)",
        "rpc_async#aten::add(worker0 -> worker1)",
        "rpc_remote#add_up(worker0 -> worker1)",
        "to_here#(worker0)->(worker1)",
    } <= names
    del rref


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_torchscript_function_has_its_qualified_name(group: list[Agent]) -> None:
    scripted = torch.jit.script(add_up)
    with kineto() as profile:
        rpc.rpc_sync("worker1", scripted, (torch.ones(1),))
    assert f"rpc_sync#{scripted.qualified_name}(worker0 -> worker1)" in events(profile)
    (row,) = (each for each in rpc.metrics().made if each.calls)
    assert row.method == scripted.qualified_name


def test_names_are_the_originals(group: list[Agent]) -> None:
    original = pytest.importorskip("torch.distributed.rpc.internal")
    with kineto() as profile:
        rpc.rpc_sync("worker1", add_up, (torch.ones(1),))
    key = original._build_rpc_profiling_key(
        original.RPCExecMode.SYNC, add_up.__qualname__, "worker0", "worker1"
    )
    assert key in events(profile)


@profiles
def test_the_span_of_an_asynchronous_call_lasts_until_it_is_done(
    group: list[Agent], make: Any
) -> None:
    gate.clear()
    with make() as profile:
        future = rpc.rpc_async("worker1", wait_at_the_gate)
        with profiler.record_function("meanwhile"):
            threading.Event().wait(0.02)
        gate.set()
        future.wait()
    found = events(profile)
    span = found["rpc_async#wait_at_the_gate(worker0 -> worker1)"].time_range
    assert span.start <= found["meanwhile"].time_range.start
    assert span.end >= found["meanwhile"].time_range.end


@needs_profiles_of_all_threads
def test_a_handler_is_a_span_with_its_operators_beneath(group: list[Agent]) -> None:
    with all_threads() as profile:
        rpc.rpc_sync("worker1", add_up, (torch.ones(2),))
    found = events(profile)
    handler = found["rpc_handler#add_up(worker0 -> worker1)"]
    assert found["aten::add"].cpu_parent is handler
    assert handler.thread != found["rpc_sync#add_up(worker0 -> worker1)"].thread


@pytest.mark.parametrize("function", [operator.truediv, operator.itemgetter(5)])
def test_spans_of_failed_calls_end(group: list[Agent], function: Any) -> None:
    with kineto() as profile:
        with pytest.raises((ZeroDivisionError, TypeError)):
            rpc.rpc_sync("worker1", function, (1, 0))
        with profiler.record_function("after"):
            pass
    found = events(profile)
    (name,) = [n for n in found if n.startswith("rpc_sync#")]
    assert found[name].time_range.end <= found["after"].time_range.start


def test_spans_of_calls_that_cannot_be_sent_end(group: list[Agent]) -> None:
    with kineto() as profile:
        with pytest.raises(RuntimeError):
            rpc.rpc_sync("worker1", add_up, (threading.Lock(),))
        with profiler.record_function("after"):
            pass
    found = events(profile)
    span = found["rpc_sync#add_up(worker0 -> worker1)"]
    assert span.time_range.end <= found["after"].time_range.start


@profiles
def test_the_spans_of_calls_that_outlive_the_profile_end_with_it(
    group: list[Agent], make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch writes to freed memory when a span ends after its profile."""
    open_at_the_stop = []
    stop = profiler._disable_profiler

    def stop_and_look() -> Any:
        result = stop()
        open_at_the_stop.append(len(observation._open))
        return result

    monkeypatch.setattr(profiler, "_disable_profiler", stop_and_look)
    gate.clear()
    with make() as profile:
        futures = [rpc.rpc_async("worker1", wait_at_the_gate) for _ in range(3)]
        rpc.rpc_sync("worker1", operator.add, (1, 2))
        with profiler.record_function("last"):
            pass
    gate.set()
    torch.futures.wait_all(futures)
    assert open_at_the_stop == [0]
    found = events(profile)
    span = found["rpc_async#wait_at_the_gate(worker0 -> worker1)"].time_range
    assert span.end >= found["last"].time_range.end


@pytest.mark.slow
def test_calls_that_outlive_their_profiles_leave_the_memory_intact() -> None:
    """Freed memory is overwritten at once, so that writing there is fatal."""
    root = Path(__file__).parents[3]
    command = [sys.executable, "-m", "tests.rpc.profiled_process"]
    environment = os.environ | {"MALLOC_PERTURB_": "85"}
    subprocess.run(command, env=environment, cwd=root, check=True, timeout=100)


def test_nothing_is_set_up_while_nobody_looks(
    group: list[Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> None:
        raise AssertionError

    monkeypatch.setattr(caller, "watching", fail)
    monkeypatch.setattr(observation, "run_handler", fail)
    assert rpc.rpc_sync("worker1", operator.add, (1, 2)) == 3
    with kineto(), pytest.raises(AssertionError):
        rpc.rpc_sync("worker1", operator.add, (1, 2))
