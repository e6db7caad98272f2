"""A member of a dynamic group, and what the store that lists them says of it."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore, PrefixStore, Store

from rpc.errors import AgentClosedError, BringUpError
from rpc.group import member_list
from rpc.group.membership import LIVENESS, Membership
from rpc.group.store import Record
from rpc.ids import Life
from rpc.transports.base import Peer
from tests.waiting import until

NAMES = ("alice", "bob", "carol")


def fits(records: list[Record]) -> None:
    """Every record does."""


class Agent:
    """Notes what it is told."""

    def __init__(self, life: Life) -> None:
        self.life = life
        self.is_expelled = False
        self.peers: set[Life] = set()
        self.struck: list[Life] = []
        self.left: list[Life] = []
        self.group = self
        self.may_go_on = threading.Event()
        self.may_go_on.set()

    def lives(self, who: int) -> bool:
        return any(life.worker == who for life in self.peers)

    def add_peer(self, peer: Peer) -> None:
        self.peers.add(Life(peer.info.id, peer.incarnation))

    def struck_off(self, life: Life, left: bool) -> None:
        self.may_go_on.wait(20)
        (self.left if left else self.struck).append(life)
        self.peers.discard(life)
        self.is_expelled = self.is_expelled or life == self.life


class Group:
    def __init__(self) -> None:
        self.store = HashStore()
        self.agents = [Agent(Life(rank, 0)) for rank in range(len(NAMES))]
        self.members = []
        for agent, name in zip(self.agents, NAMES, strict=True):
            record = Record(name, agent.life.worker, None, 0, "test", b"")
            self.members.append(Membership(agent, self.store, record, fits))  # type: ignore[arg-type]
        for member in self.members:
            member.join(20)
        until(lambda: all(len(agent.peers) == 3 for agent in self.agents))

    def listed(self) -> set[int]:
        return {record.rank for record in member_list.members(self.store)}


@pytest.fixture
def group() -> Iterator[Group]:
    made = Group()
    yield made
    for agent in made.agents:
        agent.may_go_on.set()
    for member in made.members:
        member.leave()


class View:
    """What one agent makes of what it is told, and that it is told nothing twice."""

    def __init__(self, me: Life) -> None:
        self.life = me
        self.is_expelled = False
        self.lives: dict[int, int] = {}
        self.met: set[Life] = set()
        self.struck: set[Life] = set()
        self.leavers: set[Life] = set()
        self.last: dict[int, Life] = {}

    def add_peer(self, peer: Peer) -> None:
        life = Life(peer.info.id, peer.incarnation)
        assert life not in self.met, "met twice"
        assert peer.liveness == f"ask {life.worker} {life.incarnation}"
        self.met.add(life)
        self.lives[life.worker] = life.incarnation

    def struck_off(self, life: Life, left: bool) -> None:
        assert life in self.met - self.struck, "struck off twice, or never met"
        assert left == (life in self.leavers and self.last.get(life.worker, life) == life)
        self.struck.add(life)
        assert self.lives.pop(life.worker) == life.incarnation
        self.is_expelled = self.is_expelled or life == self.life


def check_look(seed: int) -> None:
    """Workers come, go and return; one member looks now and then, and declares some lost."""
    draw = random.Random(seed)
    store = HashStore()
    listed = {0: _record(0, 0)}
    view = View(Life(0, 0))
    member = Membership(view, store, listed[0], fits)  # type: ignore[arg-type]
    member_list.join(store, listed[0])
    born = dict.fromkeys(range(4), 0)
    for _ in range(draw.randint(1, 25)):
        who = draw.randrange(1 if draw.random() < 0.95 else 0, 4)
        if who in listed and draw.random() < 0.5:
            member_list.leave(store, listed[who])
            view.leavers.add(Life(who, listed.pop(who).incarnation))
        elif who not in listed:
            born[who] += 1
            listed[who] = _record(who, born[who])
            member_list.join(store, listed[who])
            view.last[who] = Life(who, born[who])
        if draw.random() < 0.3:
            _declare_lost(draw, member, view, listed)
        if draw.random() < 0.5:
            member._look()
            assert view.lives == {rank: record.incarnation for rank, record in listed.items()}
            if listed and draw.random() < 0.2:
                _look_at_a_spoilt_record(draw, member, listed)


def _look_at_a_spoilt_record(
    draw: random.Random, member: Membership, listed: dict[int, Record]
) -> None:
    """Says nothing of its worker, neither that it is there nor that it is gone."""
    store, (_, record) = member._store, draw.choice([*listed.items()])
    ours = PrefixStore("tensorwire", store)
    ours.set(f"member/{record.name}", "spoilt")
    ours.add("changes", 1)
    member._look()
    ours.set(f"member/{record.name}", record.encode())
    ours.add("changes", 1)
    member._look()


def _record(worker: int, incarnation: int) -> Record:
    extras = {LIVENESS: f"ask {worker} {incarnation}"}
    return Record(f"w{worker}", worker, None, incarnation, "test", b"", extras=extras)


def _declare_lost(
    draw: random.Random, member: Membership, view: View, listed: dict[int, Record]
) -> None:
    """Only the life that is known is taken off the list, and by those that are on it."""
    known = dict(view.lives)
    life = Life(draw.randrange(4), draw.randrange(3))
    member.remove(life)
    member._remove_lost()
    removed = known.get(life.worker) == life.incarnation and not view.is_expelled
    record = listed.get(life.worker)
    if removed and record is not None and record.incarnation == life.incarnation:
        del listed[life.worker]
    assert {each.rank for each in member_list.members(member._store)} == listed.keys()


def test_what_the_store_says_is_told_once_and_in_full() -> None:
    for seed in range(100):
        try:
            check_look(seed)
        except Exception as error:
            raise AssertionError(f"reproduce with check_look({seed})") from error


def test_one_that_is_removed_is_struck_off_everywhere(group: Group) -> None:
    group.members[0].remove(Life(2, 0))
    until(lambda: all(Life(2, 0) in agent.struck for agent in group.agents))
    assert group.listed() == {0, 1}


def test_an_earlier_life_is_not_removed(group: Group) -> None:
    group.members[0].remove(Life(2, 1))
    group.members[0].remove(Life(1, 0))
    until(lambda: group.listed() == {0, 2})


def test_who_waits_for_a_worker_goes_on_when_it_joins(group: Group) -> None:
    member = group.members[0]
    waiting = threading.Thread(target=member.wait_for, args=(3, 0))
    waiting.start()
    until(lambda: len(member.waited_for()) == 1)
    member_list.join(group.store, Record("dave", 3, None, 0, "test", b""))
    waiting.join(20)
    assert not waiting.is_alive()


def test_who_waits_for_a_worker_as_its_own_leaves_is_told_so(group: Group) -> None:
    member = group.members[0]
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(member.wait_for, "dave", 0)
        until(lambda: len(member.waited_for()) == 1)
        member.leave()
        with pytest.raises(AgentClosedError, match="'dave' was waited for until"):
            waiting.result()
    with pytest.raises(AgentClosedError, match="3 was waited for until"):
        member.wait_for(3, 0)


def test_one_that_was_itself_struck_off_removes_nobody(group: Group) -> None:
    bob = group.agents[1]
    bob.may_go_on.clear()  # as if the network held up what the store says
    group.members[0].remove(Life(1, 0))
    until(lambda: group.listed() == {0, 2})
    group.members[1].remove(Life(0, 0))
    group.members[1].remove(Life(2, 0))
    bob.may_go_on.set()
    until(lambda: bob.is_expelled and not group.members[1]._lost)
    assert group.listed() == {0, 2}


class SlowStore(Store):
    """Answers requests of one kind only when it may."""

    def __init__(self, store: Store, slow: str) -> None:
        super().__init__()
        self.may_answer = threading.Event()
        self._store = store
        self._slow = slow

    def _ask(self, name: str, *arguments: Any) -> Any:
        if name == self._slow:
            self.may_answer.wait(20)
        return getattr(self._store, name)(*arguments)

    def add(self, *arguments: Any) -> Any:
        return self._ask("add", *arguments)

    def set(self, *arguments: Any) -> Any:
        return self._ask("set", *arguments)

    def get(self, *arguments: Any) -> Any:
        return self._ask("get", *arguments)

    def check(self, *arguments: Any) -> Any:
        return self._ask("check", *arguments)

    def compare_set(self, *arguments: Any) -> Any:
        return self._ask("compare_set", *arguments)

    def multi_get(self, *arguments: Any) -> Any:
        return self._ask("multi_get", *arguments)


@pytest.mark.parametrize("slow", ["compare_set", "add", "multi_get"])
def test_one_that_gave_up_joining_is_no_member_when_the_store_answers(slow: str) -> None:
    store, agent = HashStore(), Agent(Life(0, 1))
    late = SlowStore(store, slow)
    member = Membership(agent, late, _record(0, 1), fits)  # type: ignore[arg-type]
    with pytest.raises(BringUpError, match="did not answer"):
        member.join(0.1)
    late.may_answer.set()
    until(lambda: store.check(["tensorwire/member/w0"]))
    until(lambda: store.get("tensorwire/member/w0") == b"!left 1")
    assert member_list.members(store) == []


def test_one_that_cannot_look_round_is_no_member(monkeypatch: pytest.MonkeyPatch) -> None:
    store, agent = HashStore(), Agent(Life(0, 1))

    def refuse(peer: Peer) -> None:
        raise OSError("no")

    monkeypatch.setattr(agent, "add_peer", refuse)
    with pytest.raises(OSError, match="no"):
        Membership(agent, store, _record(0, 1), fits).join(20)  # type: ignore[arg-type]
    assert member_list.members(store) == []


def test_what_ends_the_watch_is_logged(
    group: Group, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise OSError("no more members")

    monkeypatch.setattr(member_list, "members", fail)
    member_list.join(group.store, _record(7, 1))
    until(lambda: bool(caplog.records))
    assert "nobody can join the group any more" in caplog.text
    assert "no more members" in caplog.text


def test_one_that_cannot_be_reached_does_not_end_the_watch(
    group: Group, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    alice = group.agents[0]
    add = alice.add_peer

    def refuse(peer: Peer) -> None:
        if peer.info.id == 7:
            raise OSError("no more peers")
        add(peer)

    monkeypatch.setattr(alice, "add_peer", refuse)
    member_list.join(group.store, _record(7, 1))
    member_list.join(group.store, _record(8, 1))
    until(lambda: alice.lives(8))
    assert "'w7' (rank 7" in caplog.text
    assert "cannot be reached from here: no more peers" in caplog.text


def test_a_record_that_cannot_be_read_is_logged_once_and_says_nothing(
    group: Group, caplog: pytest.LogCaptureFixture
) -> None:
    member_list.join(group.store, _record(7, 1))
    until(lambda: all(agent.lives(7) for agent in group.agents))
    group.store.set("tensorwire/member/w7", "spoilt")
    for number in (8, 9):
        member_list.join(group.store, _record(number, 1))
        until(lambda number=number: all(agent.lives(number) for agent in group.agents))
    assert caplog.text.count("what the store says of w7 is not heeded") == 3
    assert all(agent.lives(7) for agent in group.agents)
    group.store.set("tensorwire/member/w7", "!left 1")
    member_list.leave(group.store, _record(8, 1))
    until(lambda: all(Life(7, 1) in agent.left for agent in group.agents))


def refuse_carol(records: list[Record]) -> None:
    """Whoever is called so does not fit together with alice."""
    if {"alice", "carol"} <= {record.name for record in records}:
        raise ValueError("carol's map leads to a device that alice lacks")


class TestWhoDoesNotFitTogether:
    @staticmethod
    def _member(store: Store, rank: int) -> tuple[Agent, Membership]:
        agent, me = Agent(Life(rank, 0)), Record(NAMES[rank], rank, None, 0, "test", b"")
        return agent, Membership(agent, store, me, refuse_carol)  # type: ignore[arg-type]

    def test_the_one_who_joins_later_fails_and_is_no_member(self) -> None:
        store = HashStore()
        _, alice = self._member(store, 0)
        alice.join(20)
        agent, carol = self._member(store, 2)
        with pytest.raises(ValueError, match="that alice lacks"):
            carol.join(20)
        assert agent.peers == set()
        assert [record.name for record in member_list.members(store)] == ["alice"]
        alice.leave()

    def test_a_member_takes_the_other_for_none_and_says_so(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        store = HashStore()
        agent, alice = self._member(store, 0)
        alice.join(20)
        member_list.join(store, Record("carol", 2, None, 0, "test", b""))  # it has not looked yet
        member_list.join(store, Record("bob", 1, None, 0, "test", b""))
        until(lambda: agent.lives(1))
        assert not agent.lives(2)
        assert "cannot be reached from here: carol's map leads to a device" in caplog.text
        alice.leave()

    def test_that_keeps_nobody_else_out(self) -> None:
        store = HashStore()
        _, alice = self._member(store, 0)
        alice.join(20)
        member_list.join(store, Record("carol", 2, None, 0, "test", b""))
        agent, bob = self._member(store, 1)
        bob.join(20)
        assert agent.lives(0)
        bob.leave()
        alice.leave()
