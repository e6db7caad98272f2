"""The members of the group, event by event."""

from __future__ import annotations

import pytest

from rpc.errors import UnknownWorkerError, WorkerLostError
from rpc.group.members import Group
from rpc.ids import Life
from rpc.transports.base import Peer
from rpc.worker_info import WorkerInfo

ALICE, BOB, CAROL = WorkerInfo("alice", 0), WorkerInfo("bob", 1), WorkerInfo("carol", 2)


def peer(info: WorkerInfo, incarnation: int = 0) -> Peer:
    return Peer(info, incarnation, b"")


def group(*peers: Peer) -> Group:
    made = Group()
    for each in peers or (peer(ALICE), peer(BOB), peer(CAROL)):
        made.add(each)
    return made


def identity(error: WorkerLostError | None) -> tuple[str, int, str]:
    assert error is not None
    return error.name, error.incarnation, error.reason


@pytest.mark.parametrize("to", [BOB, "bob", 1])
def test_a_member_is_found_however_it_is_named(to: WorkerInfo | str | int) -> None:
    assert group().find(to) == BOB


@pytest.mark.parametrize(
    ("to", "named"), [(WorkerInfo("dave", 7), "id 7"), ("dave", "name dave"), (7, "id 7")]
)
def test_who_is_no_member_is_not_found_and_the_members_are_named(
    to: WorkerInfo | str | int, named: str
) -> None:
    members = group(peer(CAROL), peer(ALICE), peer(BOB))
    with pytest.raises(UnknownWorkerError, match=f"{named}; the group has: alice, bob, carol"):
        members.find(to)


@pytest.mark.parametrize("to", [True, 1.0, None, b"bob"])
def test_a_destination_is_an_info_a_name_or_an_id(to: object) -> None:
    with pytest.raises(ValueError, match="a destination is"):
        group().find(to)  # type: ignore[arg-type]


def test_an_info_whose_id_is_anothers_now_is_not_found_and_both_are_named() -> None:
    with pytest.raises(UnknownWorkerError, match=r"WorkerInfo\(id=1, name=dave\), as bob has that"):
        group().find(WorkerInfo("dave", 1))
    assert group().find(WorkerInfo("bob", 1)) == BOB


def test_a_lost_member_is_known_but_cannot_be_called() -> None:
    members = group()
    assert identity(members.lose(Life(1, 0), "killed")) == ("bob", 0, "killed")
    assert identity(members.lost_error(1)) == ("bob", 0, "killed")
    for to in (BOB, "bob", 1):
        with pytest.raises(WorkerLostError, match="killed"):
            members.find(to)
    assert members.living() == [ALICE, CAROL]
    assert members.peer(1).info == BOB
    assert members.knows("bob")
    assert members.knows(1)
    assert not members.lives("bob")
    assert not members.lives(1)


def test_the_latest_life_is_known_of_living_and_of_lost_members() -> None:
    members = group(peer(ALICE), peer(BOB, 2))
    assert members.life(1) == Life(1, 2)
    assert members.lose(Life(1, 2), "it left")
    assert members.life(1) == Life(1, 2)
    with pytest.raises(UnknownWorkerError, match="id 7"):
        members.life(7)


def test_a_loss_is_news_once() -> None:
    members = group()
    members.lose(Life(1, 0), "killed")
    assert members.lose(Life(1, 0), "again") is None
    assert members.lose(Life(9, 0), "never there") is None
    assert identity(members.lost_error(1))[2] == "killed"


def test_the_loss_of_another_life_is_no_news() -> None:
    members = group(peer(BOB, 3))
    assert members.lose(Life(1, 2), "earlier") is None
    assert members.lose(Life(1, 4), "later") is None
    assert members.lives(1)
    assert identity(members.lose(Life(1, 3), "this one")) == ("bob", 3, "this one")


def test_only_the_life_that_is_a_member_is_had() -> None:
    members = group(peer(ALICE), peer(BOB, 3))
    lives = [Life(1, 2), Life(1, 3), Life(1, 4), Life(9, 0)]
    assert [members.has(life) for life in lives] == [False, True, False, False]
    members.lose(Life(1, 3), "killed")
    assert not members.has(Life(1, 3))
    members.add(peer(BOB, 4))
    assert [members.has(life) for life in lives] == [False, False, True, False]
    members.expel(0, "they said so")
    assert not members.has(Life(1, 4))


def test_errors_are_each_callers_own() -> None:
    members = group()
    members.lose(Life(1, 0), "killed")
    assert members.lost_error(1) is not members.lost_error(1)


def test_a_name_returns_in_its_next_life() -> None:
    members = group()
    members.lose(Life(1, 0), "killed")
    members.add(peer(BOB, 1))
    assert members.find("bob") == BOB
    assert members.life(1) == Life(1, 1)
    assert members.lost_error(1) is None
    assert members.living() == [ALICE, BOB, CAROL]


def test_an_id_may_become_anothers() -> None:
    members = group()
    dave = WorkerInfo("dave", 1)
    members.add(peer(dave, 1))
    assert members.find(1) == dave
    assert not members.knows("bob")
    assert not members.lives("bob")
    assert members.lives("dave")


def test_a_name_that_moved_to_another_id_stays_when_the_first_is_reused() -> None:
    members = group(peer(BOB))
    moved = WorkerInfo("bob", 5)
    members.add(peer(moved, 1))
    members.add(peer(WorkerInfo("dave", 1), 1))
    assert members.find("bob") == moved


def test_members_are_listed_by_id() -> None:
    assert group(peer(CAROL), peer(ALICE), peer(BOB)).living() == [ALICE, BOB, CAROL]


def test_what_is_not_known_has_no_life() -> None:
    members = group()
    assert members.latest(7) is None
    assert members.latest(1) == peer(BOB)
    assert not members.lives(7)
    assert not members.knows("dave")
    with pytest.raises(UnknownWorkerError, match="id 7"):
        members.peer(7)


def test_to_one_who_is_expelled_all_others_are_gone_and_it_is_the_one_named() -> None:
    members = group()
    members.lose(Life(2, 0), "killed")
    error, gone = members.expel(0, "declared lost")
    assert identity(error) == ("alice", 0, "declared lost")
    assert gone == [Life(1, 0)]
    assert members.living() == [ALICE]
    assert identity(members.lost_error(1)) == ("alice", 0, "declared lost")
    assert identity(members.lost_error(2)) == ("alice", 0, "declared lost")
    assert members.expel(0, "again")[1] == []


def test_one_who_is_expelled_takes_in_nobody() -> None:
    members = group()
    members.expel(0, "declared lost")
    before = members.version
    assert not members.add(peer(WorkerInfo("dave", 3)))
    assert not members.add(peer(BOB, 1))
    assert members.living() == [ALICE]
    assert members.version == before
    for name in ("dave", "bob"):
        with pytest.raises(WorkerLostError) as info:
            members.find(name)
        assert identity(info.value) == ("alice", 0, "declared lost")


def test_who_is_expelled_twice_says_why_the_first_time() -> None:
    members = group()
    members.expel(0, "declared lost")
    members.expel(0, "a later life joined")
    with pytest.raises(WorkerLostError) as info:
        members.find("dave")
    assert info.value.reason == "declared lost"


def test_every_change_is_counted() -> None:
    members = Group()
    assert members.version == 0
    members.add(peer(ALICE))
    members.add(peer(BOB))
    assert members.version == 2
    members.lose(Life(1, 0), "killed")
    assert members.version == 3
    members.lose(Life(1, 0), "no news")
    assert members.version == 3
    members.expel(0, "declared lost")
    assert members.version == 4
