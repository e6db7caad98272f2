"""Positions inside files as bytes."""

from __future__ import annotations

import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tensorwire.parameter_server.client.positions import (
    LARGEST_POSITION,
    decode_position,
    encode_position,
)


@pytest.mark.parametrize(
    "position",
    [
        None, 3, -1 << 70, 2.5, 1j, "é", b"\x00", [1, (2, "a")], {"a": {1, 2}, 3: frozenset("b")},
        bytearray(b"x"), slice(1, 2), range(5), OrderedDict(b=1, a=2),
    ],
)  # fmt: skip
def test_plain_data_come_back(position: Any) -> None:
    found = decode_position(encode_position(position, "'a'"))
    assert found == position
    assert type(found) is type(position)


@pytest.mark.parametrize(
    "values",
    [
        torch.arange(6).reshape(2, 3).t(), torch.tensor(2.5), torch.empty(0, 3),
        torch.tensor([1.5, 2.0], dtype=torch.bfloat16), torch.tensor([True, False]),
        torch.Generator().get_state()[:50],
    ],
)  # fmt: skip
def test_tensors_and_arrays_of_numbers_come_back(values: torch.Tensor) -> None:
    (found,) = decode_position(encode_position([values], "'a'"))
    assert found.dtype == values.dtype
    assert torch.equal(found, values)
    if values.dtype is not torch.bfloat16:
        array = decode_position(encode_position(values.numpy(), "'a'"))
        assert array.dtype == values.numpy().dtype
        assert np.array_equal(array, values.numpy())
    assert decode_position(encode_position(np.float32(0.5), "'a'")) == 0.5


class Evil:
    def __reduce__(self) -> Any:
        return print, ("boo",)


@pytest.mark.parametrize("position", [Evil(), print, Path("a"), [{"a": object()}]])
def test_what_is_no_plain_data_is_refused(position: Any) -> None:
    with pytest.raises(TypeError, match="position in file 'a' cannot be kept"):
        encode_position(position, "'a'")


def test_reading_a_position_calls_nothing_but_what_plain_data_need() -> None:
    with pytest.raises(pickle.UnpicklingError, match=r"names builtins.print, which is no plain"):
        decode_position(pickle.dumps(Evil()))


def test_a_position_is_bounded() -> None:
    assert encode_position("x" * (LARGEST_POSITION - 50), "'a'")
    with pytest.raises(ValueError, match=f"and must have at most {LARGEST_POSITION}"):
        encode_position("x" * LARGEST_POSITION, "'a'")
