"""Calls to workers of a dynamic group that have not joined yet."""

from __future__ import annotations

import asyncio
import gc
import operator
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore

import rpc
from rpc.agent import Agent
from rpc.errors import (
    AgentClosedError,
    CallCancelledError,
    EncodeError,
    RpcTimeoutError,
    UnknownWorkerError,
    WorkerLeftError,
)
from rpc.group.job_roles import JobRole, JobRoles
from rpc.group.member_list import MemberTable
from rpc.group.membership import Membership
from rpc.group.records import Record
from rpc.observe import profiling
from rpc.runtime import deadlines
from rpc.testing import MemoryHub, VirtualClock, as_worker
from rpc.worker_info import WorkerInfo
from tests.rpc.stores import signed
from tests.waiting import until

Join = Callable[[str], Agent]


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
def join(clock: VirtualClock) -> Iterator[Join]:
    """Makes a worker join one dynamic group; its rank counts from 0."""
    table, hub, agents = MemberTable(signed(HashStore())), MemoryHub(clock), list[Agent]()

    def join(name: str) -> Agent:
        life = sum(each.info.name == name for each in agents)
        agent = Agent(WorkerInfo(name, len(agents)), life, hub.transport(), clock=clock)
        agents.append(agent)
        me = Record(name, agent.info.id, None, life, "test", agent.start())
        agent.membership = Membership(agent, table, me, lambda records: None)
        agent.membership.join()
        return agent

    yield join
    for agent in agents:
        agent.shutdown(graceful=False)


@pytest.fixture
def alice(join: Join) -> Agent:
    return join("alice")


@pytest.mark.parametrize("to", ["bob", 1])
def test_a_call_is_made_when_its_worker_joins(alice: Agent, join: Join, to: str | int) -> None:
    future = alice.rpc_async(to, operator.add, (1, 2), timeout=0)
    assert not future.done()
    assert alice.debug_info()["waiting_for"] == [to]
    join("bob")
    assert future.wait() == 3
    assert alice.debug_info()["waiting_for"] == []


def test_the_event_loop_runs_on_while_a_worker_is_waited_for(alice: Agent, join: Join) -> None:
    async def call() -> int:
        future = alice.rpc_async("bob", operator.add, (1, 2), timeout=0)
        await asyncio.to_thread(join, "bob")
        return await future

    assert asyncio.run(call()) == 3


def test_the_wait_is_part_of_the_timeout(alice: Agent, clock: VirtualClock) -> None:
    future = alice.rpc_async("bob", operator.add, (1, 2), timeout=5)
    clock.advance(4.9)
    assert not future.done()
    clock.advance(0.2)
    with pytest.raises(UnknownWorkerError, match="could not find destination name bob"):
        future.wait()


def time_left() -> float:
    return deadlines.effective_timeout(-1.0, 0.0, rpc.api.current_agent().clock.now())


def test_the_call_has_what_the_wait_left_of_its_timeout(
    alice: Agent, join: Join, clock: VirtualClock
) -> None:
    future = alice.rpc_async("bob", time_left, timeout=5)
    clock.advance(3)
    join("bob")
    assert future.wait() == pytest.approx(2)


def test_a_timeout_that_is_none_fails_the_future(alice: Agent) -> None:
    with pytest.raises(RpcTimeoutError, match="timeout must be >= 0"):
        alice.rpc_async("bob", operator.add, (1, 2), timeout=-4).wait()


def test_a_call_is_given_up_while_its_worker_is_waited_for(alice: Agent, join: Join) -> None:
    ran = threading.Event()
    future = alice.rpc_async("bob", ran.set, timeout=0)
    assert future.cancel()
    with pytest.raises(CallCancelledError, match="the call on bob was cancelled"):
        future.wait()
    assert not future.cancel()
    join("bob")
    assert alice.rpc_sync("bob", operator.add, (1, 2)) == 3
    assert not ran.is_set()


def test_a_call_that_was_made_late_can_be_given_up(alice: Agent, join: Join) -> None:
    future = alice.rpc_async("bob", asyncio.sleep, (60,), timeout=0)
    bob = join("bob")
    until(lambda: bool(bob.debug_info()["serving"]))
    assert future.cancel()
    with pytest.raises(CallCancelledError):
        future.wait()
    until(lambda: not bob.debug_info()["serving"])


def test_leaving_ends_the_wait(alice: Agent) -> None:
    future = alice.rpc_async("bob", operator.add, (1, 2), timeout=0)
    alice.shutdown()
    with pytest.raises(AgentClosedError, match="'bob' was waited for until this worker shut down"):
        future.wait()


def test_what_cannot_be_sent_fails_the_future(alice: Agent, join: Join) -> None:
    future = alice.rpc_async("bob", print, (threading.Lock(),), timeout=0)
    join("bob")
    with pytest.raises(EncodeError, match="lock"):
        future.wait()


class Argument:
    """Can be weakly referenced."""


def test_a_call_that_is_over_keeps_nothing(alice: Agent, join: Join) -> None:
    argument = Argument()
    kept = weakref.ref(argument)
    future = alice.rpc_async("bob", id, (argument,), timeout=60)
    del argument
    join("bob")
    future.wait()
    del future
    until(lambda: kept() is None)


def test_a_wait_keeps_no_cycle_alive(alice: Agent, join: Join) -> None:
    gc.collect()
    gc.disable()
    try:
        test_a_call_that_is_over_keeps_nothing(alice, join)
    finally:
        gc.enable()


def test_a_profile_names_the_worker_that_is_waited_for(alice: Agent, join: Join) -> None:
    with as_worker(alice), profiling.profile() as prof:
        future = rpc.rpc_async("bob", operator.add, (1, 2), timeout=0)
        join("bob")
        assert future.wait() == 3
    assert any("(alice -> bob)" in event.name for event in prof.function_events)


@pytest.mark.parametrize("to", [-1, 2**15, "a b", "", "x" * 128])
@pytest.mark.parametrize("how", ["rpc_sync", "rpc_async", "remote"])
def test_nobody_waits_for_one_that_there_cannot_be(alice: Agent, how: str, to: Any) -> None:
    with pytest.raises(UnknownWorkerError, match="could not find destination"):
        getattr(alice, how)(to, operator.add, (1, 2), timeout=0)


def test_a_truth_value_is_no_id_of_one_to_come(alice: Agent) -> None:
    with pytest.raises(ValueError, match="Cannot get WorkerInfo from True"):
        alice.rpc_sync(True, operator.add, (1, 2), timeout=0)


def test_who_is_asked_about_is_not_waited_for(alice: Agent) -> None:
    alice.rpc_timeout = 0.0
    with pytest.raises(UnknownWorkerError, match="name nobody; the group has: alice"):
        alice.get_worker_info("nobody")


def test_one_that_has_joined_is_known_when_asked_about(alice: Agent, join: Join) -> None:
    for name in ("bob", "carol", "dave"):
        join(name)
        assert alice.get_worker_info(name).name == name


def test_one_that_left_is_waited_for_by_whoever_says_that_it_will_return(
    alice: Agent, join: Join
) -> None:
    first = join("bob")
    assert alice.get_worker_info("bob", wait_for_return=20.0) == first.info
    first.shutdown()
    with pytest.raises(WorkerLeftError, match="'bob'"):
        until(lambda: not alice.get_worker_info("bob"))
    with pytest.raises(WorkerLeftError, match="'bob'"):
        alice.get_worker_info("bob", wait_for_return=0.05)
    with ThreadPoolExecutor(1) as threads:
        found = threads.submit(alice.get_worker_info, "bob", wait_for_return=0)
        until(lambda: alice.debug_info()["waiting_for"] == ["bob"])
        join("bob")
        assert found.result(20).name == "bob"
    assert alice.rpc_sync("bob", operator.add, (1, 2)) == 3


@rpc.functions.idempotent
def add(a: int, b: int) -> int:
    return a + b


@pytest.mark.parametrize("retry", [None, rpc.Retry(attempts=5)])
def test_a_call_to_a_name_that_no_worker_of_the_job_can_have_fails_at_once(
    retry: rpc.Retry | None,
) -> None:
    agent = Agent(WorkerInfo("trainer:0", 0), 0, MemoryHub().transport())
    me = Record("trainer:0", 0, None, 0, "test", agent.start())
    roles = JobRoles({"server": JobRole(1, 1), "trainer": JobRole(1, 1)})
    table = MemberTable(signed(HashStore()))
    agent.membership = Membership(agent, table, me, lambda records: None, roles)
    agent.membership.join()
    try:
        with pytest.raises(UnknownWorkerError, match=r"no worker 'sever:0' .* mean 'server:0'"):
            agent.rpc_async("sever:0", add, (1, 2), timeout=60, retry=retry).wait()
    finally:
        agent.shutdown(graceful=False)
