"""The simulator bites: a sample of ``make mutants``, and the list of survivors kept true."""

from __future__ import annotations

import functools
import zlib
from pathlib import Path

import pytest

from rpc.testing.simulation.generator import Scenario
from rpc.testing.simulation.runs import draw
from rpc.testing.simulation.worker import Machines
from tests.loading import load

SEEDS = 1000
ONE_IN = 40


_HERE = Path(__file__).parent
mutants, survivors = load(_HERE, "mutants"), load(_HERE, "survivors")
targets = load(_HERE, "targets")
ARGUED = survivors.read_survivors()


@functools.cache
def every_mutant() -> list:
    return list(targets.all_mutants())


def sample() -> list:
    chosen = [(m, t) for m, t in every_mutant() if zlib.crc32(m.key.encode()) % ONE_IN == 0]
    return [(m, t) for m, t in chosen if m.key not in ARGUED]


def test_every_listed_survivor_exists_and_is_argued() -> None:
    keys = {mutant.key for mutant, _ in every_mutant()}
    unknown = [key for key in ARGUED if key not in keys]
    assert not unknown, "not there any more; run make mutants ARGS='--fresh --write'"
    assert not [key for key, why in ARGUED.items() if not why]


@pytest.mark.parametrize(
    ("mutant", "target"), [pytest.param(m, t, id=m.key[:70]) for m, t in sample()]
)
def test_a_mutant_breaks_a_rule(mutant, target) -> None:
    with mutants.applied(mutant):
        assert any(target.breaks(seed) for seed in range(SEEDS)), mutant.key


def test_a_mutant_is_gone_when_it_was_tried() -> None:
    for mutant, _ in sample()[:5]:
        with mutants.applied(mutant):
            pass
    assert draw(0, Scenario(), Machines()).broken is None
