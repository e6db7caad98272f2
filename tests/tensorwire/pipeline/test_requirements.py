"""Arguments of a pipeline that cannot be are refused with the argument, its value and what can."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tensorwire.pipeline.requirements import KEEP_FOR, require_passes, require_times

_PASSES: dict[str, Any] = {"recompute": False, "autocast": None, "seed": None, "prefixes": None}
_TIMES: dict[str, Any] = {"name": None, "keep_for": KEEP_FOR, "wait_for_return": 0.0}


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"seed": 1.5}, TypeError, "seed=1.5 is a float, not a whole number"),
        ({"seed": True}, TypeError, "seed=True is a bool"),
        ({"seed": 2**64}, ValueError, r"must be at least 0 and less than 2\*\*64"),
        ({"recompute": "all"}, TypeError, "recompute='all' must be True, False or numbers"),
        ({"recompute": 1}, TypeError, "recompute=1 must be True, False or numbers"),
        ({"recompute": {2}}, ValueError, r"recompute=\{2\}: there are stages 0 to 1"),
        ({"recompute": [-1]}, ValueError, r"recompute=\[-1\]: there are stages 0 to 1"),
        ({"recompute": [True]}, TypeError, "True is no number of a stage"),
        ({"autocast": "bf16"}, TypeError, "autocast='bf16' must be torch.bfloat16 or torch.float"),
        ({"autocast": torch.float32}, TypeError, "autocast=torch.float32 must be"),
        ({"prefixes": "ab"}, TypeError, "prefixes='ab' must be a list of texts"),
        ({"prefixes": ["a."]}, ValueError, r"prefixes=\['a.'\] are 1, of 2 stages"),
    ],
)
def test_passes_that_cannot_be_are_refused(
    arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        require_passes(2, **{**_PASSES, **arguments})


def test_passes_that_can_be_are_taken() -> None:
    require_passes(2, **_PASSES)
    require_passes(2, {0, 1}, torch.bfloat16, 2**64 - 1, ["embedding.", "head."])
    require_passes(2, True, torch.float16, 0, ("", ""))


@pytest.mark.parametrize(
    ("backups", "arguments", "error", "message"),
    [
        (1, {"name": 3}, TypeError, "name=3 is a int, not a str"),
        (1, {"name": "n", "keep_for": "x"}, TypeError, "keep_for='x' is a str, not seconds"),
        (1, {"name": "n", "keep_for": -1}, ValueError, "keep_for=-1 must be 0 or more seconds"),
        (1, {"keep_for": 5}, ValueError, "keep_for=5 needs name="),
        (1, {"wait_for_return": True}, TypeError, "wait_for_return=True is a bool, not seconds"),
        (1, {"wait_for_return": math.nan}, ValueError, "wait_for_return=nan must be 0 or more"),
        (0, {"wait_for_return": 5}, ValueError, "wait_for_return=5 needs backups=1"),
    ],
)
def test_times_that_cannot_be_are_refused(
    backups: int, arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        require_times(backups, **{**_TIMES, **arguments})


def test_times_that_can_be_are_taken() -> None:
    require_times(0, **_TIMES)
    require_times(1, "run-7", 0, math.inf)
