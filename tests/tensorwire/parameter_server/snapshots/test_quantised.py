"""Rows of eight bits are near what they were, whatever they were."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorwire.parameter_server.snapshots.quantised import quantised, widened

_numbers = st.floats(-(2.0**127), 2.0**127, width=32).map(lambda x: x if abs(x) > 1e-30 else 0.0)


@settings(max_examples=200, deadline=None)
@given(st.lists(_numbers, min_size=1, max_size=9))
def test_each_number_is_within_a_254th_of_its_rows_largest(row: list[float]) -> None:
    rows = torch.tensor([row])
    read = widened(*quantised(rows))
    most = rows.abs().amax().double()
    assert bool(((read - rows).double().abs() <= most / 254 * (1 + 1e-4)).all())


def test_rows_have_scales_of_their_own() -> None:
    whole, scale = quantised(torch.tensor([[1.0, -127.0], [0.0, 0.0], [5e-3, 2e-3]]))
    assert whole.tolist() == [[1, -127], [0, 0], [127, 51]]
    assert torch.allclose(scale, torch.tensor([[1.0], [0.0], [5e-3 / 127]]))


def test_infinite_numbers_become_the_largest_and_nan_stays() -> None:
    largest = torch.finfo(torch.float32).max
    rows = torch.tensor([[float("-inf"), 1.0], [float("nan"), 1.0], [2.0, 2.0]])
    read = widened(*quantised(rows))
    assert torch.allclose(read[0], torch.tensor([-largest, 0.0]))
    assert bool(read[0].isfinite().all())
    assert bool(read[1].isnan().all())
    assert torch.allclose(read[2], rows[2])
