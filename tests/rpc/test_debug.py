"""Counters under the original's names."""

from __future__ import annotations

import operator
import threading
from collections.abc import Iterator

import pytest

import autograd_dist
import rpc
from rpc.agent import Agent, AgentOptions
from rpc.testing import as_worker, local_group


@pytest.fixture
def pair() -> Iterator[list[Agent]]:
    options = AgentOptions(num_worker_threads=7)
    with local_group("alice", "bob", options=options) as agents, as_worker(agents[0]):
        yield agents


def test_everything_is_the_sum_of_its_parts(pair: list[Agent]):
    parts = [
        rpc._rref_context_get_debug_info(),
        pair[0].get_debug_info(),
        autograd_dist._get_debug_info(),
    ]
    everything = rpc._get_debug_info()
    assert len(everything) == sum(map(len, parts))
    assert all(everything.keys() >= part.keys() for part in parts)
    assert all(isinstance(value, str) for value in everything.values())


def test_threads_and_calls_are_counted(pair: list[Agent]):
    assert pair[0].get_debug_info()["agent.thread_pool_size"] == "7"
    assert pair[0].get_debug_info()["agent.client_active_calls"] == "0"


def test_a_value_counts_as_owned_while_another_worker_holds_it(pair: list[Agent]):
    held = rpc.RRef([1])
    assert rpc._rref_context_get_debug_info()["num_owner_rrefs"] == "0"
    theirs = rpc.remote("bob", operator.add, (1, 2))
    theirs.to_here()
    with as_worker(pair[1]):
        assert rpc._rref_context_get_debug_info()["num_owner_rrefs"] == "1"
        assert rpc._rref_context_get_debug_info()["num_forks"] == "1"
    assert held.local_value() == [1]


_release = threading.Event()


def _wait_for_release() -> None:
    assert _release.wait(10)


def test_a_creation_under_way_is_a_pending_future(pair: list[Agent]):
    _release.clear()
    rref = rpc.remote("bob", _wait_for_release)
    assert rpc._rref_context_get_debug_info()["num_pending_futures"] == "1"
    _release.set()
    rref._get_future().wait()
    rref.to_here()
    assert rpc._rref_context_get_debug_info()["num_pending_futures"] == "0"


def test_waiting_for_the_interpreter_lock_is_measured_on_request(pair: list[Agent]):
    assert "agent.gil_average_wait_time_us" not in pair[0].get_debug_info()
    rpc.enable_gil_profiling(True)
    assert float(pair[0].get_debug_info()["agent.gil_average_wait_time_us"]) >= 0
    rpc.enable_gil_profiling(False)
    assert "agent.gil_average_wait_time_us" not in pair[0].get_debug_info()
