"""The kit of the games: plays seeds, tells a broken one, makes it short, judges mutants.

A game plays a whole group, cluster, job or pipeline in one thread; its seed decides all that
happens, so the same seed is the same game for ever. A game is given as a function of its seed that
raises if a rule is broken, with its other arguments in a ``functools.partial``. There are games of
groups (``tests/simulation/group``), parameter servers (``tests/tensorwire/parameter_server/game``),
jobs (``tests/tensorwire/launch/game.py``) and pipelines
(``tests/tensorwire/pipeline/backup_game.py``); ``make simulate`` plays thousands of each.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import pytest

Play = Callable[[int], Any]
"""Plays the game of a seed and returns its end; raises if a rule is broken."""

Mutate = Callable[[pytest.MonkeyPatch], object]
"""Makes a mistake in a decision, until the patch is undone."""

_T = TypeVar("_T")

_MOST_TRIES = 60


class BrokenGameError(AssertionError):
    """A game broke a rule; the text has the call that plays it again.

    Args:
        again: that call.
        error: what was raised.
        shorter: what a shorter or calmer game says that breaks a rule as well; "" for none.
    """

    def __init__(self, again: str, error: Exception, shorter: str = "") -> None:
        lines = [f"{again} breaks a rule", shorter, f"{type(error).__name__}: {error}"]
        super().__init__("\n".join(filter(None, lines)))


def seeds_to_play(usual: int) -> int:
    """The number of seeds in a run of the tests: ``SIMULATE_SEEDS``, or as many as are usual."""
    return int(os.environ.get("SIMULATE_SEEDS", "0")) or usual


def check_seeds(
    play: Play, seeds: Iterable[int], shorten_game: Callable[[int], str] | None = None
) -> list[Any]:
    """Plays the games of some seeds; returns their ends.

    Args:
        play: the game.
        seeds: one game for each.
        shorten_game: describes a shorter or calmer game than that of a seed which breaks a rule.

    Raises:
        BrokenGameError: a game broke a rule.
    """
    ends = []
    for seed in seeds:
        try:
            ends.append(play(seed))
        except Exception as error:
            shorter = shorten_game(seed) if shorten_game is not None else ""
            raise BrokenGameError(call_of(play, seed), error, shorter) from error
    return ends


def seed_that_breaks(play: Play, seeds: Iterable[int]) -> int | None:
    """The first seed whose game breaks a rule; None if all keep them."""
    return next((seed for seed in seeds if breaks(play, seed)), None)


def breaks(play: Callable[[_T], object], game: _T) -> bool:
    """True if a game breaks a rule."""
    try:
        play(game)
    except Exception:
        return True
    return False


def seed_that_finds(mutate: Mutate, play: Play, seeds: Iterable[int]) -> int | None:
    """The first seed whose game finds a mistake; None if it survives them all."""
    with pytest.MonkeyPatch.context() as patch:
        mutate(patch)
        return seed_that_breaks(play, seeds)


def mistake_name(mutate: Mutate) -> str:
    """The name of a mistake among pytest's parameters."""
    return mutate.__name__.strip("_")


def call_of(play: Play, seed: int) -> str:
    """The call that plays a game again, as one would type it."""
    arguments: list[str] = [str(seed)]
    while isinstance(play, functools.partial):
        arguments += [
            f"{name}={getattr(value, '__name__', repr(value))}"
            for name, value in play.keywords.items()
        ]
        play = play.func
    return f"{play.__module__}.{play.__qualname__}({', '.join(arguments)})"


def without_pieces(
    parts: tuple[_T, ...], still_breaks: Callable[[tuple[_T, ...]], bool], most_tries: int
) -> tuple[_T, ...]:
    """Leaves out ever smaller pieces while what is left breaks the same rule (delta debugging).

    Args:
        parts: what happens in a game, any part of which can be played.
        still_breaks: plays some of the parts.
        most_tries: how many games may be played.

    Returns:
        The fewest found; unless the tries ran out, no single one can be left out.
    """
    tries, piece = 0, max(1, len(parts) // 2)
    while tries < most_tries:
        before, end = len(parts), len(parts)
        while end > 0 and tries < most_tries:
            start = max(0, end - piece)
            tries += 1
            if still_breaks(fewer := parts[:start] + parts[end:]):
                parts = fewer
            end = start
        if len(parts) == before and piece == 1:
            break
        piece = max(1, min(piece // 2, len(parts) // 2))
    return parts


def simplest(
    game: _T,
    simpler: Callable[[_T], Iterable[_T]],
    still_breaks: Callable[[_T], bool],
    most_tries: int = _MOST_TRIES,
) -> _T:
    """A game in which as little as possible goes wrong, and a rule is broken all the same.

    Args:
        game: a game that breaks a rule.
        simpler: those in which a little less goes wrong than in the one given.
        still_breaks: plays one.
        most_tries: how many may be played.
    """
    for tried, each in enumerate(simpler(game)):
        if tried == most_tries:
            break
        if still_breaks(each):
            return simplest(each, simpler, still_breaks, most_tries - tried - 1)
    return game
