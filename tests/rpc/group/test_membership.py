"""A member of a dynamic group, and what the store that lists them says of it."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch._C._distributed_c10d import HashStore, Store

from rpc.errors import AgentClosedError, UnknownWorkerError, WorkerLeftError, WorkerLostError
from rpc.group import membership
from rpc.group.job_roles import JobRole, JobRoles
from rpc.group.member_list import Departure, End, MemberTable
from rpc.group.membership import Membership
from rpc.group.records import LIVENESS, Record
from rpc.ids import Life
from rpc.runtime import wait_log
from rpc.transports.base import Peer
from tests.rpc.stores import CountingStore, signed
from tests.rpc.told_watch import StandingWatch
from tests.waiting import eventually, until

NAMES = ("alice", "bob", "carol")


def fits(records: list[Record]) -> None:
    """Every record does."""


def table(store: Store) -> MemberTable:
    return MemberTable(signed(store))


class Listener:
    """Notes what it is told."""

    def __init__(self, life: Life) -> None:
        self.life = life
        self.is_expelled = False
        self.peers: dict[str, Life] = {}
        self.struck: list[Life] = []
        self.left: list[Life] = []
        self.refused: set[int] = set()
        self.may_go_on = threading.Event()
        self.may_go_on.set()

    def lives(self, who: str | int) -> bool:
        lives = list(self.peers.items())
        return any(who in (name, life.worker) for name, life in lives)

    def add_peer(self, peer: Peer) -> None:
        if peer.info.id in self.refused:
            raise OSError("no more peers")
        self.peers[peer.info.name] = Life(peer.info.id, peer.incarnation)

    def departed(self, life: Life, departure: Departure | None) -> None:
        self.may_go_on.wait(20)
        left = departure is not None and departure.end is End.LEFT
        (self.left if left else self.struck).append(life)
        self.peers = {name: each for name, each in self.peers.items() if each != life}
        self.is_expelled = self.is_expelled or life == self.life


class Group:
    def __init__(self) -> None:
        self.store = HashStore()
        self.table = table(self.store)
        self.listeners = [Listener(Life(rank, 0)) for rank in range(len(NAMES))]
        self.members = []
        for listener, name in zip(self.listeners, NAMES, strict=True):
            record = Record(name, listener.life.worker, None, 0, "test", b"")
            self.members.append(Membership(listener, table(self.store), record, fits))
        for member in self.members:
            member.join()
        until(lambda: all(len(listener.peers) == 3 for listener in self.listeners))

    def listed(self) -> set[int]:
        return {record.rank for record in self.table.members()}


@pytest.fixture
def group() -> Iterator[Group]:
    made = Group()
    yield made
    for listener in made.listeners:
        listener.may_go_on.set()
    for member in made.members:
        member.leave()


class View:
    """The view that one worker has by what it is told; it must be told nothing twice."""

    def __init__(self, me: Life) -> None:
        self.life = me
        self.is_expelled = False
        self.known: dict[int, int] = {}
        self.met: set[Life] = set()
        self.struck: set[Life] = set()
        self.leavers: set[Life] = set()
        self.last: dict[int, Life] = {}

    def lives(self, who: str | int) -> bool:
        return who in self.known

    def add_peer(self, peer: Peer) -> None:
        life = Life(peer.info.id, peer.incarnation)
        assert life not in self.met, "met twice"
        assert peer.liveness == f"ask {life.worker} {life.incarnation}"
        self.met.add(life)
        self.known[life.worker] = life.incarnation

    def departed(self, life: Life, departure: Departure | None) -> None:
        assert life in self.met - self.struck, "struck off twice, or never met"
        left = departure is not None and departure.end is End.LEFT
        assert left == (life in self.leavers and self.last.get(life.worker, life) == life)
        self.struck.add(life)
        assert self.known.pop(life.worker) == life.incarnation
        self.is_expelled = self.is_expelled or life == self.life


def check_look(seed: int) -> None:
    """Workers come, go and return; one member looks now and then, and declares some lost."""
    draw = random.Random(seed)
    store = HashStore()
    listed = {0: _record(0, 0)}
    view = View(Life(0, 0))
    member = Membership(view, table(store), listed[0], fits)
    table(store).join(listed[0])
    born = dict.fromkeys(range(4), 0)
    for _ in range(draw.randint(1, 25)):
        who = draw.randrange(1 if draw.random() < 0.95 else 0, 4)
        if who in listed and draw.random() < 0.5:
            table(store).leave(listed[who])
            view.leavers.add(Life(who, listed.pop(who).incarnation))
        elif who not in listed:
            born[who] += 1
            listed[who] = _record(who, born[who])
            table(store).join(listed[who])
            view.last[who] = Life(who, born[who])
        if draw.random() < 0.3:
            _declare_lost(draw, member, view, listed, store)
        if draw.random() < 0.5:
            member._look()
            assert view.known == {rank: record.incarnation for rank, record in listed.items()}
            if listed and draw.random() < 0.2:
                _look_at_a_spoilt_record(draw, member, listed, store)


def _look_at_a_spoilt_record(
    draw: random.Random, member: Membership, listed: dict[int, Record], store: Store
) -> None:
    """Says nothing of its worker, neither that it is there nor that it is gone."""
    _, record = draw.choice([*listed.items()])
    key = f"member/{record.name}"
    former = signed(store).get(key)
    assert former is not None
    for spoil in draw.sample(("forged", "written", "deleted"), 2):
        if spoil == "forged":
            store.set(f"tensorwire/{key}", "!lost")
        elif spoil == "written":
            signed(store).set(key, b"{}")
        else:
            signed(store).delete(key)
        signed(store).set("changes", b"%d" % draw.getrandbits(64))
        member._look()
    signed(store).set(key, former)
    signed(store).set("changes", b"%d" % draw.getrandbits(64))
    member._look()


def _record(worker: int, incarnation: int) -> Record:
    extras = {LIVENESS: f"ask {worker} {incarnation}"}
    return Record(f"w{worker}", worker, None, incarnation, "test", b"", extras=extras)


def _declare_lost(
    draw: random.Random, member: Membership, view: View, listed: dict[int, Record], store: Store
) -> None:
    """Only the life that is known is taken off the list, and by those that are on it."""
    known = dict(view.known)
    life = Life(draw.randrange(4), draw.randrange(3))
    done: list[Life] = []
    is_wanted = draw.random() < 0.9
    member.remove(life, "it was silent", lambda: is_wanted, lambda: done.append(life))
    member._remove_lost()
    is_known = known.get(life.worker) == life.incarnation
    removed = is_known and is_wanted and not view.is_expelled
    assert done == ([life] if removed or not is_known else [])
    record = listed.get(life.worker)
    if removed and record is not None and record.incarnation == life.incarnation:
        del listed[life.worker]
    assert {each.rank for each in table(store).members()} == listed.keys()


def test_what_the_store_says_is_told_once_and_in_full() -> None:
    for seed in range(100):
        try:
            check_look(seed)
        except Exception as error:
            raise AssertionError(f"reproduce with check_look({seed})") from error


def test_one_that_is_removed_is_struck_off_everywhere(group: Group) -> None:
    group.members[0].remove(Life(2, 0), "it was silent", lambda: True, lambda: None)
    until(lambda: all(Life(2, 0) in listener.struck for listener in group.listeners))
    assert group.listed() == {0, 1}


def test_an_earlier_life_is_not_removed(group: Group) -> None:
    group.members[0].remove(Life(2, 1), "it was silent", lambda: True, lambda: None)
    group.members[0].remove(Life(1, 0), "it was silent", lambda: True, lambda: None)
    until(lambda: group.listed() == {0, 2})


def test_who_waits_for_a_worker_goes_on_when_it_joins(group: Group) -> None:
    member = group.members[0]
    waiting = threading.Thread(target=member.wait_for, args=(3, 0))
    waiting.start()
    until(lambda: len(member.waited_for()) == 1)
    table(group.store).join(Record("dave", 3, None, 0, "test", b""))
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


def test_who_waits_as_its_own_worker_is_struck_off_waits_no_longer(group: Group) -> None:
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(group.members[1].wait_for, "dave", 0)
        until(lambda: group.members[1].waited_for() == ["dave"])
        group.members[0].remove(Life(1, 0), "it was silent", lambda: True, lambda: None)
        waiting.result(20)
    assert group.listeners[1].is_expelled


def test_one_that_was_itself_struck_off_removes_nobody(group: Group) -> None:
    bob = group.listeners[1]
    bob.may_go_on.clear()  # as if the network held up what the store says
    group.members[0].remove(Life(1, 0), "it was silent", lambda: True, lambda: None)
    until(lambda: group.listed() == {0, 2})
    group.members[1].remove(Life(0, 0), "it was silent", lambda: True, lambda: None)
    group.members[1].remove(Life(2, 0), "it was silent", lambda: True, lambda: None)
    bob.may_go_on.set()
    until(lambda: bob.is_expelled and not group.members[1]._lost)
    assert group.listed() == {0, 2}


def test_one_that_strikes_itself_off_is_declared_lost_to_all(group: Group) -> None:
    reason = "it was cut off from the others"
    group.members[1].remove(Life(1, 0), reason, lambda: True, lambda: None)
    until(
        lambda: all(
            listener.is_expelled == (listener is group.listeners[1]) for listener in group.listeners
        )
    )
    until(lambda: not any(listener.lives(1) for listener in group.listeners))
    assert group.listed() == {0, 2}


def test_one_whose_store_does_not_answer_knows_for_how_long(
    group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_answer, changes = threading.Event(), group.members[1]._table.changes

    def wait() -> bytes | None:
        may_answer.wait()
        return changes()

    monkeypatch.setattr(group.members[1]._table, "changes", wait)
    group.members[1].look_soon()
    until(lambda: group.members[1].was_out_of_touch(0.2, 60.0))
    may_answer.set()
    group.members[1].look_again(20)
    assert group.members[1].was_out_of_touch(0.2, 60.0)
    assert not group.members[1].was_out_of_touch(60.0, 60.0)
    assert not group.members[0].was_out_of_touch(60.0, 60.0)


def test_one_that_cannot_look_round_is_no_member() -> None:
    store, listener = HashStore(), Listener(Life(0, 1))
    listener.refused.add(0)
    with pytest.raises(OSError, match="no more peers"):
        Membership(listener, table(store), _record(0, 1), fits).join()
    assert table(store).members() == []


def test_a_store_that_tells_of_changes_is_not_asked_again_and_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(membership, "SECONDS_BETWEEN_READS", 600.0)
    watches: list[StandingWatch] = []

    def watch(self: MemberTable, told: Callable[[], None]) -> StandingWatch:
        watches.append(StandingWatch(told))
        return watches[-1]

    monkeypatch.setattr(MemberTable, "watch_changes", watch)
    shared, listener = HashStore(), Listener(Life(7, 1))
    store = CountingStore(shared)
    member = Membership(listener, table(store), _record(7, 1), fits)
    member.join()
    until(lambda: bool(watches))
    member.look_again(20)
    before = store.requests
    table(shared).join(_record(8, 1))
    assert not eventually(lambda: store.requests > before, seconds=2 * membership.LOOK_SECONDS)
    watches[0].tell()
    until(lambda: listener.lives(8))
    member.leave()


class TestWhoIsGone:
    def test_is_not_waited_for_and_it_is_told_who_says_so_when_and_why(self, group: Group) -> None:
        table(group.store).leave(group.table.lookup("carol") or _record(2, 0))
        group.members[0].remove(Life(1, 0), "it gave no sign of life", lambda: True, lambda: None)
        until(lambda: group.listed() == {0})
        late, newcomer = Listener(Life(7, 1)), _record(7, 1)
        member = Membership(late, table(group.store), newcomer, fits)
        member.join()
        told = r"worker 'bob' \(incarnation 0\) was lost: 'alice' declared it lost at 20.*: it gave"
        for who in ("bob", 1):
            with pytest.raises(WorkerLostError, match=told) as lost:
                member.wait_for(who, 20)
            assert not isinstance(lost.value, WorkerLeftError)
        for who in ("carol", 2):
            with pytest.raises(WorkerLeftError, match=r"'carol'.* is gone: it left the group at"):
                member.wait_for(who, 20)
        member.leave()

    def test_is_waited_for_if_it_will_come_back(self, group: Group) -> None:
        group.members[0].remove(Life(1, 0), "it gave no sign of life", lambda: True, lambda: None)
        until(lambda: not group.listeners[0].lives("bob"))
        until(lambda: group.members[0].departure("bob") is not None)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(group.members[0].wait_for, "bob", 20, True)
            until(lambda: group.members[0].waited_for() == ["bob"])
            table(group.store).join(Record("bob", 1, None, 1, "test", b"again"))
            waiting.result()
        assert group.listeners[0].peers["bob"] == Life(1, 1)
        assert group.members[0].departure("bob") is None

    def test_ends_a_wait_that_began_before(self, group: Group) -> None:
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(group.members[0].wait_for, "w7", 20)
            until(lambda: group.members[0].waited_for() == ["w7"])
            group.listeners[0].refused.add(7)
            table(group.store).join(_record(7, 1))
            table(group.store).leave(_record(7, 1))
            with pytest.raises(WorkerLeftError):
                waiting.result()


class TestWhoNeverWillCome:
    @pytest.fixture
    def member(self) -> Iterator[Membership]:
        listener, me = Listener(Life(7, 1)), _record(7, 1)
        roles = JobRoles({"server": JobRole(1, 2), "trainer": JobRole(1, 1)})
        made = Membership(listener, table(HashStore()), me, fits, roles)
        made.join()
        yield made
        made.leave()

    def test_is_not_waited_for(self, member: Membership) -> None:
        told = r"there is no worker 'sever:0' in this job; did you mean 'server:0'\?"
        with pytest.raises(UnknownWorkerError, match=told) as raised:
            member.wait_for("sever:0", 0)
        assert raised.value.is_final

    def test_unless_one_of_that_name_is_listed_that_was_not_heard_of_yet(
        self, member: Membership
    ) -> None:
        member._table.join(Record("odd", 9, None, 0, "test", b""))
        member.wait_for("odd", 20)

    def test_is_told_from_who_may_come_of_whose_wait_the_log_tells(
        self,
        member: Membership,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        monkeypatch.setattr(wait_log, "FIRST", (0.01,))
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(member.wait_for, "server:1", 60)
            until(lambda: "for worker 'server:1' to join; the group has: w7" in caplog.text)
            member._table.join(Record("server:1", 9, None, 0, "test", b""))
            waiting.result()


def test_who_joins_late_knows_at_once_who_is_there_and_who_is_gone() -> None:
    """Plays 100 random histories, which begin with numbers of their own."""
    for seed in range(100):
        chance, store = random.Random(seed), HashStore()
        there, gone, lives = {}, {}, dict.fromkeys(NAMES, 0)
        for _ in range(12):
            name, members = chance.choice(NAMES), table(store)
            record = there.pop(name, None)
            if record is None:
                rank, lives[name] = NAMES.index(name), lives[name] + 1
                record = there[name] = Record(name, rank, None, lives[name], "test", b"somewhere")
                members.join(record)
                gone.pop(name, None)
            elif chance.random() < 0.5:
                members.leave(record)
                gone[name] = WorkerLeftError
            else:
                assert members.strike_off(record, "'dave'", "it is silent")
                gone[name] = WorkerLostError
        late = Listener(Life(7, 1))
        member = Membership(late, table(store), _record(7, 1), fits)
        member.join()
        for name in NAMES:
            kind = None
            try:
                member.refuse(name)
            except WorkerLostError as error:
                kind = type(error)
            known = gone.get(name), name in there
            assert (kind, late.lives(name)) == known, f"seed {seed}, {name}"
        member.leave()


def test_what_ends_the_watch_is_logged(
    group: Group, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise OSError("no more members")

    monkeypatch.setattr(MemberTable, "listing", fail)
    group.table.join(_record(7, 1))
    until(lambda: bool(caplog.records))
    assert "nobody can join the group any more" in caplog.text
    assert "no more members" in caplog.text


def test_one_that_cannot_be_reached_does_not_end_the_watch(
    group: Group, caplog: pytest.LogCaptureFixture
) -> None:
    alice = group.listeners[0]
    alice.refused.add(7)
    group.table.join(_record(7, 1))
    group.table.join(_record(8, 1))
    until(lambda: alice.lives(8))
    assert "'w7' (rank 7" in caplog.text
    assert "cannot be reached from here: no more peers" in caplog.text


def test_a_record_that_cannot_be_read_is_logged_once_and_says_nothing(
    group: Group, caplog: pytest.LogCaptureFixture
) -> None:
    group.table.join(_record(7, 1))
    until(lambda: all(each.lives(7) for each in group.listeners))
    signed(group.store).set("member/w7", b"spoilt")
    for number in (8, 9):
        group.table.join(_record(number, 1))
        until(lambda number=number: all(each.lives(number) for each in group.listeners))  # type: ignore[misc]
    assert caplog.text.count("what the store says of w7 is not heeded") == 3
    assert all(each.lives(7) for each in group.listeners)


@pytest.fixture
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked for before the group, of which each member waits from its first look on."""
    monkeypatch.setattr(membership, "_FULL_LOOK_SECONDS", 0.5)
    monkeypatch.setattr(membership, "SECONDS_BETWEEN_READS", 0.5)


def test_a_member_is_believed_to_be_there_until_somebody_with_the_key_ends_that_life(
    looks_often: None, group: Group, caplog: pytest.LogCaptureFixture
) -> None:
    left = group.table.lookup("carol")
    assert left is not None
    group.store.set("tensorwire/member/bob", "!lost 0")
    group.store.delete_key("tensorwire/member/alice")
    group.store.delete_key("tensorwire/names/1")
    group.store.set("tensorwire/changes", "forged")
    group.table.leave(left)
    until(lambda: all(left_by(each, 2) for each in group.listeners))
    assert all(each.lives(0) and each.lives(1) for each in group.listeners)
    assert "ignored what the group's store holds under 'member/bob'" in caplog.text
    group.table.leave(Record("bob", 1, None, 0, "test", b""))
    until(lambda: all(left_by(each, 1) for each in group.listeners))


def left_by(listener: Listener, worker: int) -> bool:
    return Life(worker, 0) in listener.left


def test_an_old_value_of_changes_hides_nothing_for_long(
    group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(membership, "_FULL_LOOK_SECONDS", 0.05)
    monkeypatch.setattr(MemberTable, "changes", lambda _: b"always the same")
    for number in (7, 8):
        group.table.join(_record(number, 1))
        until(lambda number=number: group.listeners[0].lives(number))  # type: ignore[misc]


def refuse_carol(records: list[Record]) -> None:
    """The name of a worker that does not fit together with alice."""
    if {"alice", "carol"} <= {record.name for record in records}:
        raise ValueError("carol's map leads to a device that alice lacks")


class TestWhoDoesNotFitTogether:
    @staticmethod
    def _member(store: Store, rank: int) -> tuple[Listener, Membership]:
        listener, me = Listener(Life(rank, 0)), Record(NAMES[rank], rank, None, 0, "test", b"")
        return listener, Membership(listener, table(store), me, refuse_carol)

    def test_the_one_who_joins_later_fails_and_is_no_member(self) -> None:
        store = HashStore()
        _, alice = self._member(store, 0)
        alice.join()
        listener, carol = self._member(store, 2)
        with pytest.raises(ValueError, match="that alice lacks"):
            carol.join()
        assert listener.peers == {}
        assert [record.name for record in table(store).members()] == ["alice"]
        alice.leave()

    def test_a_member_takes_the_other_for_none_and_says_so(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        store = HashStore()
        listener, alice = self._member(store, 0)
        alice.join()
        table(store).join(Record("carol", 2, None, 0, "test", b""))  # it has not looked yet
        table(store).join(Record("bob", 1, None, 0, "test", b""))
        until(lambda: listener.lives(1))
        assert not listener.lives(2)
        assert "cannot be reached from here: carol's map leads to a device" in caplog.text
        alice.leave()

    def test_that_keeps_nobody_else_out(self) -> None:
        store = HashStore()
        _, alice = self._member(store, 0)
        alice.join()
        table(store).join(Record("carol", 2, None, 0, "test", b""))
        listener, bob = self._member(store, 1)
        bob.join()
        assert listener.lives(0)
        bob.leave()
        alice.leave()
