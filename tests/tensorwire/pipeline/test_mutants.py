"""The game of stages and backups finds mistakes in the decisions, within some seeds."""

from __future__ import annotations

from typing import Any

import pytest

from tensorwire.pipeline.backups import coordinator
from tensorwire.pipeline.backups.coordinator import Coordinator
from tensorwire.pipeline.backups.shelf import Epoch, Shelf
from tests.seeded_games import Mutate, mistake_name, seed_that_finds
from tests.tensorwire.pipeline.backup_game import check_game

_SEEDS = range(700)
"""Each mistake was found within half as many."""


def _obeys_anybody(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Epoch, "may_follow", lambda self, known: True)


def _drops_what_is_settled(patch: pytest.MonkeyPatch) -> None:
    settle = Shelf.settle
    patch.setattr(Shelf, "settle", lambda self, epoch, v: settle(self, epoch, v + 1))


def _makes_no_backups(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(coordinator, "choose_backups", lambda owners, found, others: {})


def _forgets_the_workers_that_had_stages(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Coordinator, "known", lambda self: tuple(w for s in self.owners for w in s))


def _does_nothing_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Coordinator, "_since", lambda self, version, pending: [])


def _does_again_what_is_pending(patch: pytest.MonkeyPatch) -> None:
    since = Coordinator._since
    patch.setattr(Coordinator, "_since", lambda self, version, pending: since(self, version, None))


def _goes_back_to_any_version(patch: pytest.MonkeyPatch) -> None:
    def newest(seats: Any, found: Any) -> int:
        return max((c.version for each in found.values() for c in each.copies), default=0)

    patch.setattr(coordinator, "newest_common_version", newest)


def _uses_numbers_of_versions_twice(patch: pytest.MonkeyPatch) -> None:
    go_back = Coordinator._go_back

    def mutant(self: Any, wanted: Any) -> Any:
        self._newest = yield from go_back(self, wanted)
        return self._newest

    patch.setattr(Coordinator, "_go_back", mutant)


def _steps_before_backups_have_the_version(patch: pytest.MonkeyPatch) -> None:
    prepared = Coordinator._prepared

    def mutant(self: Any, operation: Any) -> Any:
        made = prepared(self, operation)
        return coordinator.replace(made, cut=None) if made.cut and made.cut % 2 else made

    patch.setattr(Coordinator, "_prepared", mutant)


@pytest.mark.parametrize(
    "mutate",
    [
        _obeys_anybody,
        _drops_what_is_settled,
        _makes_no_backups,
        _forgets_the_workers_that_had_stages,
        _does_nothing_again,
        _does_again_what_is_pending,
        _goes_back_to_any_version,
        _uses_numbers_of_versions_twice,
        _steps_before_backups_have_the_version,
    ],
    ids=mistake_name,
)
def test_a_mistake_in_the_decisions_breaks_a_rule(mutate: Mutate) -> None:
    assert seed_that_finds(mutate, check_game, _SEEDS) is not None
