"""The members of a dynamic group: what the store that lists them says."""

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
from torch.distributed import HashStore, Store

from rpc.errors import BringUpError
from rpc.group import rendezvous
from rpc.group.member_list import Departure, End, Member, MemberList, MemberTable
from rpc.group.records import Record
from rpc.group.signed_store import SignedStore
from rpc.worker_info import WorkerInfo
from tests.rpc.stores import SOON, in_turns, record, signed


def table(store: Store, key: bytes = b"") -> MemberTable:
    return MemberTable(signed(store, key))


def join_in_turns(store: Store, workers: list[Record], seed: int) -> list[Record | None]:
    """The records of those who joined; None for each other."""

    def join(store: SignedStore, me: Record) -> Record:
        MemberTable(store).join(me)
        return me

    outcomes = in_turns(store, [partial(join, me=me) for me in workers], seed)
    unexpected = [each for each in outcomes if not isinstance(each, Record | BringUpError)]
    assert not unexpected
    return [each if isinstance(each, Record) else None for each in outcomes]


class TestDynamicGroup:
    def test_members_are_those_who_joined_and_did_not_leave(
        self, connect: Callable[[], Store]
    ) -> None:
        store = connect()
        workers = [record(rank, None) for rank in range(3)]
        for worker in workers:
            table(store).join(worker)
        assert table(store).members() == workers
        table(store).leave(workers[1])
        assert table(store).members() == [workers[0], workers[2]]

    def test_members_are_found_by_name_and_by_rank(self) -> None:
        store = HashStore()
        table(store).join(record(5, None))
        assert table(store).lookup("worker5") == record(5, None)
        assert table(store).lookup(5) == record(5, None)
        assert table(store).lookup("worker6") is None
        assert table(store).lookup(6) is None

    def test_who_left_is_not_found(self) -> None:
        store = HashStore()
        table(store).join(record(5, None))
        table(store).leave(record(5, None))
        assert table(store).lookup("worker5") is None
        assert table(store).lookup(5) is None

    def test_it_is_known_how_a_membership_ended_by_whom_and_why(self) -> None:
        store = HashStore()
        assert table(store).find("worker5") is None
        for number in (5, 6):
            table(store).join(record(number, None))
        table(store).leave(record(5, None))
        assert table(store).strike_off(record(6, None), "'worker7'", "it was silent")
        assert not table(store).strike_off(record(6, None), "'worker8'", "it was silent, too")
        assert table(store).members() == []
        left, lost = table(store).find("worker5"), table(store).find(6)
        assert isinstance(left, Departure)
        assert isinstance(lost, Departure)
        assert [left, lost] == [*table(store).listing().departures]
        assert (left.end, left.name, left.incarnation) == (End.LEFT, "worker5", 1)
        assert left.told().startswith("it left the group at 20")
        assert re.fullmatch(r"'worker7' declared it lost at 20.*: it was silent", lost.told())
        table(store).join(record(6, None, incarnation=2))
        assert table(store).find("worker6") == record(6, None, incarnation=2)

    @pytest.mark.parametrize("value", [b"", b"{}", b"\x80", b'{"name": "worker0"}', b"!", b"![1]"])
    def test_a_member_that_cannot_be_read_is_skipped_and_told_of(self, value: bytes) -> None:
        store = HashStore()
        workers = [record(rank, None) for rank in range(3)]
        for worker in workers:
            table(store).join(worker)
        signed(store).set("member/worker1", value)
        found = table(store).listing()
        assert found.members == [workers[0], workers[2]]
        assert [name for name, _ in found.unreadable] == ["worker1"]

    def test_a_worker_that_died_comes_back_in_its_place(self) -> None:
        store = HashStore()
        first, second = record(1, None), record(1, None, incarnation=2, address=b"new")
        table(store).join(record(0, None))
        table(store).join(first)
        table(store).join(second)
        assert table(store).members() == [record(0, None), second]
        table(store).leave(first)
        assert table(store).lookup(1) == second

    def test_name_and_rank_of_one_who_left_can_be_taken(self) -> None:
        store = HashStore()
        table(store).join(record(1, None))
        table(store).leave(record(1, None))
        successor = record(1, None, name="successor")
        namesake = record(2, None, name="worker1", incarnation=2)
        table(store).join(successor)
        table(store).join(namesake)
        assert table(store).lookup(1) == successor
        assert table(store).lookup("worker1") == namesake

    def test_a_name_belongs_to_one_rank(self) -> None:
        store = HashStore()
        table(store).join(record(0, None))
        with pytest.raises(BringUpError, match="worker0 is not unique"):
            table(store).join(record(1, None, name="worker0"))
        assert table(store).lookup(1) is None

    @pytest.mark.parametrize("name", ["worker0", "-"])
    def test_a_rank_belongs_to_one_name(self, name: str) -> None:
        store = HashStore()
        table(store).join(record(0, None, name=name))
        with pytest.raises(BringUpError, match="rank 0 is claimed by two workers"):
            table(store).join(record(0, None, name="other"))
        assert table(store).members() == [record(0, None, name=name)]

    def test_a_life_does_not_take_the_place_of_a_later_one(self) -> None:
        store = HashStore()
        first, second = record(1, None), record(1, None, incarnation=2)
        table(store).join(second)
        with pytest.raises(BringUpError, match="rank 1 is claimed by two workers"):
            table(store).join(first)
        assert table(store).members() == [second]
        assert table(store).lookup(1) == second

    def test_a_life_does_not_come_after_a_later_one_left(self) -> None:
        store = HashStore()
        table(store).join(record(1, None, incarnation=2))
        table(store).leave(record(1, None, incarnation=2))
        with pytest.raises(BringUpError, match="worker1 is not unique"):
            table(store).join(record(1, None))
        assert table(store).members() == []
        table(store).join(record(1, None, name="other", incarnation=3))

    @pytest.mark.parametrize("names", [("alice", "bob"), ("twin", "twin")])
    def test_of_two_that_claim_a_rank_at_once_one_is_a_member(self, names: tuple[str, str]) -> None:
        """Their requests come in every kind of order; in 100 orders the races are found."""
        lives = [record(1, None, name=name, incarnation=i) for i, name in enumerate(names, 1)]
        for seed in range(100):
            store = HashStore()
            joined = [each for each in join_in_turns(store, lives, seed) if each is not None]
            assert table(store).members() == joined[-1:], seed
            assert table(store).lookup(1) == (joined[-1] if joined else None), seed
            assert len(joined) < 2 or names[0] == names[1], seed

    def test_backends_must_agree(self) -> None:
        store = HashStore()
        table(store).join(record(0, None))
        with pytest.raises(BringUpError, match="worker0 says TENSORPIPE, worker1 says OTHER"):
            table(store).join(record(1, None, backend="OTHER"))

    def test_changes_is_another_value_after_each_change(self) -> None:
        store = HashStore()
        seen = [table(store).changes()]
        table(store).join(record(0, None))
        seen.append(table(store).changes())
        table(store).leave(record(0, None))
        seen.append(table(store).changes())
        assert len({*seen}) == 3
        table(store).leave(record(0, None))
        assert table(store).changes() == seen[-1]

    def test_many_may_join_at_once(self) -> None:
        store = HashStore()
        workers = [record(rank, None) for rank in range(32)]
        with ThreadPoolExecutor(32) as pool:
            list(pool.map(lambda me: table(store).join(me), workers))
        found = table(store).members()
        assert sorted(found, key=lambda member: member.rank) == workers

    def test_one_that_was_given_another_key_does_not_join(self) -> None:
        store = HashStore()
        table(store, b"a").join(record(0, None))
        for key in (b"", b"b"):
            with pytest.raises(BringUpError, match="the workers disagree about group_key"):
                table(store, key).join(record(1, None))
        assert table(store, b"a").members() == [record(0, None)]

    def test_static_and_dynamic_members_do_not_mix(self) -> None:
        mixes = "RPC group mixes statically and dynamically initialized members"
        store = HashStore()
        table(store).join(record(0, None))
        with pytest.raises(RuntimeError, match=mixes):
            rendezvous.meet(signed(store), record(1), SOON)
        store = HashStore()
        rendezvous.meet(signed(store), record(0, 1), SOON)
        with pytest.raises(RuntimeError, match=mixes):
            table(store).join(record(1, None))


class TestTheListAsALauncherSeesIt:
    def test_who_joined_is_found_with_its_process(self) -> None:
        store = HashStore()
        members = MemberList(store)
        assert members.find("worker5") is None
        table(store).join(record(5, None, host="here", pid=77))
        found = members.find("worker5")
        assert found == Member(WorkerInfo("worker5", 5), 1, "here", 77)
        assert members.members() == [found]

    def test_a_life_is_struck_off_once_and_a_later_one_never(self) -> None:
        store = HashStore()
        members = MemberList(store)
        table(store).join(record(5, None))
        first = members.find(5)
        assert first is not None
        assert members.strike_off(first, "its process ended")
        assert not members.strike_off(first, "its process ended")
        assert members.members() == []
        table(store).join(record(5, None, incarnation=2))
        assert not members.strike_off(first, "its process ended")
        assert [member.incarnation for member in members.members()] == [2]

    def test_it_is_told_who_was_lost_and_who_left(self) -> None:
        store = HashStore()
        members = MemberList(store)
        for rank in (1, 11):
            table(store).join(record(rank, None, incarnation=rank))
        first, second = members.members()
        assert not members.was_lost(first)
        members.strike_off(first, "its process ended")
        assert members.was_lost(first)
        table(store).leave(record(11, None, incarnation=11))
        assert not members.was_lost(second)
        table(store).join(record(1, None, incarnation=12))
        assert not members.was_lost(first)

    def test_changes_are_waited_for(self) -> None:
        store = HashStore()
        table(store).join(record(4, None))
        members = MemberList(store)
        assert not members.wait_for_change(0.0)
        table(store).join(record(5, None))
        assert members.wait_for_change(0.0)
        assert not members.wait_for_change(0.0)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(members.wait_for_change, SOON)
            table(store).join(record(6, None))
            assert waiting.result()


class TestAStranger:
    """Somebody who can write to the store, and does not have the group's key."""

    @pytest.fixture
    def store(self) -> HashStore:
        made = HashStore()
        for rank in range(3):
            table(made, b"key").join(record(rank, None))
        return made

    def test_ends_no_membership(self, store: HashStore) -> None:
        forger = table(store, b"")
        fields = ("worker1", 1, 1, End.LOST, "'worker0'", 0.0, "", record(1, None).digest())
        forger._store.set("member/worker1", Departure(*fields).encode())
        store.set("tensorwire/member/worker2", "!lost 1")
        assert table(store, b"key").listing().departures == []
        table(store, b"key").leave(record(1, None))
        (departure,) = table(store, b"key").listing().departures
        assert departure.end is End.LEFT

    def test_hides_no_name_behind_one_that_is_deleted(self, store: HashStore) -> None:
        store.delete_key("tensorwire/names/1")
        store.set("tensorwire/names/2", "?")
        members = table(store, b"key")
        assert members.members() == [record(2, None)]
        members.join(record(3, None))
        members.join(record(0, None, incarnation=2))
        assert {each.name for each in members.members()} == {"worker0", "worker2", "worker3"}

    def test_keeps_nobody_out(self, store: HashStore) -> None:
        for key in ("mode", "first", "changes", "id/7", "member/worker7", "names/4"):
            store.set(f"tensorwire/{key}", "anything")
        table(store, b"key").join(record(7, None))
        assert table(store, b"key").lookup(7) == record(7, None)

    def test_brings_no_old_departure_to_bear_on_a_later_life(self, store: HashStore) -> None:
        table(store, b"key").leave(record(1, None))
        old = table(store, b"key").listing().departures[0]
        later = record(1, None, incarnation=2, address=b"new")
        table(store, b"key").join(later)
        assert not old.ends(later)
        assert old.ends(record(1, None))
