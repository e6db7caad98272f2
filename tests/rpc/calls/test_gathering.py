"""Every worker gives an object and gets all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future as ConcurrentFuture
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import rpc
from rpc.agent import Agent
from rpc.calls.gathering import GatheringId, all_gather, barrier
from rpc.errors import RpcTimeoutError, WorkerLostError
from rpc.ids import Life
from rpc.testing import MemoryHub, as_worker, local_group
from tests.rpc.gates import gate, wait_at_the_gate
from tests.waiting import until

SECONDS = 20.0


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


def test_a_leader_that_does_not_come_keeps_only_what_is_still_waited_for() -> None:
    with local_group("alice", "bob", "carol") as (alice, bob, carol):
        for agent in (bob, carol, bob, bob):
            with as_worker(agent), pytest.raises(RpcTimeoutError):
                all_gather(agent.info.id, timeout=0.3)
        kept = {
            which.number: gathering.gathered_objects
            for which, gathering in alice.gatherings._open.items()
        }
        assert kept == {0: {"carol": 2}, 2: {"bob": 1}}


def test_two_threads_may_take_part_in_gatherings_of_the_same_workers() -> None:
    with local_group("alice", "bob") as (alice, bob), ThreadPoolExecutor(2) as pool:

        def pass_barrier(agent: Agent) -> None:
            with as_worker(agent):
                barrier(["alice", "bob"])

        passed = []
        for number in range(2):
            passed.append(pool.submit(pass_barrier, bob))
            until(lambda: len(alice.gatherings._open) == number + 1)  # noqa: B023
        for _ in range(2):
            pass_barrier(alice)
        for future in passed:
            future.result(SECONDS)


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


class Group:
    """Workers whose calls are made at once, each on a thread of its own."""

    def __init__(self, agents: list[Agent], hub: MemoryHub, pool: ThreadPoolExecutor) -> None:
        self.agents = {agent.info.name: agent for agent in agents}
        self.hub = hub
        self._pool = pool

    def gather(self, name: str, *args: Any, **kwargs: Any) -> ConcurrentFuture[dict[str, Any]]:
        return self._pool.submit(self._gather, self.agents[name], *args, **kwargs)

    def has_come(self, name: str) -> bool:
        """True if the leader has the object of a worker."""
        states = self.agents["alice"].gatherings._open
        return any(name in each.gathered_objects for each in states.values())

    def lose(self, name: str) -> None:
        self.hub.cut(self.agents[name].info.id)

    @staticmethod
    def _gather(agent: Agent, *args: Any, **kwargs: Any) -> dict[str, Any]:
        with as_worker(agent):
            return all_gather(agent.info.name.upper(), *args, **kwargs)


@pytest.fixture
def group() -> Iterator[Group]:
    hub = MemoryHub()
    with (
        ThreadPoolExecutor(8) as pool,
        local_group("alice", "bob", "carol", hub=hub) as agents,
    ):
        yield Group(agents, hub, pool)


class TestWhenSomebodyIsLost:
    def test_nobody_waits_for_one_who_has_not_come(self, group: Group) -> None:
        waiting = [group.gather("alice"), group.gather("bob")]
        until(lambda: group.has_come("alice") and group.has_come("bob"))
        group.lose("carol")
        for each in waiting:
            with pytest.raises(WorkerLostError, match="carol"):
                each.result(SECONDS)

    def test_those_who_come_before_the_leader_do_not_wait_either(self, group: Group) -> None:
        waiting = group.gather("bob")
        until(lambda: group.has_come("bob"))
        group.lose("carol")
        with pytest.raises(WorkerLostError, match="carol"):
            waiting.result(SECONDS)

    def test_nor_do_those_who_come_after_and_name_it(self, group: Group) -> None:
        names = [*group.agents]
        group.agents["alice"].worker_loss.lost(Life(2, 0), "it was seen to die")
        with pytest.raises(WorkerLostError, match=r"'carol'.*seen to die"):
            group.gather("alice", names).result(SECONDS)

    def test_one_who_has_not_heard_of_it_hears_from_the_leader(self, group: Group) -> None:
        group.agents["alice"].worker_loss.lost(Life(2, 0), "it was seen to die")
        assert group.agents["bob"].group.lives("carol")
        with pytest.raises(WorkerLostError, match=r"'carol'.*seen to die"):
            group.gather("bob").result(SECONDS)

    def test_nobody_waits_for_a_leader(self, group: Group) -> None:
        waiting = [group.gather("bob"), group.gather("carol")]
        until(lambda: group.has_come("bob") and group.has_come("carol"))
        group.lose("alice")
        for each in waiting:
            with pytest.raises(WorkerLostError, match="alice"):
                each.result(SECONDS)

    def test_nor_for_one_that_leaves(self, group: Group) -> None:
        waiting = group.gather("bob")
        until(lambda: group.has_come("bob"))
        group.agents["alice"].shutdown(graceful=False)
        with pytest.raises(WorkerLostError, match="alice"):
            waiting.result(SECONDS)

    def test_what_it_gave_counts_if_it_had_come(self, group: Group) -> None:
        leading, _ = group.gather("alice"), group.gather("carol")
        until(lambda: group.has_come("alice") and group.has_come("carol"))
        group.agents["alice"].worker_loss.lost(Life(2, 0), "it was seen to die")
        assert group.gather("bob").result(SECONDS)["carol"] == "CAROL"
        with pytest.raises(WorkerLostError, match="'carol'"):  # which did not get the result
            leading.result(SECONDS)

    def test_it_does_not_if_the_leader_had_not(self, group: Group) -> None:
        waiting = [group.gather("bob"), group.gather("carol")]
        until(lambda: group.has_come("bob") and group.has_come("carol"))
        group.agents["alice"].worker_loss.lost(Life(2, 0), "it was seen to die")
        with pytest.raises(WorkerLostError, match=r"'carol'.*seen to die"):
            waiting[0].result(SECONDS)
        assert not group.agents["alice"].gatherings._open

    def test_the_others_can_gather_at_once(self, group: Group) -> None:
        group.lose("carol")
        until(lambda: all(not group.agents[n].group.lives("carol") for n in ("alice", "bob")))
        both = [group.gather("alice"), group.gather("bob")]
        assert [each.result(SECONDS) for each in both] == [{"alice": "ALICE", "bob": "BOB"}] * 2

    def test_numbers_of_lives_that_are_over_are_forgotten(self, group: Group) -> None:
        for _ in range(3):
            everyone = [group.gather(name) for name in group.agents]
            assert all(len(each.result(SECONDS)) == 3 for each in everyone)
        alice = group.agents["alice"].gatherings
        group.lose("carol")
        until(lambda: not (alice._numbers or alice._open or alice._failures or alice._wanted))


class TestWhenALeaderGivesUp:
    def test_those_who_came_hear_of_it(self, group: Group) -> None:
        waiting = group.gather("bob")
        until(lambda: group.has_come("bob"))
        told = r"\['carol'\] timed out in _all_gather after 0.05 seconds: they did not come"
        for each in (group.gather("alice", timeout=0.05), waiting):
            with pytest.raises(RpcTimeoutError, match=told):
                each.result(SECONDS)

    def test_so_do_those_who_come_late(self, group: Group) -> None:
        with pytest.raises(RpcTimeoutError, match=r"\['bob', 'carol'\] timed out"):
            group.gather("alice", timeout=0.05).result(SECONDS)
        for name in ("bob", "carol"):
            with pytest.raises(RpcTimeoutError, match=r"\['bob', 'carol'\] timed out"):
                group.gather(name).result(SECONDS)
        assert not group.agents["alice"].gatherings._open
        everyone = [group.gather(name) for name in group.agents]
        assert all(len(each.result(SECONDS)) == 3 for each in everyone)

    def test_why_is_told_if_it_was_interrupted(
        self, group: Group, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        waiting = group.gather("bob")
        until(lambda: group.has_come("bob"))

        def interrupt(*_: object) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(group.agents["alice"].gatherings, "wait", interrupt)
        with pytest.raises(KeyboardInterrupt):
            group.gather("alice").result(SECONDS)
        with pytest.raises(rpc.RpcError, match="the leader 'alice' gave up: its wait was ended"):
            waiting.result(SECONDS)

    def test_nobody_is_told_of_one_that_is_over(self, group: Group) -> None:
        everyone = [group.gather(name) for name in group.agents]
        assert all(len(each.result(SECONDS)) == 3 for each in everyone)
        gatherings = group.agents["alice"].gatherings
        ((members, _),) = gatherings._numbers.items()
        with pytest.raises(rpc.RpcError, match="is over"):
            gatherings.bring(GatheringId(members, 0), "bob", None)


def test_a_follower_that_gave_up_is_no_leaders_success(group: Group) -> None:
    late = group.gather("bob", timeout=0.05)
    with pytest.raises(RpcTimeoutError, match=r"the leader 'alice' did not bring.* within 0.05"):
        late.result(SECONDS)
    waiting = group.gather("carol")
    with pytest.raises(rpc.RpcError, match="'bob' gave the _all_gather up"):
        group.gather("alice").result(SECONDS)
    assert len(waiting.result(SECONDS)) == 3


def test_a_leader_that_comes_late_meets_followers_that_try_again(group: Group) -> None:
    for name in ("bob", "carol", "bob"):
        with pytest.raises(RpcTimeoutError):
            group.gather(name, timeout=0.05).result(SECONDS)
    followers = [group.gather("bob")]
    gatherings = group.agents["alice"].gatherings
    until(lambda: any(which.number == 2 for which in gatherings._open))
    told = r"\['bob'\] gave this one up before all had come"
    for name in ("alice", "carol", "alice"):
        with pytest.raises(rpc.RpcError, match=told):
            group.gather(name).result(SECONDS)
    together = [*followers, group.gather("carol"), group.gather("alice")]
    assert all(len(each.result(SECONDS)) == 3 for each in together)


def test_a_worker_that_shuts_down_waits_no_longer(group: Group) -> None:
    waiting = [group.gather("alice"), group.gather("bob")]
    until(lambda: group.has_come("alice") and group.has_come("bob"))
    for name in ("bob", "alice"):
        group.agents[name].shutdown(graceful=False)
    for each in waiting:
        with pytest.raises(rpc.AgentClosedError, match="shut down"):
            each.result(SECONDS)
    with pytest.raises(rpc.RpcError, match="shut down"):
        group.gather("bob").result(SECONDS)


class TestInAHandler:
    """The request that is served bounds the wait."""

    def test_its_time_is_over(self, group: Group) -> None:
        with as_worker(group.agents["bob"]):
            waiting = rpc.rpc_async("alice", all_gather, (1,), timeout=0.1)
            with pytest.raises(RpcTimeoutError):
                waiting.wait()
        until(lambda: group.agents["alice"].executor.busy() == 0)

    def test_its_caller_gives_it_up(self, group: Group) -> None:
        with as_worker(group.agents["bob"]):
            waiting = rpc.rpc_async("alice", all_gather, (1,))
            until(lambda: group.has_come("alice"))
            assert waiting.cancel()
        until(lambda: group.agents["alice"].executor.busy() == 0)
        with pytest.raises(rpc.RpcError, match=r"the leader 'alice' gave up.*of this handler"):
            group.gather("carol").result(SECONDS)


@pytest.mark.parametrize(
    ("names", "kind", "told"),
    [
        (["bob", "carol"], ValueError, r"\['bob', 'carol'\] lacks 'alice', which calls this"),
        ("alice", TypeError, "worker_names='alice' is one name"),
        (["alice", "dave"], rpc.UnknownWorkerError, "name dave; the group has: alice, bob, carol"),
    ],
)
def test_names_that_cannot_be_meant(
    group: Group, names: Any, kind: type[Exception], told: str
) -> None:
    with pytest.raises(kind, match=told):
        group.gather("alice", names).result(SECONDS)


def test_a_timeout_that_is_none_is_refused_before_anything_is_sent(group: Group) -> None:
    with pytest.raises(TypeError, match="timeout must be a number"):
        group.gather("bob", timeout="1").result(SECONDS)
    assert not group.has_come("bob")


def test_a_program_keeps_gatherings_of_its_own_in_states_like_ours() -> None:
    mine, another = rpc.AllGatherStates(), rpc.AllGatherStates()
    mine.gathered_objects["alice"] = 1
    mine.proceed_signal.set()
    assert mine.proceed_signal.wait(0)
    assert another.gathered_objects == {}
    assert not another.proceed_signal.is_set()
