"""The members of a dynamic group: what the store that lists them says."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
from torch.distributed import HashStore, Store

from rpc.errors import BringUpError
from rpc.group import member_list, rendezvous
from rpc.group.member_list import Member, MemberList
from rpc.group.store import KEY_MARK, Record, key_mark
from rpc.worker_info import WorkerInfo
from tests.rpc.stores import SOON, in_turns, record


def join_in_turns(store: Store, workers: list[Record], seed: int) -> list[Record | None]:
    """Who joined."""

    def join(store: Store, me: Record) -> Record:
        member_list.join(store, me)
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
            member_list.join(store, worker)
        assert member_list.members(store) == workers
        member_list.leave(store, workers[1])
        assert member_list.members(store) == [workers[0], workers[2]]

    def test_members_are_found_by_name_and_by_rank(self) -> None:
        store = HashStore()
        member_list.join(store, record(5, None))
        assert member_list.lookup(store, "worker5") == record(5, None)
        assert member_list.lookup(store, 5) == record(5, None)
        assert member_list.lookup(store, "worker6") is None
        assert member_list.lookup(store, 6) is None

    def test_who_left_is_not_found(self) -> None:
        store = HashStore()
        member_list.join(store, record(5, None))
        member_list.leave(store, record(5, None))
        assert member_list.lookup(store, "worker5") is None
        assert member_list.lookup(store, 5) is None

    def test_it_is_known_who_left_and_who_was_struck_off(self) -> None:
        store = HashStore()
        assert not member_list.has_left(store, record(5, None))
        for number in (5, 6):
            member_list.join(store, record(number, None))
        assert not member_list.has_left(store, record(5, None))
        member_list.leave(store, record(5, None))
        member_list.strike_off(store, record(6, None))
        assert member_list.members(store) == []
        assert member_list.has_left(store, record(5, None))
        assert not member_list.has_left(store, record(5, None, incarnation=2))
        assert not member_list.has_left(store, record(6, None))
        member_list.join(store, record(6, None, incarnation=2))
        assert member_list.lookup(store, "worker6") == record(6, None, incarnation=2)

    @pytest.mark.parametrize("value", ["", "{}", "\x80", '{"name": "worker0"}'])
    def test_a_member_that_cannot_be_read_is_skipped_and_told_of(self, value: str) -> None:
        store = HashStore()
        workers = [record(rank, None) for rank in range(3)]
        for worker in workers:
            member_list.join(store, worker)
        store.set("tensorwire/member/worker1", value)
        skipped: list[str] = []
        found = member_list.members(store, lambda name, error: skipped.append(name))
        assert found == [workers[0], workers[2]]
        assert skipped == ["worker1"]

    def test_a_worker_that_died_comes_back_in_its_place(self) -> None:
        store = HashStore()
        first, second = record(1, None), record(1, None, incarnation=2, address=b"new")
        member_list.join(store, record(0, None))
        member_list.join(store, first)
        member_list.join(store, second)
        assert member_list.members(store) == [record(0, None), second]
        member_list.leave(store, first)
        assert member_list.lookup(store, 1) == second

    def test_name_and_rank_of_one_who_left_can_be_taken(self) -> None:
        store = HashStore()
        member_list.join(store, record(1, None))
        member_list.leave(store, record(1, None))
        successor = record(1, None, name="successor")
        namesake = record(2, None, name="worker1", incarnation=2)
        member_list.join(store, successor)
        member_list.join(store, namesake)
        assert member_list.lookup(store, 1) == successor
        assert member_list.lookup(store, "worker1") == namesake

    def test_a_name_belongs_to_one_rank(self) -> None:
        store = HashStore()
        member_list.join(store, record(0, None))
        with pytest.raises(BringUpError, match="worker0 is not unique"):
            member_list.join(store, record(1, None, name="worker0"))
        assert member_list.lookup(store, 1) is None

    @pytest.mark.parametrize("name", ["worker0", "-"])
    def test_a_rank_belongs_to_one_name(self, name: str) -> None:
        store = HashStore()
        member_list.join(store, record(0, None, name=name))
        with pytest.raises(BringUpError, match="rank 0 is claimed by two workers"):
            member_list.join(store, record(0, None, name="other"))
        assert member_list.members(store) == [record(0, None, name=name)]

    def test_a_life_does_not_take_the_place_of_a_later_one(self) -> None:
        store = HashStore()
        first, second = record(1, None), record(1, None, incarnation=2)
        member_list.join(store, second)
        with pytest.raises(BringUpError, match="rank 1 is claimed by two workers"):
            member_list.join(store, first)
        assert member_list.members(store) == [second]
        assert member_list.lookup(store, 1) == second

    def test_a_life_does_not_come_after_a_later_one_left(self) -> None:
        store = HashStore()
        member_list.join(store, record(1, None, incarnation=2))
        member_list.leave(store, record(1, None, incarnation=2))
        with pytest.raises(BringUpError, match="worker1 is not unique"):
            member_list.join(store, record(1, None))
        assert member_list.members(store) == []
        member_list.join(store, record(1, None, name="other", incarnation=3))

    @pytest.mark.parametrize("names", [("alice", "bob"), ("twin", "twin")])
    def test_of_two_that_claim_a_rank_at_once_one_is_a_member(self, names: tuple[str, str]) -> None:
        """Their requests come in every kind of order; in 100 orders the races are found."""
        lives = [record(1, None, name=name, incarnation=i) for i, name in enumerate(names, 1)]
        for seed in range(100):
            store = HashStore()
            joined = [each for each in join_in_turns(store, lives, seed) if each is not None]
            assert member_list.members(store) == joined[-1:], seed
            assert member_list.lookup(store, 1) == (joined[-1] if joined else None), seed
            assert len(joined) < 2 or names[0] == names[1], seed

    def test_backends_must_agree(self) -> None:
        store = HashStore()
        member_list.join(store, record(0, None))
        with pytest.raises(BringUpError, match="worker0 says TENSORPIPE, worker1 says OTHER"):
            member_list.join(store, record(1, None, backend="OTHER"))

    def test_changes_tells_whether_to_look_again(self) -> None:
        store = HashStore()
        counts = [member_list.changes(store)]
        member_list.join(store, record(0, None))
        counts.append(member_list.changes(store))
        member_list.leave(store, record(0, None))
        counts.append(member_list.changes(store))
        member_list.leave(store, record(0, None))
        assert counts == [0, 1, 2]
        assert member_list.changes(store) == 2

    def test_many_may_join_at_once(self) -> None:
        store = HashStore()
        workers = [record(rank, None) for rank in range(32)]
        with ThreadPoolExecutor(32) as pool:
            list(pool.map(lambda me: member_list.join(store, me), workers))
        found = member_list.members(store)
        assert sorted(found, key=lambda member: member.rank) == workers

    def test_one_that_was_given_another_key_does_not_join(self) -> None:
        store = HashStore()
        first, second = (
            record(rank, None, extras={KEY_MARK: key_mark(key)})
            for rank, key in enumerate((b"", b"a"))
        )
        member_list.join(store, first)
        with pytest.raises(BringUpError, match="disagree about group_key: worker0 and worker1"):
            member_list.join(store, second)
        assert member_list.members(store) == [first]

    def test_static_and_dynamic_members_do_not_mix(self) -> None:
        mixes = "RPC group mixes statically and dynamically initialized members"
        store = HashStore()
        member_list.join(store, record(0, None))
        with pytest.raises(RuntimeError, match=mixes):
            rendezvous.meet(store, record(1), SOON)
        store = HashStore()
        rendezvous.meet(store, record(0, 1), SOON)
        with pytest.raises(RuntimeError, match=mixes):
            member_list.join(store, record(1, None))


class TestTheListAsALauncherSeesIt:
    def test_who_joined_is_found_with_its_process(self) -> None:
        store = HashStore()
        members = MemberList(store)
        assert members.find("worker5") is None
        member_list.join(store, record(5, None, host="here", pid=77))
        found = members.find("worker5")
        assert found == Member(WorkerInfo("worker5", 5), 1, "here", 77)
        assert members.members() == [found]

    def test_a_life_is_struck_off_once_and_a_later_one_never(self) -> None:
        store = HashStore()
        members = MemberList(store)
        member_list.join(store, record(5, None))
        first = members.find(5)
        assert first is not None
        assert members.strike_off(first, "its process ended")
        assert not members.strike_off(first, "its process ended")
        assert members.members() == []
        member_list.join(store, record(5, None, incarnation=2))
        assert not members.strike_off(first, "its process ended")
        assert [member.incarnation for member in members.members()] == [2]

    def test_it_is_told_who_was_lost_and_who_left(self) -> None:
        store = HashStore()
        members = MemberList(store)
        for rank in (1, 11):
            member_list.join(store, record(rank, None, incarnation=rank))
        first, second = members.members()
        assert not members.was_lost(first)
        members.strike_off(first, "its process ended")
        assert members.was_lost(first)
        member_list.leave(store, record(11, None, incarnation=11))
        assert not members.was_lost(second)
        member_list.join(store, record(1, None, incarnation=12))
        assert not members.was_lost(first)

    def test_changes_are_waited_for(self) -> None:
        store = HashStore()
        member_list.join(store, record(4, None))
        members = MemberList(store)
        assert not members.wait_for_change(0.0)
        member_list.join(store, record(5, None))
        assert members.wait_for_change(0.0)
        assert not members.wait_for_change(0.0)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(members.wait_for_change, SOON)
            member_list.join(store, record(6, None))
            assert waiting.result()
