"""Batches on lease, under SSP and async: who gets which, and what is taken."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorwire.parameter_server.decisions.clock import Clock
from tensorwire.parameter_server.decisions.consistency import SSP, Async
from tensorwire.parameter_server.decisions.pushes import Apply, Cut, Effect, Push, Ready
from tensorwire.parameter_server.decisions.samples import (
    LONGEST_LEASE,
    Account,
    Batches,
    LeaseAsked,
    Leased,
    NoLessor,
    united,
    without,
)


@given(st.sets(st.integers(0, 40)), st.sets(st.integers(0, 40)))
def test_a_set_without_some_numbers(some: set[int], others: set[int]) -> None:
    assert without(united((), some), others) == united((), some - others)


class _Shards:
    """Trainers 0 and 1 and some shards, whose samples are counted from a first cut on."""

    def __init__(self, count: int = 1, batches: int = 8) -> None:
        self.clocks = [Clock(shard, Async()) for shard in range(count)]
        self.batches = batches
        self.counts = {0: 0, 1: 0}
        self.asked = {0: 0, 1: 0}
        who, active = frozenset([0, 1]), range(count)
        for clock in self.clocks:
            clock.prime({}, 0, 0, active=active)
            clock.cut(Cut(1, {}, {0: 0, 1: 0}, trainers=who, samplers=("a",)))

    @property
    def account(self) -> Account:
        return self.clocks[0].accounts["a"]

    def request(self, trainer: int, is_first: bool = False) -> LeaseAsked:
        self.asked[trainer] += 1
        number, pushes = self.asked[trainer], self.counts[trainer]
        return LeaseAsked(trainer, "a", number, 0, self.batches, pushes, is_first)

    def lease(self, trainer: int, is_first: bool = False) -> range:
        answer = self.clocks[0].lease(self.request(trainer, is_first))
        assert isinstance(answer, Leased)
        return range(answer.begin, answer.end)

    def push(self, trainer: int, *numbers: int, to: int = 0, deal: int = 0) -> list[Effect]:
        batches = Batches("a", deal, numbers)
        return self.clocks[to].push(Push(trainer, self.counts[trainer], 0, batches=batches))


def applied(effects: list[Effect]) -> list[int]:
    return [push.trainer for each in effects if isinstance(each, Apply) for push in each.pushes]


def test_no_batch_is_on_lease_twice_and_leases_get_shorter_towards_the_end() -> None:
    it = _Shards(batches=1000)
    given_out: list[int] = []
    lengths = []
    while run := it.lease(len(lengths) % 2):
        given_out += run
        lengths.append(len(run))
    assert given_out == list(range(1000))
    assert lengths[0] == LONGEST_LEASE
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[-4:] == [1] * 4


def test_a_request_that_comes_again_is_answered_as_before() -> None:
    it = _Shards()
    request = it.request(0)
    first = it.clocks[0].lease(request)
    assert it.clocks[0].lease(request) == first
    later = it.clocks[0].lease(it.request(0))
    assert isinstance(later, Leased)
    overtaken = it.clocks[0].lease(request)
    assert isinstance(overtaken, Leased)
    assert overtaken.begin == overtaken.end
    assert it.lease(1).start == later.end


def test_who_begins_again_gets_what_it_has_not_pushed() -> None:
    it = _Shards()
    assert it.lease(0) == range(2)
    it.push(0, 0)
    it.counts[0] += 1
    assert it.lease(0, is_first=True) == range(1, 2)


def test_who_begins_again_waits_until_its_pushes_are_taken() -> None:
    it = _Shards()
    it.lease(0)
    it.counts[0] += 1
    request = it.request(0, is_first=True)
    assert it.clocks[0].lease(request) == NoLessor()
    it.counts[0] -= 1
    it.push(0, 0)
    assert it.clocks[0].lease(request) == Leased(1, 2, 0, 0, 1, is_done=False)


def test_what_a_lost_trainer_had_and_did_not_push_is_leased_to_others() -> None:
    it = _Shards()
    assert it.lease(0) == range(2)
    it.push(0, 0)
    it.clocks[0].settle(0, 1)
    assert it.lease(1).start == 1
    assert it.clocks[0].lease(it.request(0)) == NoLessor()


def test_a_push_is_taken_once_all_shards_have_it() -> None:
    it = _Shards(2)
    assert applied(it.push(0, 0)) == []
    assert it.account.done == ()
    assert applied(it.clocks[0].heard(1, Ready(0, {0: 1}))) == [0]
    assert it.account.done == ((0, 1),)


def test_a_trainer_whose_push_some_shard_lacks_does_not_keep_others_waiting() -> None:
    it = _Shards(2)
    it.push(0, 0)
    it.clocks[0].heard(1, Ready(0, {1: 1}))
    assert applied(it.push(1, 1)) == [1]


def test_a_push_that_some_shard_lacks_when_its_sender_dies_is_taken_by_none() -> None:
    it = _Shards(2)
    it.push(0, 0)
    for clock in it.clocks:
        clock.settle(0, 0)
    assert it.account.done == ()
    assert it.lease(1).start == 0


def test_only_the_first_shard_gives_leases() -> None:
    it = _Shards(2)
    assert it.clocks[1].lease(it.request(0)) == NoLessor()


def test_leases_end_with_the_map_and_what_is_pushed_of_them_is_not_taken() -> None:
    it = _Shards()
    it.lease(0)
    it.clocks[0].cut(Cut(2, {}, epoch=1, awaited={0: frozenset()}, trainers=frozenset([0, 1])))
    push = Push(0, 0, 1, batches=Batches("a", 0, (0,)))
    assert applied(it.clocks[0].push(push)) == []
    assert it.lease(1).start == 0


@pytest.mark.parametrize("under", [SSP(1), Async()])
def test_leases_are_of_one_life_of_the_cluster(under: Async | SSP) -> None:
    it = _Shards()
    it.lease(0)
    reached = it.clocks[0].cut(Cut(2, {}, trainers=frozenset([0, 1])))
    assert it.account.leases
    assert it.clocks[0].accounts_at_cut["a"].leases == ()
    assert it.clocks[0].accounts_at_cut["a"] == replace(it.account, leases=())
    again = Clock(0, under)
    again.prime({1: 0}, 0, 2, accounts={"a": Account.decode(it.account.encode())})
    answer = again.lease(it.request(1))
    assert isinstance(answer, Leased)
    assert answer.begin == 0
    assert reached
