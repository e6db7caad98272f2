"""The kit of the games tells which game is broken, makes it short, and leaves no mistake behind."""

from __future__ import annotations

import random
from functools import partial

import pytest

from tests.seeded_games import (
    BrokenGameError,
    check_seeds,
    seed_that_breaks,
    seed_that_finds,
    simplest,
    without_pieces,
)


class Rules:
    limit = 10


def play(seed: int, factor: int = 1) -> int:
    if seed * factor > Rules.limit:
        raise AssertionError(f"{seed * factor} is too much")
    return seed * factor


def test_the_ends_of_games_are_returned() -> None:
    assert check_seeds(play, range(3)) == [0, 1, 2]


def test_a_broken_game_is_told_with_the_call_that_plays_it_again() -> None:
    with pytest.raises(BrokenGameError) as caught:
        check_seeds(partial(play, factor=5), range(9), lambda seed: f"so is {seed - 1}")
    assert str(caught.value).splitlines() == [
        f"{__name__}.play(3, factor=5) breaks a rule",
        "so is 2",
        "AssertionError: 15 is too much",
    ]


def test_the_first_seed_that_breaks_is_found_if_there_is_one() -> None:
    assert seed_that_breaks(play, range(5, 99)) == 11
    assert seed_that_breaks(play, range(5, 9)) is None


def test_a_mistake_is_found_and_undone() -> None:
    assert seed_that_finds(lambda patch: patch.setattr(Rules, "limit", 4), play, range(9)) == 5
    assert Rules.limit == 10


@pytest.mark.parametrize("seed", range(20))
def test_only_what_breaks_a_rule_is_left(seed: int) -> None:
    parts = tuple(range(random.Random(seed).randint(3, 200)))
    needed = set(random.Random(seed).sample(parts, 3))
    assert set(without_pieces(parts, lambda left: needed <= {*left}, 10_000)) == needed


def test_no_more_games_are_played_than_allowed() -> None:
    tried = []
    left = without_pieces(tuple(range(99)), lambda left: tried.append(left) or True, 3)  # type: ignore[func-returns-value]
    assert len(tried) == 3
    assert left == tried[-1]


def test_the_simplest_game_is_found_among_those_that_break_and_may_be_played() -> None:
    def less(n: int) -> tuple[int, int]:
        return n // 2, n - 1

    assert simplest(900, less, lambda n: n >= 37) == 37
    assert simplest(900, less, lambda n: n >= 37, most_tries=2) == 225
