"""Orders of which any position can be computed alone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorwire.parameter_server.client.permutation import Permutation


@pytest.mark.parametrize("length", [*range(1, 40), 63, 64, 65, 255, 256, 257, 1000, 4096, 4097])
def test_each_number_comes_once(length: int) -> None:
    found = Permutation(length, seed=7, epoch=3)(np.arange(length))
    assert np.array_equal(np.sort(found), np.arange(length))


@settings(max_examples=50, deadline=None)
@given(
    length=st.integers(1, 1 << 62),
    seed=st.integers(0, (1 << 64) - 1),
    epoch=st.integers(0, 1 << 40),
    data=st.data(),
)
def test_a_part_is_that_of_the_whole(
    length: int, seed: int, epoch: int, data: st.DataObject
) -> None:
    order = Permutation(length, seed, epoch)
    places = data.draw(st.lists(st.integers(0, length - 1), min_size=1, max_size=20, unique=True))
    together = order(np.array(places))
    assert together.tolist() == [int(order(np.array([each]))[0]) for each in places]
    assert len(set(together.tolist())) == len(places)
    assert all(0 <= each < length for each in together)


def test_places_are_spread_evenly() -> None:
    """The numbers of a first tenth, over 200 orders, fill each tenth of all alike."""
    tenths = np.zeros(10)
    for seed in range(200):
        found = Permutation(1000, seed, 0)(np.arange(100))
        tenths += np.bincount(found // 100, minlength=10)
    assert tenths.sum() == 20_000
    assert np.all(np.abs(tenths - 2000) < 6 * np.sqrt(2000))


def test_neighbours_do_not_stay_together() -> None:
    found = Permutation(100_000, 1, 0)(np.arange(100_000))
    assert np.mean(np.abs(np.diff(found)) < 100) < 0.01
