"""Values that need no pickler of ours arrive the same, and say so where they are damaged."""

from __future__ import annotations

import contextlib
import pickle
import random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from rpc.errors import DecodeError
from rpc.wire import simple_values
from rpc.wire.codec import decode, decode_loaded, encode
from rpc.wire.handles import OutOfBandHandle


class Handle(OutOfBandHandle):
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
            st.integers(-(2**64), 2**64),
            st.floats(allow_nan=False),
            st.text(st.characters(exclude_categories=[]), max_size=9),
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
        with pytest.raises(DecodeError, match="damaged") as refused:
            decode(payload, tensors, references)
        assert isinstance(refused.value.__cause__, StopIteration | ValueError)


@pytest.mark.parametrize("shared", [torch.ones(2), Handle()], ids=["tensor", "reference"])
def test_what_is_given_twice_arrives_as_one_object(shared: Any) -> None:
    for value in ((shared, shared), (shared, "a", shared)):
        encoded = encode(value)
        arrived = decode(encoded.payload, encoded.tensors, encoded.references)
        assert arrived[0] is arrived[-1]


MIXED = (torch.ones(1), "text", b"bytes", Handle(), 7, 2.5, None, True, False)


@pytest.mark.parametrize("wrap", [bytes, bytearray, memoryview])
def test_a_value_is_read_from_any_kind_of_buffer(wrap: Any) -> None:
    for value in (MIXED, MIXED[4:], "text", None, ()):
        encoded = encode(value)
        assert decode(wrap(encoded.payload), encoded.tensors, encoded.references) == value


def test_a_mixed_tuple_that_is_cut_off_is_refused_at_every_length() -> None:
    encoded = encode(MIXED)
    for length in range(1, len(encoded.payload)):
        with pytest.raises(DecodeError):
            decode(encoded.payload[:length], encoded.tensors, encoded.references)


@given(st.integers(0, 2**32), st.integers(1, 4), st.sampled_from([MIXED, MIXED[4:], MIXED[1]]))
def test_damaged_values_are_refused_or_give_others(seed: int, damages: int, value: Any) -> None:
    rng = random.Random(seed)
    encoded = encode(value)
    damaged = bytearray(encoded.payload)
    for _ in range(damages):
        damaged[rng.randrange(1, len(damaged))] = rng.randrange(256)
    with contextlib.suppress(DecodeError):
        decode(damaged, encoded.tensors, encoded.references)


@pytest.mark.parametrize("value", [print, (1, len), [1]])
def test_what_is_no_atom_is_not_taken_for_one(value: Any) -> None:
    with pytest.raises(DecodeError, match="damaged"):
        decode(b"a" + pickle.dumps(value), (), ())


@pytest.mark.parametrize("value", [None, True, 2.5, "é", b"x", 3, -(2**70), 2**8000])
def test_a_small_constant_has_a_payload_of_its_own(value: Any) -> None:
    payload = simple_values.encode_constant(value)
    assert payload
    assert decode(payload, (), ()) == value


@pytest.mark.parametrize("value", ["x" * 1025, b"x" * 1025, 2**8193, (), [1], torch.ones(1)])
def test_what_is_large_or_may_change_is_no_small_constant(value: Any) -> None:
    assert simple_values.encode_constant(value) == b""


def test_a_value_for_which_no_memory_is_left_is_not_called_damaged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(_: object) -> None:
        raise MemoryError

    payload = encode(("text", 1)).payload
    monkeypatch.setattr(simple_values.pickle, "loads", refuse)
    with pytest.raises(DecodeError, match=f"no memory .* a value of {len(payload)} bytes"):
        decode(payload, (), ())
