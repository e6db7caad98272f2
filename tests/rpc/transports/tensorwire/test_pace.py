"""Requests run one after the other while they compute a little, else side by side."""

from __future__ import annotations

import pytest

from rpc.transports.tensorwire.requests import Pace


def paced(*deliveries: tuple[float, float]) -> Pace:
    """A pace after deliveries, of which each took some milliseconds and computed for some."""
    pace = Pace()
    for took, computed in deliveries:
        pace.took(took / 1e3, computed / 1e3 if pace.looking else None)
    return pace


@pytest.mark.parametrize(
    ("took", "computed", "apart"),
    [
        (0.02, 0.02, False),
        (0.4, 0.0, False),
        (1.0, 0.9, False),
        (1.9, 1.9, False),
        (6.0, 1.8, False),  # others had its core, or the interpreter lock
        (1.0, 0.1, True),
        (9.0, 0.1, True),
        (2.5, 2.4, True),
        (90.0, 80.0, True),
    ],
)
def test_what_waits_or_computes_for_long_runs_side_by_side(
    took: float, computed: float, apart: bool
) -> None:
    assert paced((took, computed), (took, computed)).apart is apart


def test_one_alone_says_nothing_yet() -> None:
    pace = paced((50.0, 50.0))
    assert not pace.apart
    assert pace.looking


@pytest.mark.parametrize("last", [(0.1, 0.1), (1.0, 0.9)])
def test_the_last_delivery_counts(last: tuple[float, float]) -> None:
    assert not paced((50.0, 50.0), (50.0, 50.0), last).apart
    assert paced((50.0, 50.0), (50.0, 50.0), last, (50.0, 50.0), (50.0, 50.0)).apart
