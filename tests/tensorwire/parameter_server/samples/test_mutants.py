"""The games find mistakes that are made on purpose in how samples are counted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tensorwire.parameter_server.decisions import beginnings, samples
from tensorwire.parameter_server.decisions.clock import Clock
from tensorwire.parameter_server.decisions.gate import Gate
from tensorwire.parameter_server.decisions.replica import Replica
from tensorwire.parameter_server.decisions.samples import Account
from tests.seeded_games import Mutate, mistake_name
from tests.tensorwire.parameter_server.game import PlanOf, seed_whose_game_finds
from tests.tensorwire.parameter_server.game.plans import (
    Plan,
    calm,
    draw_plan_with_files,
    draw_plan_with_leases,
    draw_plan_with_samples,
)

_TURNS = 5_000
"""A game without mistakes is over long before."""


def _takes_batches_that_were_given_out_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Account, "refuses", lambda self, batches: False)


def _gives_nothing_out_again(patch: pytest.MonkeyPatch) -> None:
    stepped = Account.stepped
    patch.setattr(
        Account, "stepped", lambda self, taken, members: stepped(self, taken, self.deal.members)
    )


def _deals_whenever_somebody_joins(patch: pytest.MonkeyPatch) -> None:
    def at_cut(self: Any, trainers: Any, joining: Any) -> Any:
        return self.dealt(trainers) if joining or not self.deal.members else self

    patch.setattr(Account, "at_cut", at_cut)


def _counts_no_empty_pushes(patch: pytest.MonkeyPatch) -> None:
    account = Clock._account

    def without_skips(self: Any, step: Any) -> Any:
        account(self, [p if p.load and p.kind.name != "SKIP" else replace(p, batches=None)
                       for p in step])  # fmt: skip
        return step

    patch.setattr(Clock, "_account", without_skips)


def _copies_no_account_to_a_backup(patch: pytest.MonkeyPatch) -> None:
    state = Clock._state
    patch.setattr(
        Clock, "_state", lambda self: [each for each in state(self) if "_accounts" not in each[0]]
    )


def _moves_no_account_to_a_new_shard(patch: pytest.MonkeyPatch) -> None:
    imported = Clock.imported
    patch.setattr(Clock, "imported", lambda self, source, accounts=None: imported(self, source))


def _saves_the_account_as_it_is_now(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Clock, "accounts_at_cut", Clock.accounts)


def _deals_among_those_who_are_there_when_a_step_is_taken(patch: pytest.MonkeyPatch) -> None:
    account, stepped = Clock._account, Account.stepped

    def entered(self: Any, step: Any) -> Any:
        with pytest.MonkeyPatch.context() as now:
            now.setattr(
                Account, "stepped", lambda it, taken, members: stepped(it, taken, self.members)
            )
            return account(self, step)

    patch.setattr(Clock, "_account", entered)


def _tells_the_account_before_it_is_safe(patch: pytest.MonkeyPatch) -> None:
    counted, answer = Replica.counted, Gate.answer

    def at_once(self: Any, sampler: str, call: Any) -> Any:
        with pytest.MonkeyPatch.context() as now:
            now.setattr(Gate, "answer", lambda it, call, told: answer(it, call, told, position=-1))
            return counted(self, sampler, call)

    patch.setattr(Replica, "counted", at_once)


def _goes_back_without_the_account(patch: pytest.MonkeyPatch) -> None:
    beginning = beginnings.beginning

    def without(view: Any) -> Any:
        return replace(beginning(view), accounts=dict.fromkeys(view.samplers, Account()))

    patch.setattr(beginnings, "beginning", without)


def _takes_pushes_that_some_shard_lacks(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Clock, "_is_everywhere", lambda self, step: True)


def _keeps_the_leases_of_the_lost(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Account, "forgetting", lambda self, trainer: self)


def _keeps_leases_when_rows_move(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Account, "free", lambda self: self)


def _takes_pushes_of_leases_that_ended(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Account, "free", lambda self: Account(self.done, self.deal))


def _keeps_the_leases_of_who_has_finished(patch: pytest.MonkeyPatch) -> None:
    dismiss = Clock._dismiss

    def dismissed(self: Any, trainer: int) -> None:
        accounts = self._accounts
        dismiss(self, trainer)
        if trainer not in self._silenced:
            self._accounts = accounts

    patch.setattr(Clock, "_dismiss", dismissed)


def _leases_again_for_a_request_that_comes_again(patch: pytest.MonkeyPatch) -> None:
    lease = Account.lease

    def always(self: Any, asked: Any, trainers: int) -> Any:
        leases = tuple(replace(each, number=-1) for each in self.leases)
        return lease(replace(self, leases=leases), asked, trainers)

    patch.setattr(Account, "lease", always)


def _tells_who_begins_again_before_its_pushes_are_taken(patch: pytest.MonkeyPatch) -> None:
    lease = Clock.lease
    patch.setattr(Clock, "lease", lambda self, asked: lease(self, replace(asked, pushes=0)))


def _forgets_nothing_for_who_begins_again(patch: pytest.MonkeyPatch) -> None:
    lease = Clock.lease
    patch.setattr(Clock, "lease", lambda self, asked: lease(self, replace(asked, is_first=False)))


def _forgets_positions_when_rows_move(patch: pytest.MonkeyPatch) -> None:
    free = Account.free
    patch.setattr(Account, "free", lambda self: replace(free(self), begun=()))


def _takes_parts_that_begin_elsewhere(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(samples, "follows", lambda begun, part: True)


def _knows_by_pushes_alone_where_a_part_begins(patch: pytest.MonkeyPatch) -> None:
    follows = samples.follows
    patch.setattr(
        samples, "follows", lambda begun, part: follows(begun, replace(part, begins=None))
    )


def _tells_no_position_with_a_lease(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Account, "begun_in", lambda self, begin, end: ())


_FIRST = {
    _gives_nothing_out_again: 0,
    _deals_whenever_somebody_joins: 120,
    _counts_no_empty_pushes: 21,
    _moves_no_account_to_a_new_shard: 0,
    _saves_the_account_as_it_is_now: 11,
    _goes_back_without_the_account: 36,
    _tells_the_account_before_it_is_safe: 51,
}
"""The seed to begin with, as few games find some of them."""


def _dying_heads(seed: int) -> Plan:
    plan = replace(calm(draw_plan_with_samples(seed)), servers=3, spare=2, backups=1, trainers=2)
    return replace(plan, kills=3, batches=60)


def _dying_trainers_on_slow_shards(seed: int) -> Plan:
    plan = replace(calm(draw_plan_with_samples(seed)), servers=3, backups=0, trainers=3)
    return replace(plan, trainer_kills=4, slow_words=True, batches=40)


def _told_while_hosts_die(seed: int) -> Plan:
    plan = replace(calm(draw_plan_with_samples(seed)), servers=1, spare=2, backups=1, trainers=3)
    plan = replace(plan, kills=4, trainer_kills=4, slow_records=True, batches=40)
    return replace(plan, hosts=True, looks=True)


def _going_back(seed: int) -> Plan:
    plan = replace(calm(draw_plan_with_samples(seed)), servers=2, spare=1, backups=0, trainers=2)
    return replace(plan, kills=3, snapshots=3, batches=40)


def _dying_heads_and_trainers(seed: int) -> Plan:
    plan = replace(calm(draw_plan_with_samples(seed)), servers=2, backups=1, trainers=3)
    return replace(plan, kills=3, trainer_kills=3, batches=40)


def _moving(seed: int) -> Plan:
    plan = replace(calm(draw_plan_with_leases(seed)), servers=2, spare=2, trainers=3)
    return replace(plan, resizes=3, batches=40)


def _with_duplicates(seed: int) -> Plan:
    plan = replace(calm(draw_plan_with_leases(seed)), servers=2, trainers=3)
    return replace(plan, duplicates=True, batches=20)


def _slow(seed: int) -> Plan:
    plan = replace(calm(draw_plan_with_leases(seed)), servers=2, trainers=3)
    return replace(plan, slow_pushes=True, batches=40)


def _dying_trainers(seed: int) -> Plan:
    plan = replace(calm(draw_plan_with_leases(seed)), servers=3, trainers=3, batches=40)
    return replace(plan, trainer_kills=3, slow_pushes=True)


def _coming_and_going(seed: int) -> Plan:
    plan = replace(calm(draw_plan_with_leases(seed)), servers=1, backups=0, trainers=1)
    return replace(plan, comings=5, files=seed % 2 == 0, batches=20)


def _files_begun_again(seed: int) -> Plan:
    plan = replace(calm(draw_plan_with_samples(seed)), servers=2, spare=0, backups=0, trainers=2)
    return replace(plan, looks=True, files=True, batches=10)


_PLANS: dict[Mutate, PlanOf] = {
    _copies_no_account_to_a_backup: _dying_heads,
    _takes_batches_that_were_given_out_again: _dying_heads_and_trainers,
    _deals_among_those_who_are_there_when_a_step_is_taken: _dying_trainers_on_slow_shards,
    _tells_the_account_before_it_is_safe: _told_while_hosts_die,
    _goes_back_without_the_account: _going_back,
}
"""The games in which many seeds find what few of all games find."""

_FIRST_ON_LEASE = {
    _forgets_nothing_for_who_begins_again: 9,
}
"""The seed to begin with, in games under SSP and async."""

_PLANS_ON_LEASE: dict[Mutate, PlanOf] = {
    _takes_pushes_that_some_shard_lacks: _dying_trainers,
    _keeps_the_leases_of_the_lost: _dying_trainers,
    _keeps_the_leases_of_who_has_finished: _coming_and_going,
    _keeps_leases_when_rows_move: _moving,
    _takes_pushes_of_leases_that_ended: _moving,
    _takes_batches_that_were_given_out_again: _moving,
    _tells_who_begins_again_before_its_pushes_are_taken: _slow,
    _leases_again_for_a_request_that_comes_again: _with_duplicates,
}
"""Games under SSP and async in which many seeds find what few of all find."""


_IN_FILES = {_forgets_positions_when_rows_move: 24, _tells_no_position_with_a_lease: 12}
"""The seed to begin with, in games of files."""

_PLANS_IN_FILES: dict[Mutate, PlanOf] = {
    _takes_parts_that_begin_elsewhere: _files_begun_again,
    _knows_by_pushes_alone_where_a_part_begins: _files_begun_again,
}
"""Games of files in which many seeds find what few of all find."""


def is_found(mutate: Mutate, first: int, plan_of: PlanOf) -> bool:
    """True if the game of one of sixty seeds finds a mistake."""
    return seed_whose_game_finds(mutate, range(first, first + 60), plan_of, _TURNS) is not None


@pytest.mark.parametrize("mutate", dict.fromkeys([*_FIRST, *_PLANS]), ids=mistake_name)
def test_the_game_finds_a_mistake_in_the_account(mutate: Mutate) -> None:
    first, plan_of = _FIRST.get(mutate, 0), _PLANS.get(mutate, draw_plan_with_samples)
    assert is_found(mutate, first, plan_of)


@pytest.mark.parametrize("mutate", [*_FIRST_ON_LEASE, *_PLANS_ON_LEASE], ids=mistake_name)
def test_the_game_finds_a_mistake_in_leases(mutate: Mutate) -> None:
    plan_of = _PLANS_ON_LEASE.get(mutate, draw_plan_with_leases)
    assert is_found(mutate, _FIRST_ON_LEASE.get(mutate, 0), plan_of)


@pytest.mark.parametrize("mutate", [*_IN_FILES, *_PLANS_IN_FILES], ids=mistake_name)
def test_the_game_finds_a_mistake_in_files(mutate: Mutate) -> None:
    plan_of = _PLANS_IN_FILES.get(mutate, draw_plan_with_files)
    assert is_found(mutate, _IN_FILES.get(mutate, 0), plan_of)
