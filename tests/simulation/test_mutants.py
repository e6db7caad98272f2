"""The simulator bites: a sample of ``make mutants``, and the list of survivors kept true."""

from __future__ import annotations

import functools
import importlib.util
import sys
import zlib
from pathlib import Path
from types import ModuleType

import pytest

from rpc._simulation.generator import Scenario
from rpc._simulation.runs import draw
from rpc._simulation.worker import Machines

SEEDS = 1000
ONE_IN = 40


def load(name: str) -> ModuleType:
    """A script that lies beside this file."""
    if name not in sys.modules:
        path = Path(__file__).with_name(f"{name}.py")
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


mutants, survivors = load("mutants"), load("survivors")
targets = load("targets")
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
