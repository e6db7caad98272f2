"""Workers that watch each other, in one process: silence, fencing, and who is told."""

from __future__ import annotations

import errno
import operator
import threading
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace

import pytest

import rpc
from rpc import MembershipChange, MembershipEvent, WorkerLeftError, WorkerLostError
from rpc.agent import Agent, AgentOptions
from rpc.errors import ANOTHER_ANSWERS, NO_MEMBER, UnknownWorkerError
from rpc.group.member_list import Departure, End
from rpc.group.members import Group as Members
from rpc.group.watch import Watch
from rpc.ids import Life
from rpc.protocol.liveness import Evidence
from rpc.rrefs.rref import RRef
from rpc.testing import MemoryHub, as_worker, connect
from rpc.transports.base import Frame, FrameKind, Peer
from rpc.worker_info import WorkerInfo
from tests.virtual_time import SteadyClock
from tests.waiting import until

NAMES = ("alice", "bob", "carol", "dave")


class Group:
    """Four workers that watch each other, within 5 s of virtual time."""

    def __init__(self) -> None:
        self.clock = SteadyClock()
        self.hub = MemoryHub(self.clock)
        options = AgentOptions(rpc_timeout=0, liveness_timeout=5)
        self.agents = connect(*NAMES, hub=self.hub, clock=self.clock, options=options)

    def __getitem__(self, name: str) -> Agent:
        return self.agents[NAMES.index(name)]

    def step(self) -> None:
        """Moves time by as much as matters."""
        self.clock.step(0.1, self.agents, lambda: len(HELD))

    def pass_time(self, until_: Callable[[], bool], limit: float = 20) -> float:
        """Moves time in small steps until something holds; returns how long that took."""
        start = self.clock.now()
        while not until_():
            assert self.clock.now() - start < limit
            self.step()
        return self.clock.now() - start

    def names(self, who: str) -> list[str]:
        return [worker.name for worker in self[who].get_worker_infos()]


@pytest.fixture
def group() -> Iterator[Group]:
    made = Group()
    yield made
    for agent in made.agents:
        agent.shutdown(graceful=False)


def reason_of(future: rpc.Future[object]) -> str:
    with pytest.raises(WorkerLostError) as info:
        future.wait()
    return info.value.reason


class TestSilence:
    def test_a_call_to_a_frozen_worker_fails_within_the_bound(self, group: Group) -> None:
        group.hub.freeze(1)
        future = group["alice"].rpc_async("bob", operator.add, (1, 2))
        group.pass_time(future.done, limit=6)
        with pytest.raises(WorkerLostError) as info:
            future.wait()
        assert (info.value.name, info.value.incarnation) == ("bob", 0)
        assert "no sign of life" in info.value.reason

    def test_everybody_learns_of_it_without_calling_it(self, group: Group) -> None:
        group.hub.freeze(1)
        living = ["alice", "carol", "dave"]
        group.pass_time(lambda: all(group.names(who) == living for who in living), limit=6)

    def test_nobody_is_lost_who_answers(self, group: Group) -> None:
        for _ in range(300):
            group.step()
        assert group.names("dave") == list(NAMES)

    def test_two_neighbours_that_freeze_at_once_are_both_found(self, group: Group) -> None:
        group.hub.freeze(1)
        group.hub.freeze(2)
        living = ["alice", "dave"]
        group.pass_time(lambda: all(group.names(who) == living for who in living))


class Descriptors:
    """Those of one worker, which may run out: then its prober cannot connect to anybody."""

    def __init__(self, worker: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
        assert worker.watch is not None
        self.there_are = False
        self.connected: Life | None = None
        prober = worker.watch._prober
        for name in ("ask", "expel"):
            monkeypatch.setattr(prober, name, partial(self._do, getattr(prober, name)))

    def _do(self, act: Callable[..., None], *arguments: object) -> None:
        if not self.there_are and arguments[0] != self.connected:
            raise OSError(errno.EMFILE, "Too many open files")
        act(*arguments)


class TestShortage:
    def test_one_that_cannot_ask_takes_nobody_for_silent_and_says_so_once(
        self, group: Group, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        descriptors = Descriptors(group["alice"], monkeypatch)
        descriptors.connected = group["carol"].life
        GATE.clear()
        call = group["alice"].rpc_async("carol", wait_at_the_gate)
        for _ in range(150):
            group.step()
        GATE.set()
        group.pass_time(call.done)
        assert all(group.names(who) == list(NAMES) for who in NAMES)
        (record,) = caplog.records
        assert "'alice' cannot ask other workers for signs of life" in record.getMessage()
        assert "Too many open files" in record.getMessage()
        descriptors.there_are = True
        group.hub.freeze(1)
        group.pass_time(lambda: group.names("alice") == ["alice", "carol", "dave"], limit=6)

    def test_a_note_that_could_not_be_left_is_left_later(
        self, group: Group, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        alice = group["alice"]
        descriptors = Descriptors(alice, monkeypatch)
        assert alice.watch is not None
        alice.watch.tell_lost(group["bob"].life, "too silent")
        bob = group["bob"].watch
        assert bob is not None
        for _ in range(30):
            group.step()
        assert bob.verdict() is None
        descriptors.there_are = True
        group.pass_time(lambda: group["bob"].is_expelled)


class TestNotes:
    """Notes that others left: that this worker was declared lost."""

    @pytest.mark.parametrize(
        ("author", "believed"),
        [
            ("1 0", True),
            ("2 1", False),  # is lost
            ("3 0", False),  # was replaced by the life that is known
            ("3 1", True),
            ("3 2", True),  # is not known yet
            ("9 0", True),  # is not known yet
        ],
    )
    def test_those_of_the_lost_are_not_believed(self, author: str, believed: bool) -> None:
        members = Members()
        for worker, incarnation in ((0, 0), (1, 0), (2, 1), (3, 1)):
            members.add(Peer(WorkerInfo(NAMES[worker], worker), incarnation, b""))
        members.lose(Life(2, 1), "it was silent")
        agent = SimpleNamespace(group=members)
        prober = SimpleNamespace(verdict=lambda: f"{author} it was silent")
        watch = Watch(agent, 5.0, prober)  # type: ignore[arg-type]
        assert watch.verdict() == ("it was silent" if believed else None)

    def test_one_that_is_alone_believes_even_the_lost(self) -> None:
        members = Members()
        for worker in (0, 1):
            members.add(Peer(WorkerInfo(NAMES[worker], worker), 0, b""))
        members.lose(Life(1, 0), "it was silent")
        agent = SimpleNamespace(group=members)
        prober = SimpleNamespace(verdict=lambda: "1 0 it was silent")
        assert Watch(agent, 5.0, prober).verdict() == "it was silent"  # type: ignore[arg-type]


class TestFencing:
    @pytest.fixture
    def woken(self, group: Group) -> Agent:
        """Bob was declared lost while he was frozen, and has woken up."""
        group.hub.freeze(1)
        group.pass_time(lambda: all("bob" not in group.names(who) for who in NAMES if who != "bob"))
        group.hub.thaw(1)
        return group["bob"]

    def test_one_that_wakes_learns_why_its_calls_fail(self, group: Group, woken: Agent) -> None:
        group.pass_time(lambda: group.names("bob") == ["bob"])
        with pytest.raises(WorkerLostError, match="declared it lost: it gave no sign") as info:
            woken.rpc_sync("carol", operator.add, (1, 2))
        assert info.value.name == "bob"

    def test_a_call_it_made_before_fails_likewise(self, group: Group) -> None:
        GATE.clear()
        future = group["bob"].rpc_async("alice", wait_at_the_gate)
        until(lambda: bool(group["alice"].callee.serving()))
        group.hub.freeze(1)
        group.pass_time(lambda: "bob" not in group.names("alice"))
        GATE.set()
        group.hub.thaw(1)
        group.pass_time(future.done)
        assert "lost" in reason_of(future)

    def test_what_it_sends_is_refused(self, group: Group, woken: Agent) -> None:
        GATE.clear()
        future = woken.rpc_async("alice", open_the_gate)
        group.pass_time(future.done)
        assert not GATE.is_set()
        assert "lost" in reason_of(future) or "no more messages" in reason_of(future)

    def test_it_can_shut_down_and_waits_for_nobody(self, group: Group, woken: Agent) -> None:
        group.pass_time(lambda: group.names("bob") == ["bob"])
        woken.shutdown(graceful=True, timeout=20)

    def test_its_references_are_released(self, group: Group) -> None:
        alice, bob = group["alice"], group["bob"]
        rref = alice.rpc_sync("bob", keep_from, ("alice",))
        del rref
        until(lambda: alice.references.report.shared_values() == 1)
        group.hub.freeze(1)
        group.pass_time(lambda: alice.references.report.shared_values() == 0)
        assert bob.references.counts().num_user_rrefs == 1
        KEPT.clear()


GATE = threading.Event()
KEPT: list[RRef[object]] = []


HELD: list[str] = []


def wait_at_the_gate() -> bool:
    HELD.append("here")
    try:
        return GATE.wait(20)
    finally:
        HELD.pop()


def open_the_gate() -> None:
    GATE.set()


def keep_from(owner: str) -> None:
    KEPT.append(rpc.remote(owner, object))


class TestWhoseWordCounts:
    def test_what_a_lost_worker_says_of_another_does_not(self, group: Group) -> None:
        carol, bob = group["carol"], group["bob"]
        group["alice"].worker_loss.declare(bob.life, "a test said so", Evidence.SILENT)
        group.pass_time(lambda: "bob" not in group.names("carol"))
        assert bob.watch is not None
        assert carol.watch is not None
        bob.watch.tell_lost(carol.life, "it was bob who was cut off")
        for _ in range(60):
            group.step()
        assert carol.watch.verdict() is None
        assert group.names("carol") == ["alice", "carol", "dave"]

    def test_who_is_refused_lets_who_refuses_it_speak_first(self, group: Group) -> None:
        """Alice slept, wakes, and hears from dave that he has declared her lost."""
        alice, dave = group["alice"], group["dave"]
        alice.inbound.peer_lost(dave.life, f"its connection broke, and it says: {NO_MEMBER}")
        dave.inbound.peer_lost(alice.life, "its connection broke")
        group.pass_time(lambda: "alice" not in group.names("carol"))
        for _ in range(150):
            group.step()
        assert group.names("carol") == group.names("bob") == ["bob", "carol", "dave"]

    def test_somebody_who_listens_at_a_dead_workers_address_delays_no_news_of_its_death(
        self, group: Group
    ) -> None:
        alice, dave = group["alice"], group["dave"]
        dave.inbound.peer_lost(alice.life, "its connection broke")
        alice.inbound.peer_lost(dave.life, f"it broke, and {ANOTHER_ANSWERS}refused: {NO_MEMBER}")
        group.pass_time(lambda: "dave" not in group.names("carol"))

    def test_who_refuses_and_tells_nobody_why_is_declared_lost(self, group: Group) -> None:
        alice, dave = group["alice"], group["dave"]
        alice.inbound.peer_lost(dave.life, f"its connection broke, and it says: {NO_MEMBER}")
        group.pass_time(lambda: "dave" not in group.names("carol"))

    def test_one_that_has_nobody_left_believes_it(self, group: Group) -> None:
        carol, bob = group["carol"], group["bob"]
        for other in (0, 1, 3):
            carol.inbound.peer_lost(group.agents[other].life, "its connection broke")
        assert carol.watch is not None
        assert bob.watch is not None
        bob.watch.tell_lost(carol.life, "it was carol who was cut off")
        watch = carol.watch
        group.pass_time(lambda: watch.verdict() is not None)


class TestWhoIsCutOff:
    def test_one_that_loses_everybody_at_once_declares_nobody_lost(self, group: Group) -> None:
        for other in (0, 2, 3):
            group["bob"].inbound.peer_lost(group.agents[other].life, "its connection broke")
        for _ in range(150):
            group.step()
        assert {"alice", "carol", "dave"} <= {*group.names("carol")}

    def test_it_learns_that_the_others_declared_it_lost(self, group: Group) -> None:
        seen: list[MembershipEvent] = []
        group["bob"].events.subscribe(seen.append)
        for other in (0, 2, 3):
            group["bob"].inbound.peer_lost(group.agents[other].life, "its connection broke")
            group.agents[other].inbound.peer_lost(group["bob"].life, "its connection broke")
        group.pass_time(lambda: bool(seen) and seen[-1].worker.name == "bob")
        with pytest.raises(WorkerLostError, match="declared it lost") as info:
            group["bob"].rpc_sync("carol", operator.add, (1, 2))
        assert info.value.name == "bob"

    def test_it_takes_in_nobody_who_joins_afterwards(self, group: Group) -> None:
        bob, seen = group["bob"], list[MembershipEvent]()
        bob.events.subscribe(seen.append)
        bob.worker_loss.expelled("a test said so")
        bob.add_peer(Peer(WorkerInfo("erin", 4), 0, bob.group.peer(2).address))
        assert group.names("bob") == ["bob"]
        with pytest.raises(UnknownWorkerError):
            bob.transport.send(4, Frame(FrameKind.NOTICE, 0, b"", b""))
        with pytest.raises(WorkerLostError, match="a test said so") as info:
            bob.rpc_sync("erin", operator.add, (1, 2))
        assert info.value.name == "bob"
        until(lambda: bool(seen))
        assert [event.worker.name for event in seen] == ["bob"]

    def test_nothing_leaves_it_once_its_calls_have_ended(
        self, group: Group, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A thread may have found a worker just before, and open a call to it just after."""
        bob, ended = group["bob"], list[str]()
        end_all_of = bob.end_all_of

        def end(life: Life, error: WorkerLostError) -> None:
            end_all_of(life, error)
            with pytest.raises(UnknownWorkerError):
                bob.transport.send(life.worker, Frame(FrameKind.NOTICE, 0, b"", b""))
            ended.append(NAMES[life.worker])

        monkeypatch.setattr(bob, "end_all_of", end)
        bob.worker_loss.expelled("a test said so")
        assert ended == ["alice", "carol", "dave"]

    def test_of_two_whose_connection_broke_one_goes(self, group: Group) -> None:
        group["alice"].inbound.peer_lost(group["bob"].life, "its connection broke")
        group["bob"].inbound.peer_lost(group["alice"].life, "its connection broke")
        group.pass_time(lambda: group.names("bob") == ["bob"])
        living = ["alice", "carol", "dave"]
        group.pass_time(lambda: all(group.names(who) == living for who in living))


class TestEvents:
    def test_a_loss_is_reported_once_to_everybody(self, group: Group) -> None:
        seen: dict[str, list[MembershipEvent]] = {name: [] for name in NAMES}
        for name in NAMES:
            group[name].events.subscribe(seen[name].append)
        group.hub.freeze(1)
        group.pass_time(lambda: all(seen[name] for name in NAMES if name != "bob"))
        for name in ("alice", "carol", "dave"):
            (event,) = seen[name]
            assert (event.change, event.worker.name) == (MembershipChange.LOST, "bob")

    def test_the_lost_one_hears_of_itself(self, group: Group) -> None:
        seen: list[MembershipEvent] = []
        group["bob"].events.subscribe(seen.append)
        group.hub.freeze(1)
        group.pass_time(lambda: "bob" not in group.names("alice"))
        group.hub.thaw(1)
        group.pass_time(lambda: bool(seen))
        assert (seen[0].change, seen[0].worker.name) == (MembershipChange.LOST, "bob")

    def test_one_that_leaves_is_not_lost(self, group: Group) -> None:
        with as_worker(group["carol"]):
            seen: list[MembershipEvent] = []
            rpc.on_membership(seen.append)
            group["bob"].shutdown(graceful=False)
            until(lambda: bool(seen))
            assert seen[0].change is MembershipChange.LEFT
            assert [worker.name for worker in rpc.workers()] == ["alice", "carol", "dave"]
            assert [worker.name for worker in rpc.workers("da")] == ["dave"]

    @pytest.mark.parametrize(
        ("end", "change", "error", "told"),
        [
            (End.LEFT, MembershipChange.LEFT, WorkerLeftError, "it left the group"),
            (End.LOST, MembershipChange.LOST, WorkerLostError, "rpcrun declared it lost at .*: 9"),
            (None, MembershipChange.LOST, WorkerLostError, "does not list"),
        ],
    )
    def test_the_store_may_know_first_that_one_is_gone(
        self,
        group: Group,
        end: End | None,
        change: MembershipChange,
        error: type[WorkerLostError],
        told: str,
    ) -> None:
        seen: list[MembershipEvent] = []
        group["carol"].events.subscribe(seen.append)
        bob = group["bob"].life
        departure = end and Departure("bob", *bob, end, "rpcrun", 0.0, "9", "digest")
        group["carol"].worker_loss.departed(bob, departure)
        until(lambda: bool(seen))
        assert (seen[0].change, seen[0].worker.name) == (change, "bob")
        with pytest.raises(error, match=told) as caught:
            group["carol"].rpc_sync("bob", abs, (-1,))
        assert type(caught.value) is error
