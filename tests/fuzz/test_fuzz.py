"""Input from strangers is refused: a little here, for half a minute in ``.ci/run``, ten by hand.

``make fuzz`` runs each parser for its part of ten minutes, ``FUZZ_SECONDS`` says otherwise.
A failure says with which seed it is repeated.
"""

from __future__ import annotations

import itertools
import os
import random
import time

import pytest

from tests.fuzz.mutations import changed
from tests.fuzz.targets import TARGETS

SECONDS = float(os.environ.get("FUZZ_SECONDS", "0"))
_TRIES = 100


def attempt(target: str, seed: int) -> None:
    try:
        TARGETS[target](random.Random(seed))
    except Exception as error:
        raise AssertionError(f"TARGETS[{target!r}](random.Random({seed})): {error!r}") from error


def test_what_is_made_up_is_never_what_is_right() -> None:
    draw, right = random.Random(0), [b"", b"right", b"right and long"]
    assert not {changed(draw, right) for _ in range(2000)} & set(right)


@pytest.mark.parametrize("target", TARGETS)
def test_a_parser_refuses_what_is_made_up(target: str) -> None:
    for seed in range(_TRIES):
        attempt(target, seed)


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 120)
@pytest.mark.parametrize("target", TARGETS if SECONDS else ())
def test_a_parser_refuses_what_is_made_up_for_long(target: str) -> None:
    end = time.monotonic() + SECONDS / len(TARGETS)
    start = random.SystemRandom().getrandbits(40)
    for seed in itertools.count(start):
        if time.monotonic() > end:
            break
        attempt(target, seed)
