"""Profiles that follow calls: what is recorded where, and under which names."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import rpc
from rpc.agent import Agent
from rpc.functions import async_execution
from rpc.observe import profiling
from rpc.observe.profiling import ProfileSettings, _ProfiledHandler, profile
from rpc.testing import as_worker, local_group


@pytest.fixture
def alice() -> Iterator[Agent]:
    with local_group("alice", "bob", "carol") as (alice, _, _), as_worker(alice):
        yield alice


def _multiply_and_add() -> torch.Tensor:
    with torch.autograd.profiler.record_function("outer"):
        return torch.ones(2).mul(3).add(1)


def _named(prof: Any, name: str) -> Any:
    (event,) = [event for event in prof.function_events if event.name == name]
    return event


@pytest.mark.parametrize("mode", ["sync", "async", "remote"])
def test_a_call_and_what_ran_for_it_elsewhere_are_recorded(alice: Agent, mode: str):
    args = (torch.ones(2), torch.ones(2))
    with profile() as prof:
        if mode == "sync":
            rpc.rpc_sync("bob", torch.mul, args)
        elif mode == "async":
            rpc.rpc_async("bob", torch.mul, args).wait()
        else:
            rpc.remote("bob", torch.mul, args)._get_future().wait()
    key = f"rpc_{mode}#aten::mul(alice -> bob)"
    call, ran = _named(prof, key), _named(prof, f"{key}#remote_op: aten::mul")
    assert (call.node_id, call.is_remote) == (0, False)
    assert (ran.node_id, ran.is_remote) == (1, True)
    assert ran.time_range.start >= call.time_range.start


def test_a_method_called_through_a_reference_goes_by_its_name(alice: Agent):
    rref = rpc.remote("bob", torch.nn.Linear, (2, 2))
    with profile() as prof:
        rref.rpc_sync().forward(torch.ones(2))
    assert _named(prof, "rpc_sync#RRef.forward(alice -> bob)").node_id == 0


def test_a_call_lies_inside_the_block_that_made_it(alice: Agent):
    with profile() as prof, torch.autograd.profiler.record_function("block"):
        rpc.rpc_sync("bob", torch.mul, (torch.ones(2), 2))
    block, call = _named(prof, "block"), _named(prof, "rpc_sync#aten::mul(alice -> bob)")
    assert block.time_range.start <= call.time_range.start
    assert block.time_range.end >= call.time_range.end


def test_a_thread_that_had_to_wait_as_a_profile_began_moves_no_calls(
    alice: Agent, monkeypatch: pytest.MonkeyPatch
):
    made, mark = itertools.count(), profiling._mark

    def mark_late() -> tuple[int, int]:
        before, after = mark()
        return (before, after) if next(made) == 2 else (before - 60_000_000_000, after)

    monkeypatch.setattr(profiling, "_mark", mark_late)
    with profile() as prof, torch.autograd.profiler.record_function("block"):
        rpc.rpc_sync("bob", torch.mul, (torch.ones(2), 2))
    assert next(made) > 1
    block, call = _named(prof, "block"), _named(prof, "rpc_sync#aten::mul(alice -> bob)")
    assert block.time_range.start <= call.time_range.start
    assert block.time_range.end >= call.time_range.end


def test_what_ran_elsewhere_keeps_its_nesting(alice: Agent):
    with profile() as prof:
        rpc.rpc_sync("bob", _multiply_and_add)
    outer = next(event for event in prof.function_events if event.name.endswith("outer"))
    inner = {child.name.rpartition(" ")[2] for child in outer.cpu_children}
    assert inner >= {"aten::ones", "aten::mul", "aten::add"}


def test_shapes_are_recorded_elsewhere_if_they_are_here(alice: Agent):
    with profile(record_shapes=True) as prof:
        rpc.rpc_sync("bob", torch.mul, (torch.ones(2, 3), torch.ones(2, 3)))
    ran = _named(prof, "rpc_sync#aten::mul(alice -> bob)#remote_op: aten::mul")
    assert ran.input_shapes == [[2, 3], [2, 3]]


def test_memory_is_recorded_elsewhere_if_it_is_here(alice: Agent):
    def used(prof: Any) -> int:
        return sum(event.cpu_memory_usage for event in prof.function_events if event.is_remote)

    with profile(profile_memory=True) as prof:
        rpc.rpc_sync("bob", torch.ones, (1000,))
    assert used(prof) > 0
    with profile() as prof:
        rpc.rpc_sync("bob", torch.ones, (1000,))
    assert used(prof) == 0


@async_execution
def _add_at_carol(x: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    return rpc.rpc_async("carol", torch.add, (x, 1))


def test_calls_made_by_handlers_are_followed_even_when_they_outlast_them(alice: Agent):
    with profile() as prof:
        rpc.rpc_sync("bob", _add_at_carol, (torch.ones(2),))
    first = "rpc_sync#_add_at_carol(alice -> bob)#remote_op: rpc_async#aten::add(bob -> carol)"
    assert _named(prof, first).node_id == 1
    assert _named(prof, f"{first}#remote_op: aten::add").node_id == 2


def test_a_reply_that_leaves_before_its_handler_has_returned_waits_for_it():
    session = _ProfiledHandler(ProfileSettings(False, False, False, False), 0)
    found: list[list[Any]] = []
    replying = threading.Thread(target=lambda: found.append(session.events()))
    with session:
        replying.start()
        replying.join(0.05)
        assert not found
        torch.ones(2).add(1)
    replying.join(10)
    assert "aten::add" in str(found[0])


def test_a_trace_of_it_can_be_written(alice: Agent, tmp_path: Any):
    with profile() as prof:
        rpc.rpc_sync("bob", torch.mul, (torch.ones(2), 2))
    prof.export_chrome_trace(str(tmp_path / "trace.json"))
    assert "remote_op: aten::mul" in (tmp_path / "trace.json").read_text()


def test_a_failed_call_is_recorded_without_what_ran(alice: Agent):
    with profile() as prof, pytest.raises(RuntimeError, match="size"):
        rpc.rpc_sync("bob", torch.mul, (torch.ones(2), torch.ones(3)))
    assert _named(prof, "rpc_sync#aten::mul(alice -> bob)").node_id == 0
    assert not any(event.is_remote for event in prof.function_events)


_go = threading.Event()


def _wait() -> None:
    assert _go.wait(10)


def test_a_call_that_outlasts_the_profile_is_not_in_it(alice: Agent):
    _go.clear()
    with profile() as prof:
        future = rpc.rpc_async("bob", _wait)
    _go.set()
    future.wait()
    assert not any("rpc_async" in event.name for event in prof.function_events)


def test_without_a_profile_nothing_is_asked_for(alice: Agent):
    with profile(enabled=False):
        assert rpc.rpc_sync("bob", torch.mul, (torch.ones(1), 2)).item() == 2
    with profile() as prof:
        pass
    assert rpc.rpc_sync("bob", torch.mul, (torch.ones(1), 2)).item() == 2
    assert not any("rpc" in event.name for event in prof.function_events)
