"""The games find mistakes that are made on purpose in how samples are counted.

Three that few games find are found by other tests: a deal among those who are there when a step is
taken (``decisions/test_samples``), an account that is told before it is safe
(``decisions/test_replica``), and a roll-back without the account (``test_training``).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tensorwire.parameter_server.decisions.clock import Clock
from tensorwire.parameter_server.decisions.samples import Account
from tests.tensorwire.parameter_server.game import check_game, cluster

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


_FIRST = {
    _takes_batches_that_were_given_out_again: 21,
    _gives_nothing_out_again: 0,
    _deals_whenever_somebody_joins: 0,
    _counts_no_empty_pushes: 21,
    _copies_no_account_to_a_backup: 43,
    _moves_no_account_to_a_new_shard: 0,
    _saves_the_account_as_it_is_now: 11,
}
"""The seed to begin with, as few games find some of them."""


def seed_that_finds(mutate: Any, seeds: int) -> int | None:
    """The seed of the first game that a mistake does not survive; None if it survives all."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cluster, "PATIENCE", _TURNS)
        mutate(patch)
        for seed in range(_FIRST[mutate], _FIRST[mutate] + seeds):
            try:
                check_game(seed, samples=True)
            except Exception:
                return seed
    return None


@pytest.mark.parametrize("mutate", list(_FIRST), ids=lambda each: each.__name__.strip("_"))
def test_the_game_finds_a_mistake_in_the_account(mutate: Any) -> None:
    assert seed_that_finds(mutate, 40) is not None
