"""What needs no pickler of ours arrives the same, and says so where it is damaged."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from rpc import simple_values
from rpc.codec import decode, decode_loaded, encode
from rpc.errors import DecodeError
from rpc.simple_values import Reference


class Handle(Reference):
    """Stands for an RRef."""


@pytest.mark.parametrize(
    "value", [(), (1, "a", None), (torch.ones(2), torch.zeros(1)), 2.5, b"x", torch.ones(3)]
)
def test_the_commonest_values_need_no_pickler_of_ours_and_arrive_the_same(value: Any) -> None:
    encoded = encode(value)
    assert encoded.plain
    assert encoded.payload[:1] != b"\x80"
    arrived = decode(encoded.payload, encoded.tensors, ())
    assert type(arrived) is type(value)
    assert str(arrived) == str(value)


@given(
    st.lists(
        st.one_of(
            st.none(),
            st.booleans(),
            st.integers(),
            st.floats(allow_nan=False),
            st.text(max_size=9),
            st.binary(max_size=9),
            st.builds(Handle),
            st.builds(lambda: torch.ones(2)),
            st.builds(lambda: nn.Parameter(torch.ones(1))),
        ),
        min_size=2,
        max_size=300,
    ).map(tuple)
)
def test_tuples_of_atoms_tensors_and_references_arrive_the_same(value: tuple[Any, ...]) -> None:
    encoded = encode(value)
    assert encoded.plain
    assert encoded.tensors == [item for item in value if isinstance(item, Tensor)]
    assert encoded.references == [item for item in value if isinstance(item, Handle)]
    assert decode(encoded.payload, encoded.tensors, encoded.references) == value
    assert decode_loaded(encoded.payload, encoded.tensors, encoded.references) == value


def test_what_a_message_carries_for_such_a_tuple_must_all_be_in_it() -> None:
    value = (torch.ones(1), "a", Handle())
    payload = encode(value).payload
    for tensors, references in (((), value[2:]), (value[:1], ()), (value[:1] * 2, value[2:])):
        with pytest.raises(DecodeError, match="damaged"):
            decode(payload, tensors, references)


@pytest.mark.parametrize("shared", [torch.ones(2), Handle()], ids=["tensor", "reference"])
def test_what_is_given_twice_arrives_as_one_object(shared: Any) -> None:
    for value in ((shared, shared), (shared, "a", shared)):
        encoded = encode(value)
        arrived = decode(encoded.payload, encoded.tensors, encoded.references)
        assert arrived[0] is arrived[-1]


def test_a_value_for_which_no_memory_is_left_is_not_called_damaged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(_: object) -> None:
        raise MemoryError

    payload = encode(("text", 1)).payload
    monkeypatch.setattr(simple_values, "_AtomsOnly", refuse)
    with pytest.raises(DecodeError, match=f"no memory .* a value of {len(payload)} bytes"):
        decode(payload, (), ())
