"""Checks arguments of ``Pipeline`` that no other module reads before workers are told them."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Final

import torch

from tensorwire.pipeline.randomness import require_seed

KEEP_FOR: Final = 600.0
"""Default seconds for which copies outlive the driver of a pipeline with a name."""
_AUTOCAST: Final = (torch.bfloat16, torch.float16)


def require_passes(
    stages: int,
    recompute: bool | Collection[int],
    autocast: torch.dtype | None,
    seed: int | None,
    prefixes: Sequence[str] | None,
) -> None:
    """Checks how stages run, and what their parameters are called.

    Args:
        stages: how many there are.
        recompute: stages that run forward passes again, or all or none.
        autocast: of forward passes; None for none.
        seed: of random numbers; None for none.
        prefixes: of each stage's parameters; None for the default.

    Raises:
        TypeError: an argument is of another type.
        ValueError: an argument does not fit the number of stages, or cannot be.
    """
    require_seed(seed)
    if not isinstance(recompute, bool):
        _require_stages(stages, recompute)
    if autocast is not None and autocast not in _AUTOCAST:
        known = " or ".join(map(str, _AUTOCAST))
        raise TypeError(f"autocast={autocast!r} must be {known}, or None")
    if prefixes is not None:
        _require_prefixes(stages, prefixes)


def require_times(backups: int, name: str | None, keep_for: float, wait_for_return: float) -> None:
    """Checks for how long copies and places are kept.

    Raises:
        TypeError: an argument is of another type.
        ValueError: an argument is negative or no number, or would have no effect.
    """
    if name is not None and not isinstance(name, str):
        raise TypeError(f"name={name!r} is a {type(name).__name__}, not a str")
    for what, seconds in (("keep_for", keep_for), ("wait_for_return", wait_for_return)):
        if isinstance(seconds, bool) or not isinstance(seconds, (int, float)):
            raise TypeError(f"{what}={seconds!r} is a {type(seconds).__name__}, not seconds")
        if math.isnan(seconds) or seconds < 0:
            raise ValueError(f"{what}={seconds} must be 0 or more seconds")
    if wait_for_return and not backups:
        raise ValueError(f"wait_for_return={wait_for_return} needs backups=1")
    if keep_for != KEEP_FOR and name is None:
        raise ValueError(f"keep_for={keep_for} needs name=, under which the driver comes back")


def _require_stages(stages: int, recompute: object) -> None:
    if isinstance(recompute, str) or not isinstance(recompute, Collection):
        raise TypeError(f"recompute={recompute!r} must be True, False or numbers of stages")
    for each in recompute:
        if isinstance(each, bool) or not isinstance(each, int):
            raise TypeError(f"recompute={recompute!r}: {each!r} is no number of a stage")
        if not 0 <= each < stages:
            raise ValueError(f"recompute={recompute!r}: there are stages 0 to {stages - 1}")


def _require_prefixes(stages: int, prefixes: Sequence[str]) -> None:
    if isinstance(prefixes, str) or not all(isinstance(each, str) for each in prefixes):
        raise TypeError(f"prefixes={prefixes!r} must be a list of texts")
    if len(prefixes) != stages:
        raise ValueError(f"prefixes={list(prefixes)!r} are {len(prefixes)}, of {stages} stages")
