"""The game finds mistakes in the decisions: each of these mutants breaks a rule within some seeds.

What a mutant needs is not in every game: some have games of their own, in which little else goes
wrong. Four of the log's survive all that were tried, with heads that sleep and views, losses and
records that are late: one that does not refuse the records of a replaced head, that keeps what came
too early in an earlier chain, that counts acknowledgements of one, or that learns of a later chain
from its views only. Chains change at their heads by loss and at their tails by copies, so whoever
follows a server has a beginning of what that one has; the one who takes a head's place has voted,
and refuses what the lost one sends. ``decisions/test_replication`` tests the log by itself.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from tensorwire.parameter_server.decisions import (
    beginnings,
    confirmation,
    coordination,
    gate,
    leases,
    lives,
    quorum,
    reads,
    records,
    replication,
    tasks,
    view_changes,
)
from tensorwire.parameter_server.decisions import unacknowledged as kept
from tensorwire.parameter_server.decisions.clock import Clock
from tensorwire.parameter_server.decisions.consistency import BSP, Async
from tensorwire.parameter_server.storage.dense import DenseShard
from tests.seeded_games import Mutate, mistake_name
from tests.tensorwire.parameter_server.game import PlanOf, processes, seed_whose_game_finds
from tests.tensorwire.parameter_server.game.plans import (
    Plan,
    calm,
    draw_plan,
    draw_plan_with_sleepers,
)

_SEEDS = 200
_TURNS = 15_000
"""A game without mistakes is over long before."""


def _takes_repeated_pushes(patch: pytest.MonkeyPatch) -> None:
    push = Clock.push

    def repeated(self: Any, it: Any) -> Any:
        if it.number < self._counts.get(it.trainer, 0) and it.trainer in self._members:
            self._counts[it.trainer] = it.number
        return push(self, it)

    patch.setattr(Clock, "push", repeated)


def _does_not_hold(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Clock, "hold", lambda self, change: None)


def _cuts_at_the_slowest(patch: pytest.MonkeyPatch) -> None:
    def meeting(view: Any, change: int, statuses: Any, joins: Any) -> Any:
        statuses = list(statuses)
        found = original(view, change, statuses, joins)
        vector = {
            who: min(s.counts.get(who, count) for s in statuses)
            for who, count in found.vector.items()
        }
        return coordination.replace(found, vector=vector)

    original = beginnings.meeting
    patch.setattr(beginnings, "meeting", meeting)


def _takes_pushes_of_an_old_map(patch: pytest.MonkeyPatch) -> None:
    push = Clock.push

    def renamed(self: Any, it: Any) -> Any:
        return push(self, coordination.replace(it, epoch=max(it.epoch, self.epoch)))

    patch.setattr(Clock, "push", renamed)


def _passes_cuts_at_once(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Clock, "_is_at_cut", lambda self: self._cut is not None)


def _does_not_await_rows(patch: pytest.MonkeyPatch) -> None:
    passed = Clock._pass_cut

    def pass_cut(self: Any) -> Any:
        effects = passed(self)
        self._awaited = set()
        return effects

    patch.setattr(Clock, "_pass_cut", pass_cut)


def _passes_cuts_before_its_rows_are_here(patch: pytest.MonkeyPatch) -> None:
    at_cut = Clock._is_at_cut

    def without_rows(self: Any) -> Any:
        awaited, self._awaited = self._awaited, set()
        found = at_cut(self)
        self._awaited = awaited
        return found

    patch.setattr(Clock, "_is_at_cut", without_rows)


def _answers_before_it_is_safe(patch: pytest.MonkeyPatch) -> None:
    def answer(self: Any, call: Any, answer: Any, position: Any = None) -> Any:
        return [] if call is None else [records.Respond(call, answer)]

    def count(self: Any, trainer: int, count: int) -> None:
        self._counts[trainer] = max(count, self._counts.get(trainer, 0))

    patch.setattr(gate.Gate, "answer", answer)
    patch.setattr(gate.Gate, "count", count)


def _forgets_records_of_a_copy(patch: pytest.MonkeyPatch) -> None:
    rechained = replication.Replication.rechained

    def chained(self: Any, version: int, chain: Any) -> Any:
        return [e for e in rechained(self, version, chain) if type(e) is not replication.Forward]

    patch.setattr(replication.Replication, "rechained", chained)


def _answers_pulls_too_early(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(reads.Reads, "_may_be_answered", lambda self, pull, clock: True)


def _answers_pulls_without_a_lease(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(leases.Lease, "is_valid", lambda self, now: True)


def _has_a_lease_as_soon_as_it_asks(patch: pytest.MonkeyPatch) -> None:
    asked = leases.Lease.asked

    def granted(self: Any, end: int, now: float) -> None:
        asked(self, end, now)
        self._proven_at, self.renew_at = now, now + leases.LEASE / 2

    patch.setattr(leases.Lease, "asked", granted)


def _counts_leases_from_when_the_answer_is_read(patch: pytest.MonkeyPatch) -> None:
    """Counts like a head that sleeps between its question and the answer."""
    answered, durable = processes.Process.answered, leases.Lease.durable
    now = -math.inf

    def read(self: Any, number: int, answer: Any) -> None:
        nonlocal now
        now = self.game.time_of(self)
        answered(self, number, answer)

    def from_now_on(self: Any, position: int) -> None:
        if self.pending is not None:
            self.pending = self.pending[0], max(now, self.pending[1])
        durable(self, position)

    patch.setattr(processes.Process, "answered", read)
    patch.setattr(leases.Lease, "durable", from_now_on)


def _sends_nothing_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(kept.Unacknowledged, "again", lambda self, shard: [])


def _forgets_what_lies_at_shards_that_are_no_more(patch: pytest.MonkeyPatch) -> None:
    def drop(self: Any, shards: Any) -> Any:
        for number, push in list(self._kept.items()):
            for shard in set(push.parts) - set(shards):
                self._drop(number, shard)
        return []

    patch.setattr(kept.Unacknowledged, "stranded", drop)


def _forgets_that_shards_were_lost(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(coordination, "_lost_shards", lambda view: [])


def _gives_a_new_server_the_shard_without_a_copy(patch: pytest.MonkeyPatch) -> None:
    def back_up(self: Any) -> Any:
        while (found := self._wanting()) is not None:
            number, server = found
            edit = partial(view_changes.backed_up, number=number, server=server)
            yield coordination.Edit(edit)
        self._copying = False

    patch.setattr(coordination.Coordinator, "_back_up", back_up)


def _takes_lives_for_lost_of_which_it_has_not_heard(patch: pytest.MonkeyPatch) -> None:
    verdict = lives.verdict

    def hasty(server: Any, latest: Any) -> Any:
        found = verdict(server, latest)
        return lives.Verdict.OVER if found is lives.Verdict.UNHEARD else found

    patch.setattr(lives, "verdict", hasty)


def _makes_no_call_again_that_met_a_former_life(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(lives.Lives, "failed", lambda self, to, call, was: lives.Fate.GIVEN_UP)


def _takes_steps_that_others_may_lack(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Clock, "_is_everywhere", lambda self, step: True)


def _forgets_dense_parameters_that_move(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DenseShard, "enter", lambda self, data, steps: None)


def _gives_up_others_without_votes(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(quorum.Electorate, "is_enough", lambda self, agreeing: True)


def _lets_newcomers_believe_what_they_read(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(confirmation.Confirmation, "to_ask", lambda self, lives: [])


def _never_asks_a_voter_again_that_was_ahead(patch: pytest.MonkeyPatch) -> None:
    take = tasks.Tasks._take_vote

    def taken(self: Any, poll: Any, ask: int, answer: Any) -> None:
        is_ahead = answer is False and poll.asked[ask][1] == self.view.number
        take(self, poll, ask, None if is_ahead else answer)

    patch.setattr(tasks.Tasks, "_take_vote", taken)


_MUTANTS: list[Mutate] = [
    _never_asks_a_voter_again_that_was_ahead,
    _lets_newcomers_believe_what_they_read,
    _gives_up_others_without_votes,
    _forgets_dense_parameters_that_move,
    _takes_repeated_pushes,
    _does_not_hold,
    _cuts_at_the_slowest,
    _takes_pushes_of_an_old_map,
    _passes_cuts_at_once,
    _does_not_await_rows,
    _passes_cuts_before_its_rows_are_here,
    _answers_before_it_is_safe,
    _forgets_records_of_a_copy,
    _answers_pulls_too_early,
    _answers_pulls_without_a_lease,
    _has_a_lease_as_soon_as_it_asks,
    _counts_leases_from_when_the_answer_is_read,
    _sends_nothing_again,
    _forgets_what_lies_at_shards_that_are_no_more,
    _forgets_that_shards_were_lost,
    _gives_a_new_server_the_shard_without_a_copy,
    _takes_lives_for_lost_of_which_it_has_not_heard,
    _makes_no_call_again_that_met_a_former_life,
    _takes_steps_that_others_may_lack,
]


def _outvoted(seed: int) -> Plan:
    plan = replace(calm(draw_plan(seed)), servers=2, spare=0, backups=1, trainers=2, steps=12)
    return replace(plan, kills=4, naps=6, stranger=True)


def _moving(seed: int) -> Plan:
    plan = replace(calm(draw_plan(seed)), servers=2, spare=2, trainers=3, steps=12)
    return replace(plan, resizes=3, slow_pushes=True)


def _moving_and_saved(seed: int) -> Plan:
    plan = replace(calm(draw_plan(seed)), servers=2, spare=2, resizes=3, slow_rows=True, steps=12)
    return replace(plan, snapshots=4, snapshot_follows=True)


def _shrinking(seed: int) -> Plan:
    plan = replace(calm(draw_plan(seed)), consistency=Async(), servers=3, spare=0, trainers=3)
    return replace(plan, resizes=3, slow_pushes=True, steps=12)


def _dying_trainers(seed: int) -> Plan:
    plan = replace(calm(draw_plan(seed)), consistency=BSP(), servers=3, trainers=3, steps=12)
    return replace(plan, trainer_kills=3, slow_pushes=True)


def _dying_heads(seed: int) -> Plan:
    plan = replace(calm(draw_plan(seed)), servers=3, backups=1, steps=12)
    return replace(plan, kills=3, slow_pushes=True)


def _coming_back(seed: int) -> Plan:
    plan = replace(calm(draw_plan(seed)), servers=2, spare=0, backups=1, trainers=1, steps=2)
    return replace(plan, newcomers=True, kills=1)


def _polled(seed: int) -> Plan:
    plan = replace(calm(draw_plan(seed)), servers=3, spare=2, backups=2, trainers=2, steps=12)
    return replace(plan, kills=6, trainer_kills=2, reads_store=True)


_PLANS: dict[Mutate, PlanOf] = {
    _gives_up_others_without_votes: _outvoted,
    _never_asks_a_voter_again_that_was_ahead: _polled,
    _passes_cuts_before_its_rows_are_here: _moving_and_saved,
    _forgets_what_lies_at_shards_that_are_no_more: _shrinking,
    _takes_steps_that_others_may_lack: _dying_trainers,
    _takes_pushes_of_an_old_map: _moving,
    _sends_nothing_again: _dying_heads,
    _answers_pulls_without_a_lease: draw_plan_with_sleepers,
    _has_a_lease_as_soon_as_it_asks: draw_plan_with_sleepers,
    _counts_leases_from_when_the_answer_is_read: draw_plan_with_sleepers,
    _answers_before_it_is_safe: _dying_heads,
    _takes_lives_for_lost_of_which_it_has_not_heard: _coming_back,
}
"""The games in which most seeds find what few of all games find."""


_FIRST: dict[Mutate, int] = {_never_asks_a_voter_again_that_was_ahead: 45}
"""The seeds with which to begin where few games find a mistake."""


@pytest.mark.parametrize("mutate", _MUTANTS, ids=mistake_name)
def test_the_game_finds_a_mistake(mutate: Mutate) -> None:
    plan_of = _PLANS.get(mutate, draw_plan)
    seeds = range(_FIRST.get(mutate, 0), _SEEDS)
    assert seed_whose_game_finds(mutate, seeds, plan_of, _TURNS) is not None
