"""The simulator notices most changes of the decisions: a sample of ``make mutants``."""

from __future__ import annotations

import functools
import zlib
from pathlib import Path

from tests.loading import load
from tests.seeded_games import seed_that_breaks
from tests.simulation.group.generator import Scenario
from tests.simulation.group.runs import draw
from tests.simulation.group.worker import Machines

SEEDS = 40
ONE_IN = 160
SHARE = 0.75
"""About one in ten has to be left to the unit tests."""


_HERE = Path(__file__).parent
mutants, survivors = load(_HERE, "mutants"), load(_HERE, "survivors")
targets = load(_HERE, "targets")


@functools.cache
def every_mutant() -> list:
    return list(targets.all_mutants())


def sample() -> list:
    """Those that are played, without the ones that nothing can kill."""
    rows = survivors.match(survivors.read_survivors(), [mutant for mutant, _ in every_mutant()])
    listed = {mutant.key for _, mutant in rows if mutant is not None}
    return [
        (mutant, target)
        for mutant, target in every_mutant()
        if target.plays and mutant.key not in listed
        if zlib.crc32(mutant.key.encode()) % ONE_IN == 0
    ]


def test_no_rule_is_broken_where_nothing_was_changed() -> None:
    for play in {play for target in targets.TARGETS for play in target.plays}:
        assert seed_that_breaks(play, [0]) is None


def test_most_mutants_break_a_rule() -> None:
    living = []
    for mutant, target in sample():
        with mutants.applied(mutant):
            if not any(target.breaks(seed) for seed in range(SEEDS)):
                living.append(mutant.key)
    assert len(living) <= (1 - SHARE) * len(sample()), living


def test_the_table_of_survivors_is_of_these_modules() -> None:
    rows = list(
        survivors.match(survivors.read_survivors(), [mutant for mutant, _ in every_mutant()])
    )
    assert all(row.reason for row, _ in rows)
    known = sum(mutant is not None for _, mutant in rows)
    assert known > len(rows) / 2, "run make mutants ARGS='--fresh --write'"


def test_a_mutant_is_gone_when_it_was_tried() -> None:
    for mutant, _ in sample()[:5]:
        with mutants.applied(mutant):
            pass
    assert draw(0, Scenario(), Machines()).broken is None
