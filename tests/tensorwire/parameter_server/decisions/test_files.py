"""The account of files: what counts of them, and who goes on where."""

from __future__ import annotations

import pytest

from tensorwire.parameter_server.decisions.clock import Clock
from tensorwire.parameter_server.decisions.consistency import BSP, Async, Consistency
from tensorwire.parameter_server.decisions.files import (
    Begun,
    Part,
    advanced,
    checksum,
    finished,
    merged,
)
from tensorwire.parameter_server.decisions.pushes import Apply, Cut, Effect, Push, PushKind
from tensorwire.parameter_server.decisions.samples import Account, Batches, LeaseAsked, Leased

WINDOW = (0, 4)


class _Game:
    """Trainers of one shard, whose files are counted from a first cut on."""

    def __init__(self, *trainers: int, consistency: Consistency | None = None) -> None:
        self.clock = Clock(0, consistency or BSP())
        joins = dict.fromkeys(trainers, 0)
        self.clock.cut(Cut(1, {}, joins, trainers=frozenset(trainers), samplers=("a",)))
        self.counts = dict.fromkeys(trainers, 0)

    @property
    def account(self) -> Account:
        return self.clock.accounts["a"]

    def push(self, trainer: int, *parts: Part, kind: PushKind = PushKind.UPDATE) -> list[Effect]:
        deal = self.account.deal.number
        batches = Batches("a", deal, finished(parts), parts, WINDOW) if parts else None
        number = self.counts[trainer]
        self.counts[trainer] += 1
        return self.clock.push(Push(trainer, number, 0, kind, None, batches))

    def lease(self, trainer: int, number: int, least: int = 1) -> Leased:
        asked = LeaseAsked(trainer, "a", number, *WINDOW, self.counts[trainer], number == 1, least)
        answer = self.clock.lease(asked)
        assert isinstance(answer, Leased)
        return answer


def applied(effects: list[Effect]) -> list[int]:
    return [push.trainer for each in effects if isinstance(each, Apply) for push in each.pushes]


def test_parts_of_one_push_are_one_part_of_each_file() -> None:
    parts = [Part(0, 2, b"5"), Part(1, 0, b"1"), Part(0, 2, None)]
    assert merged(parts) == (Part(0, 2, None), Part(1, 0, b"1"))
    assert finished(merged(parts)) == (0,)
    assert advanced((Begun(0, 2, b"3"),), merged(parts)) == (Begun(1, 1, b"1"),)


def test_a_file_goes_on_where_its_last_push_ended() -> None:
    it = _Game(0)
    assert applied(it.push(0, Part(0, 0, b"3"))) == [0]
    assert it.account.begun == (Begun(0, 1, b"3"),)
    assert applied(it.push(0, Part(0, 1, b"7"), Part(1, 0, b"2"))) == [0]
    assert it.account.begun == (Begun(0, 2, b"7"), Begun(1, 1, b"2"))
    assert applied(it.push(0, Part(0, 2, None))) == [0]
    assert (it.account.done, it.account.begun) == (((0, 1),), (Begun(1, 1, b"2"),))


@pytest.mark.parametrize("pushes", [0, 2])
def test_a_part_that_begins_elsewhere_is_a_step_but_moves_nothing(pushes: int) -> None:
    it = _Game(0)
    it.push(0, Part(0, 0, b"3"))
    assert applied(it.push(0, Part(0, pushes, b"9"))) == []
    assert it.account.begun == (Begun(0, 1, b"3"),)


def test_a_part_that_begins_behind_as_many_pushes_elsewhere_moves_nothing() -> None:
    """A trainer that was told of an older state has read the first part again, up to 5."""
    it = _Game(0)
    assert applied(it.push(0, Part(0, 0, b"3", checksum(None)))) == [0]
    assert applied(it.push(0, Part(0, 0, b"5", checksum(None)))) == []
    assert applied(it.push(0, Part(0, 1, b"8", checksum(b"5")))) == []
    assert applied(it.push(0, Part(0, 1, b"8", checksum(b"3")))) == [0]
    assert it.account.begun == (Begun(0, 2, b"8"),)


def test_a_part_of_a_file_that_is_done_moves_nothing() -> None:
    it = _Game(0)
    it.push(0, Part(0, 0, None))
    assert applied(it.push(0, Part(0, 0, b"9"))) == []
    assert (it.account.done, it.account.begun) == (((0, 1),), ())


def test_an_empty_push_tells_that_a_file_has_ended() -> None:
    it = _Game(0)
    assert applied(it.push(0, Part(0, 0, None), kind=PushKind.SKIP)) == []
    assert it.account.done == ((0, 1),)


def test_files_are_dealt_anew_when_one_trainer_has_none_and_another_has_two() -> None:
    it = _Game(0, 1)
    it.push(0, Part(0, 0, None))  # 2 is left to it
    it.push(1, Part(1, 0, b"5"))
    assert it.account.deal.number == 1
    it.push(0, Part(2, 0, None))
    it.push(1, Part(1, 1, b"6"))
    assert (it.account.deal.number, it.account.deal.members) == (2, (0, 1))
    assert [list(it.account.remaining(who, *WINDOW)) for who in (0, 1)] == [[1], [3]]
    assert it.account.begun == (Begun(1, 2, b"6"),)


def test_files_are_not_dealt_anew_when_nobody_has_two() -> None:
    it = _Game(0, 1)
    it.push(0, Part(0, 0, None), Part(2, 0, None))
    it.push(1, Part(1, 0, None))
    assert it.account.deal.number == 1


def test_a_static_share_is_never_dealt_anew() -> None:
    """Its pushes name no window, as what they leave is nobody else's."""
    account = Account().dealt([0, 1])
    ended = Batches("a", 1, (0,), (Part(0, 0, None),))
    assert account.trained(0, ended).stepped([ended], [0, 1]).deal == account.deal


def test_a_lease_tells_how_far_its_files_are() -> None:
    it = _Game(0, 1, consistency=Async())
    answer = it.lease(0, 1)
    assert (answer.begin, answer.end, answer.begun) == (0, 1, ())
    it.push(0, Part(0, 0, b"3"))
    it.clock.settle(0, 1)
    answer = it.lease(1, 1)
    assert (answer.begin, answer.end, answer.begun) == (0, 2, (Begun(0, 1, b"3"),))


def test_a_file_that_is_begun_stays_on_lease() -> None:
    it = _Game(0, 1, consistency=Async())
    it.lease(0, 1)
    it.push(0, Part(0, 0, b"3"))
    assert it.lease(1, 1).begin == 1
    it.push(0, Part(0, 1, None))
    assert {each.trainer: each.open for each in it.account.leases} == {0: (), 1: ((1, 2),)}


def test_a_lease_has_files_for_all_workers_of_a_loader() -> None:
    it = _Game(0, 1, consistency=Async())
    answer = it.lease(0, 1, least=3)
    assert (answer.begin, answer.end) == (0, 3)


@pytest.mark.parametrize("rows_move", [False, True])
def test_positions_survive_text_restore_and_rows_that_move(rows_move: bool) -> None:
    account = Account(((0, 2),), begun=(Begun(2, 7, b"\x80\xff"),)).dealt([3])
    assert Account.decode(account.encode()) == account
    assert Account.decode(account.encode()[:4]).begun == ()  # as it was written before
    after = account.free() if rows_move else account.unassigned()
    assert (after.done, after.begun) == (account.done, account.begun)
