"""The clock applies each push once, in order, and passes a cut exactly where it lies."""

from __future__ import annotations

import itertools
import random

import pytest

from tensorwire.parameter_server.decisions.clock import Clock
from tensorwire.parameter_server.decisions.consistency import BSP, SSP, Async, Consistency
from tensorwire.parameter_server.decisions.pushes import (
    Apply,
    Cut,
    Effect,
    Push,
    PushKind,
    Reached,
    Ready,
    Refusal,
    Refused,
    Taken,
)


def clock(consistency: Consistency, trainers: int = 2, epoch: int = 0) -> Clock:
    made = Clock(0, consistency)
    made.prime(dict.fromkeys(range(trainers), 0), 0, epoch)
    return made


def applied(effects: list[Effect]) -> list[tuple[tuple[int, int], ...]]:
    return [
        tuple((push.trainer, push.number) for push in effect.pushes)
        for effect in effects
        if isinstance(effect, Apply)
    ]


def test_bsp_applies_a_step_as_one_update_in_the_trainers_order_once_all_have_pushed_it() -> None:
    it = clock(BSP(), 3)
    assert it.push(Push(2, 0, 0)) == []
    assert it.push(Push(0, 0, 0)) == []
    assert it.push(Push(1, 0, 0)) == [
        Apply((Push(0, 0, 0), Push(1, 0, 0), Push(2, 0, 0)), time=1),
        Taken(0, 0),
        Taken(1, 0),
        Taken(2, 0),
    ]


def test_a_push_that_comes_again_is_taken_once() -> None:
    for consistency in (BSP(), SSP(1), Async()):
        it = clock(consistency, 1)
        assert applied(it.push(Push(0, 0, 0))) == [((0, 0),)]
        assert it.push(Push(0, 0, 0)) == [Taken(0, 0)]


def test_pushes_that_overtook_each_other_are_applied_in_their_order() -> None:
    for order in itertools.permutations(range(4)):
        it = clock(Async(), 1)
        seen = [step for number in order for step in applied(it.push(Push(0, number, 0)))]
        assert seen == [((0, 0),), ((0, 1),), ((0, 2),), ((0, 3),)]


def test_a_skipped_step_counts_as_a_step_and_is_no_update() -> None:
    it = clock(BSP(), 2)
    it.push(Push(0, 0, 0, PushKind.SKIP))
    assert it.push(Push(1, 0, 0)) == [Apply((Push(1, 0, 0),), time=1), Taken(0, 0), Taken(1, 0)]


def test_who_has_finished_is_not_waited_for() -> None:
    it = clock(BSP(), 2)
    it.push(Push(0, 0, 0))
    assert applied(it.push(Push(1, 0, 0, PushKind.FINISH))) == [((0, 0),)]
    assert applied(it.push(Push(0, 1, 0))) == [((0, 1),)]
    assert it.members == (0,)


def test_a_push_of_a_stranger_is_refused() -> None:
    assert clock(Async()).push(Push(7, 0, 0)) == [Refused(7, 0, 0, Refusal.UNKNOWN)]


def test_nothing_is_applied_while_the_clock_holds() -> None:
    it = clock(Async(), 1)
    it.hold(1)
    assert it.push(Push(0, 0, 0)) == []
    assert applied(it.release(1)) == [((0, 0),)]


def test_a_cut_is_reached_when_all_before_it_is_applied_and_nothing_behind_it() -> None:
    it = clock(Async(), 2)
    it.hold(1)
    it.push(Push(0, 0, 0))
    it.push(Push(0, 1, 0))
    cut = Cut(1, {0: 1, 1: 1})
    assert applied(it.cut(cut)) == [((0, 0),)]
    effects = it.push(Push(1, 0, 0))
    assert [type(effect) for effect in effects] == [Apply, Taken, Reached, Apply, Taken]
    assert applied(effects) == [((1, 0),), ((0, 1),)]


def test_a_cut_with_another_map_refuses_what_was_split_by_the_old_one() -> None:
    it = clock(Async(), 1)
    it.hold(1)
    it.push(Push(0, 0, 0))
    effects = it.cut(Cut(1, {0: 0}, epoch=1, awaited={0: frozenset()}))
    assert Refused(0, 0, 0, Refusal.MOVED) in effects
    assert it.push(Push(0, 0, 0)) == [Refused(0, 0, 0, Refusal.MOVED)]
    assert applied(it.push(Push(0, 0, 1))) == [((0, 0),)]


def test_a_push_by_the_new_map_waits_for_the_cut() -> None:
    it = clock(Async(), 1)
    it.hold(1)
    assert it.push(Push(0, 0, 1)) == []
    assert applied(it.cut(Cut(1, {0: 0}, epoch=1, awaited={0: frozenset()}))) == [((0, 0),)]


def test_nothing_is_applied_until_the_rows_of_others_have_arrived() -> None:
    it = clock(Async(), 1)
    it.hold(1)
    it.cut(Cut(1, {0: 0}, epoch=1, awaited={0: frozenset({1, 2})}))
    assert it.push(Push(0, 0, 1)) == []
    assert it.imported(2) == []
    assert applied(it.imported(1)) == [((0, 0),)]


def test_a_cut_behind_a_move_is_reached_once_the_rows_have_arrived() -> None:
    it = clock(Async(), 1)
    it.hold(1)
    it.cut(Cut(1, {0: 0}, epoch=1, awaited={0: frozenset({1})}))
    it.hold(2)
    snapshot = Cut(2, {0: 0})
    assert it.cut(snapshot) == []
    assert it.imported(1) == [Reached(snapshot)]


def test_a_shard_that_keeps_nothing_after_a_cut_waits_for_nobody() -> None:
    it = clock(BSP(), 2)
    it.hold(1)
    it.cut(Cut(1, {0: 0, 1: 0}, epoch=1, awaited={1: frozenset({0})}))
    assert it.low is None
    assert it.silence(0) is None


def test_a_shard_that_keeps_nothing_any_more_knows_what_it_took_and_refuses_the_rest() -> None:
    it = clock(Async(), 1)
    it.push(Push(0, 0, 0))
    it.hold(1)
    it.cut(Cut(1, {0: 1}, epoch=1, awaited={1: frozenset({0})}))
    assert it.push(Push(0, 0, 0)) == [Taken(0, 0)]
    assert it.push(Push(0, 1, 0)) == [Refused(0, 1, 0, Refusal.MOVED)]
    assert it.silence(0) is None


def test_a_push_of_one_who_has_finished_is_known_when_it_comes_again_after_a_move() -> None:
    it = clock(Async(), 1)
    it.push(Push(0, 0, 0))
    it.push(Push(0, 1, 0, PushKind.FINISH))
    it.hold(1)
    it.cut(Cut(1, {0: 2}, epoch=1, awaited={0: frozenset()}))
    assert it.push(Push(0, 0, 0)) == [Taken(0, 0)]


def test_who_joins_at_a_cut_begins_where_the_coordinator_said() -> None:
    it = clock(BSP(), 1)
    it.push(Push(0, 0, 0))
    it.hold(1)
    it.cut(Cut(1, {0: 1}, joins={1: 1}))
    assert it.push(Push(0, 1, 0)) == []
    assert applied(it.push(Push(1, 1, 0))) == [((0, 1), (1, 1))]


def test_of_a_lost_trainer_counts_what_all_shards_have() -> None:
    it = clock(BSP(), 2)
    it.push(Push(1, 0, 0))
    it.push(Push(1, 1, 0))
    assert it.silence(1) == 2
    assert it.push(Push(1, 2, 0)) == [Refused(1, 2, 0, Refusal.UNKNOWN)]
    assert it.settle(1, 1) == []
    assert applied(it.push(Push(0, 0, 0))) == [((0, 0), (1, 0))]
    assert it.members == (0,)
    assert applied(it.push(Push(0, 1, 0))) == [((0, 1),)]


def test_a_cut_does_not_wait_for_pushes_that_a_lost_trainer_did_not_send_here() -> None:
    it = clock(Async(), 2)
    it.hold(1)
    assert it.cut(Cut(1, {0: 0, 1: 3})) == []
    it.silence(1)
    assert any(isinstance(effect, Reached) for effect in it.settle(1, 0))


def test_who_was_lost_before_its_join_does_not_join() -> None:
    it = clock(BSP(), 1)
    it.silence(5)
    it.hold(1)
    it.cut(Cut(1, {0: 0}, joins={5: 0}))
    assert it.members == (0,)


def test_a_cut_or_a_hold_that_is_told_again_changes_nothing() -> None:
    it = clock(Async(), 1)
    it.hold(1)
    assert it.cut(Cut(1, {})) != []
    assert it.cut(Cut(1, {})) == []
    it.hold(1)
    assert it.status().holding is None


@pytest.mark.parametrize("consistency", [BSP(), SSP(1), Async()])
def test_two_clocks_with_one_log_are_in_one_state(consistency: Consistency) -> None:
    r = random.Random(3)
    first = clock(consistency, 3)
    log = [Push(r.randrange(3), r.randrange(6), 0) for _ in range(60)]
    for push in log[:30]:
        first.push(push)
    second = Clock(0, consistency)
    second.load(first.dump())
    for push in log[30:]:
        assert first.push(push) == second.push(push)
    assert first.dump() == second.dump()


def test_time_goes_on_when_the_fastest_trainer_has_left() -> None:
    it = clock(Async(), 2)
    it.push(Push(0, 0, 0))
    it.push(Push(0, 1, 0, PushKind.FINISH))
    it.hold(1)
    it.cut(Cut(1, {0: 2, 1: 0}))
    assert it.time == 2
    assert it.low == 0


# --- a step is on all shards or on none


def one_of_two_shards(consistency: Consistency) -> Clock:
    made = Clock(0, consistency)
    made.prime({0: 0, 1: 0}, 0, 0, active=(0, 1))
    return made


def test_bsp_takes_a_step_once_the_other_shards_have_all_its_pushes() -> None:
    it = one_of_two_shards(BSP())
    assert it.push(Push(0, 0, 0)) == []
    assert it.push(Push(1, 0, 0)) == [Ready(0, {0: 1, 1: 1}, frozenset({1}))]
    assert it.heard(1, Ready(0, {0: 1})) == []
    assert applied(it.heard(1, Ready(0, {0: 1, 1: 1}))) == [((0, 0), (1, 0))]


def test_what_a_lost_trainer_has_pushed_to_one_shard_only_is_on_none() -> None:
    it = one_of_two_shards(BSP())
    it.push(Push(0, 0, 0))
    it.push(Push(1, 0, 0))
    assert it.silence(1) == 1
    assert it.settle(1, 0) == [Ready(0, {0: 1, 1: 0}, frozenset({1}))]
    assert applied(it.heard(1, Ready(0, {0: 1}))) == [((0, 0),)]


def test_news_of_another_shard_counts_in_its_own_epoch_only() -> None:
    it = one_of_two_shards(BSP())
    it.heard(1, Ready(1, {0: 1, 1: 1}))
    it.heard(1, Ready(0, {0: 1, 1: 1}))
    it.push(Push(0, 0, 0))
    assert applied(it.push(Push(1, 0, 0))) == []
    it.hold(1)
    it.cut(Cut(1, {0: 0, 1: 0}, epoch=1, awaited={0: frozenset(), 1: frozenset()}))
    it.push(Push(0, 0, 1))
    assert applied(it.push(Push(1, 0, 1))) == [((0, 0), (1, 0))]


def test_without_bsp_no_shard_waits_for_another() -> None:
    for consistency in (SSP(1), Async()):
        assert applied(one_of_two_shards(consistency).push(Push(0, 0, 0))) == [((0, 0),)]
