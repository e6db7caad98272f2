"""Every worker gives an object and gets all of them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import rpc
from rpc.agent import Agent
from rpc.errors import RpcTimeoutError
from rpc.gathering import all_gather, barrier
from rpc.testing import as_worker, local_group
from tests.rpc.gates import gate, wait_at_the_gate
from tests.waiting import until


def _on_all(agents: list[Agent], act: Callable[[Agent], Any]) -> list[Any]:
    """Runs ``act`` for all workers at once."""

    def run(agent: Agent) -> Any:
        with as_worker(agent):
            return act(agent)

    with ThreadPoolExecutor(len(agents)) as pool:
        return list(pool.map(run, agents))


def test_every_worker_gets_what_all_gave():
    with local_group("carol", "alice", "bob") as agents:
        got = _on_all(agents, lambda agent: all_gather(agent.info.id))
    assert got == [{"alice": 1, "bob": 2, "carol": 0}] * 3


def test_successive_gatherings_are_told_apart():
    with local_group("alice", "bob") as agents:
        got = _on_all(agents, lambda agent: [all_gather(number) for number in range(20)])
    assert got[0] == got[1] == [{"alice": n, "bob": n} for n in range(20)]


def test_only_the_workers_named_take_part():
    with local_group("alice", "bob", "carol") as agents:
        names = ["carol", "alice"]
        got = _on_all([agents[0], agents[2]], lambda agent: all_gather(agent.info.id, names))
    assert got == [{"alice": 0, "carol": 2}] * 2


def test_nobody_passes_a_barrier_before_all_have_come():
    came: list[str] = []

    def pass_barrier(agent: Agent) -> int:
        came.append(agent.info.name)
        barrier(["alice", "bob", "carol"])
        return len(came)

    with local_group("alice", "bob", "carol") as agents:
        assert _on_all(agents, pass_barrier) == [3, 3, 3]


def test_those_that_do_not_come_are_named():
    with (
        local_group("alice", "bob", "carol") as (alice, _, _),
        as_worker(alice),
        pytest.raises(RpcTimeoutError, match=r"\['bob', 'carol'\] timed out in _all_gather"),
    ):
        all_gather(1, timeout=0.05)


class _SlowToUnpack:
    def __reduce__(self) -> tuple[Any, ...]:
        return wait_at_the_gate, ()


def test_a_follower_that_does_not_answer_in_time_is_named():
    def lead(agent: Agent) -> str:
        states = agent.gatherings._open
        until(lambda: any("bob" in each.gathered_objects for each in states.values()))
        try:
            with pytest.raises(RpcTimeoutError) as info:
                all_gather(_SlowToUnpack(), timeout=0.1)
            return str(info.value)
        finally:
            gate.set()

    gate.clear()
    with local_group("alice", "bob") as agents:
        told, _ = _on_all(agents, lambda a: lead(a) if a.info.id == 0 else all_gather(None))
    assert told.startswith("Followers ['bob'] timed out in _all_gather after 0.10 seconds: RPC ran")


def test_a_program_keeps_gatherings_of_its_own_in_states_like_ours() -> None:
    mine, another = rpc.AllGatherStates(), rpc.AllGatherStates()
    mine.gathered_objects["alice"] = 1
    mine.proceed_signal.set()
    assert mine.proceed_signal.wait(0)
    assert another.gathered_objects == {}
    assert not another.proceed_signal.is_set()
