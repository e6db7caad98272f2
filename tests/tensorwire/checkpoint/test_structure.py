"""Values come back from JSON as they were, and nothing that could run code gets there."""

from __future__ import annotations

import json
import math
from collections import OrderedDict
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tensorwire.checkpoint.errors import DamagedCheckpointError, UnsavableValueError
from tensorwire.checkpoint.structure import decode, encode


def _around(value: Any) -> Any:
    tensors: dict[str, torch.Tensor] = {}
    text = json.dumps(encode(value, "x", tensors.__setitem__), allow_nan=False)
    return decode(json.loads(text), tensors.__getitem__)


_plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.binary(max_size=9)
    | st.floats(allow_nan=False) | st.complex_numbers(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=4) | st.lists(inner, max_size=4).map(tuple)
    | st.dictionaries(st.text() | st.integers() | st.just("$tensor"), inner, max_size=4),
    max_leaves=12,
)  # fmt: skip


@given(_plain)
def test_plain_data_comes_back_as_it_was(value: Any) -> None:
    found = _around(value)
    assert found == value
    assert repr(found) == repr(value)


def test_tensors_and_what_belongs_to_torch_come_back_as_they_were() -> None:
    value = {
        "tensor": torch.arange(3.0),
        ("a", 1): [torch.tensor(1 + 2j), torch.Size([2, 3])],
        "ordered": OrderedDict(dtype=torch.bfloat16, device=torch.device("cuda", 1)),
        "parameter": torch.nn.Parameter(torch.ones(2)),
    }
    found = _around(value)
    assert torch.equal(found["tensor"], value["tensor"])  # type: ignore[call-overload, index]
    assert found["a", 1][0] == torch.tensor(1 + 2j)
    assert found["a", 1][1] == torch.Size([2, 3])
    assert type(found["a", 1][1]) is torch.Size
    assert found["ordered"] == {"dtype": torch.bfloat16, "device": torch.device("cuda", 1)}
    assert not found["parameter"].requires_grad
    assert math.isnan(_around([math.nan])[0])


@pytest.mark.parametrize("value", [object(), {1, 2}, lambda: 0, torch.nn.Linear])
def test_what_is_no_plain_data_is_refused_by_name(value: Any) -> None:
    with pytest.raises(UnsavableValueError, match=r"model/list/1 is a .*: a checkpoint holds"):
        encode({"list": [0, value]}, "model", lambda name, tensor: None)


@pytest.mark.parametrize("document", [{"$x": 1}, {"$dtype": "float3"}, {"$tuple": 3}])
def test_a_mark_that_means_nothing_is_refused(document: Any) -> None:
    with pytest.raises(DamagedCheckpointError, match="means nothing"):
        decode(document, lambda name: torch.ones(1))
