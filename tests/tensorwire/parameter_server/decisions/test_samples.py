"""The account of samples: what is given to whom, and what counts."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorwire.parameter_server.decisions.clock import Clock
from tensorwire.parameter_server.decisions.consistency import BSP
from tensorwire.parameter_server.decisions.files import Part, checksum
from tensorwire.parameter_server.decisions.pushes import (
    Apply,
    Cut,
    Effect,
    Push,
    PushKind,
    Reached,
    Ready,
    Taken,
)
from tensorwire.parameter_server.decisions.samples import Account, Batches, Deal, gaps, size, united

_NUMBERS = st.sets(st.integers(0, 60))


@given(_NUMBERS, _NUMBERS, st.integers(0, 70))
def test_ranges_are_sets(some: set[int], more: set[int], end: int) -> None:
    ranges = united(united((), some), more)
    assert {number for each in ranges for number in range(*each)} == some | more
    assert size(ranges) == len(some | more)
    assert all(before[1] < after[0] for before, after in pairwise(ranges))
    missing = {number for each in gaps(ranges, end) for number in range(*each)}
    assert missing == set(range(end)) - some - more


@given(_NUMBERS, st.integers(1, 5), st.integers(0, 30), st.integers(30, 70))
def test_a_deal_gives_each_batch_to_one_trainer_in_turn(
    done: set[int], members: int, begin: int, end: int
) -> None:
    deal = Deal(1, tuple(range(0, 2 * members, 2)), united((), done))
    left = [number for number in range(end) if number not in done]
    for place, trainer in enumerate(deal.members):
        mine = [number for number in left[place::members] if number >= begin]
        assert list(deal.of(trainer, begin, end)) == mine
    assert list(deal.of(1, 0, end)) == []


@given(_NUMBERS, _NUMBERS)
def test_what_is_done_since_is_not_given_again(before: set[int], since: set[int]) -> None:
    account = Account(united((), before)).dealt([0, 1])
    account = account.trained(0, Batches("a", 1, tuple(since)))
    found = [*account.remaining(0, 0, 61), *account.remaining(1, 0, 61)]
    assert sorted(found) == [number for number in range(61) if number not in before | since]


def test_an_account_survives_its_text() -> None:
    account = Account(((0, 3), (5, 6))).dealt([4, 2]).trained(2, Batches("a", 1, (3,)))
    assert Account.decode(account.encode()) == account
    assert account.unassigned() == Account(((0, 4), (5, 6)))


class _Game:
    """Two trainers of one shard, whose samples are counted from a first cut on."""

    def __init__(self, *trainers: int) -> None:
        self.clock = Clock(0, BSP())
        joins = dict.fromkeys(trainers, 0)
        self.clock.cut(Cut(1, {}, joins, trainers=frozenset(trainers), samplers=("a",)))
        self.counts = dict.fromkeys(trainers, 0)

    @property
    def account(self) -> Account:
        return self.clock.accounts["a"]

    def push(
        self,
        trainer: int,
        *numbers: int,
        deal: int = 0,
        kind: PushKind = PushKind.UPDATE,
        epoch: int = 0,
    ) -> list[Effect]:
        batches = Batches("a", deal or self.account.deal.number, numbers) if numbers else None
        number = self.counts[trainer]
        self.counts[trainer] += 1
        return self.clock.push(Push(trainer, number, epoch, kind, None, batches))


def applied(effects: list[Effect]) -> list[int]:
    return [push.trainer for each in effects if isinstance(each, Apply) for push in each.pushes]


def test_batches_count_with_the_whole_step() -> None:
    it = _Game(0, 1)
    assert it.account.deal == Deal(1, (0, 1), ())
    it.push(0, 0)
    assert it.account.done == ()
    it.push(1, 1)
    assert it.account.done == ((0, 2),)
    assert it.account.deal.number == 1


def test_batches_that_are_pushed_again_count_once() -> None:
    it = _Game(0)
    assert applied(it.push(0, 0)) == [0]
    assert applied(it.push(0, 0, 1)) == []
    assert list(it.account.remaining(0, 0, 3)) == [1, 2]


@pytest.mark.parametrize("as_part", [False, True])
def test_of_two_pushes_of_one_step_with_the_same_batch_one_counts(as_part: bool) -> None:
    it = _Game(0, 1, 2)
    batches = [Batches("a", 1, (0, 3)), Batches("a", 1, (1,)), Batches("a", 1, (3, 4))]
    if as_part:
        same = Batches("a", 1, (), (Part(3, 0, b"2", checksum(None)),))
        batches = [same, batches[1], same]
    effects = [
        effect
        for trainer, own in enumerate(batches)
        for effect in it.clock.push(Push(trainer, 0, 0, PushKind.UPDATE, None, own))
    ]
    assert applied(effects) == [0, 1]
    assert [each.trainer for each in effects if isinstance(each, Taken)] == [0, 1, 2]
    assert it.account.done == (((1, 2),) if as_part else ((0, 2), (3, 4)))


def test_an_empty_push_counts_its_batches() -> None:
    it = _Game(0)
    assert applied(it.push(0, 0, kind=PushKind.SKIP)) == []
    assert it.account.done == ((0, 1),)


def test_who_joins_gets_work_after_the_first_step_in_which_it_takes_part() -> None:
    it = _Game(0)
    it.push(0, 0)
    it.clock.cut(Cut(2, {0: 1}, {1: 1}, trainers=frozenset([0, 1])))
    it.counts[1] = 1
    assert it.account.deal == Deal(1, (0,), ())
    it.push(0, 1)
    it.push(1)
    assert it.account.deal == Deal(2, (0, 1), ((0, 2),))


def test_who_joins_when_nobody_has_work_gets_it_at_once() -> None:
    it = _Game(0)
    it.push(0, 0)
    it.push(0, kind=PushKind.FINISH)
    it.clock.cut(Cut(2, {}, {1: 2}, trainers=frozenset([1])))
    assert it.account.deal == Deal(2, (1,), ((0, 1),))


def test_what_a_lost_trainer_had_is_given_to_the_others() -> None:
    it = _Game(0, 1)
    it.push(0, 0)
    it.clock.settle(1, 0)
    assert it.account.done == ((0, 1),)
    assert it.account.deal == Deal(2, (0,), ((0, 1),))


def test_a_push_of_an_earlier_deal_is_a_step_but_moves_nothing() -> None:
    it = _Game(0, 1)
    it.push(0, 0)
    it.clock.settle(1, 0)
    effects = it.push(0, 2, deal=1)
    assert applied(effects) == []
    assert effects[-1] == Taken(0, 1)
    assert it.account.done == ((0, 1),)


def test_a_cut_tells_the_accounts_as_they_are_there() -> None:
    it = _Game(0)
    it.push(0, 0)
    (reached, *_) = it.clock.cut(Cut(2, {0: 1}, trainers=frozenset([0])))
    assert isinstance(reached, Reached)
    it.push(0, 1)
    assert reached.accounts["a"].done == ((0, 1),)
    assert it.clock.accounts_at_cut["a"].done == ((0, 1),)
    assert it.account.done == ((0, 2),)


def test_a_deal_is_among_those_who_took_part_in_a_step_whoever_is_there_by_then() -> None:
    """One shard hears of a loss before a step, another one after it; both deal alike."""
    it = _Game(0, 1)
    shards = {0: frozenset[int](), 7: frozenset[int]()}
    it.clock.cut(Cut(2, {}, epoch=1, awaited=shards, trainers=frozenset([0, 1])))
    ready = Ready(1, {0: 9, 1: 9})
    for trainer in (0, 1):
        it.push(trainer, trainer, epoch=1)
    it.clock.settle(1, 1)
    it.clock.heard(7, ready)
    assert it.clock.members == (0,)
    assert it.account.deal == Deal(1, (0, 1), ())
    it.push(0, 2, epoch=1)
    assert it.account.deal == Deal(2, (0,), ((0, 3),))
