"""The table of a frame: what is packed is found again, what cannot be is refused."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rpc.errors import EncodeError, FrameError
from rpc.transports.host.frame_table import (
    HOST_PLACEMENTS,
    Item,
    Look,
    Placement,
    Source,
    join_rows,
    look_at,
    payload_row,
    source_of_payload,
    tensor_over,
    tensor_row,
    unpack_table,
)

PAYLOAD = Item(Placement.INLINE, 0, 0, 10, None, (), (), "")
MATRIX = Item(Placement.SHARED, 3, 4096, 24, torch.float32, (2, 3), (3, 1), "")


def row_of(item: Item) -> bytes:
    place, segment, position, nbytes, dtype, shape, strides, device = item
    if dtype is None:
        return payload_row(place, segment, position, nbytes)
    code = look_at(torch.zeros(16, dtype=torch.uint8).view(dtype)).code
    return tensor_row(place, segment, position, Look(code, shape, strides, nbytes), device)


def pack_table(items: list[Item]) -> bytes:
    return join_rows([row_of(item) for item in items])


@st.composite
def dense_items(draw: st.DrawFn) -> Item:
    """A tensor row whose strides are a permutation of contiguous ones."""
    shape = draw(st.lists(st.integers(0, 5), max_size=4))
    order = draw(st.permutations(range(len(shape))))
    strides, step = [0] * len(shape), 1
    for dimension in order:
        strides[dimension] = step
        step *= max(1, shape[dimension])
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.bool, torch.complex128]))
    count = torch.Size(shape).numel()
    place = draw(st.sampled_from(HOST_PLACEMENTS[1:]))
    nbytes = count * dtype.itemsize
    device = draw(st.sampled_from(["", "cuda:1"]))
    segment, position = draw(st.integers(0, 2**32 - 1)), draw(st.integers(0, 2**63))
    return Item(place, segment, position, nbytes, dtype, tuple(shape), tuple(strides), device)


@given(st.lists(dense_items(), max_size=6))
def test_a_table_says_what_was_packed(tensors: list[Item]) -> None:
    items = [PAYLOAD, *tensors]
    assert unpack_table(pack_table(items), 10, 1 << 40) == items


@given(st.binary(max_size=200))
def test_random_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(FrameError):
        unpack_table(data, 1000, 1 << 30)


@given(st.data())
def test_flipped_bits_are_refused_or_describe_something_possible(data: st.DataObject) -> None:
    table = bytearray(pack_table([PAYLOAD, MATRIX, MATRIX._replace(device="cuda:0")]))
    for bit in data.draw(st.lists(st.integers(0, 8 * len(table) - 1), min_size=1, max_size=4)):
        table[bit // 8] ^= 1 << bit % 8
    try:
        items = unpack_table(bytes(table), 10, 1 << 20)
    except FrameError:
        return
    assert sum(item.nbytes for item in items) <= 1 << 20


@pytest.mark.parametrize(
    "wrong",
    [
        [],
        [MATRIX],
        [PAYLOAD, PAYLOAD],
        [PAYLOAD._replace(nbytes=11)],
        [PAYLOAD._replace(position=1)],
        [PAYLOAD, MATRIX._replace(nbytes=23)],
        [PAYLOAD, MATRIX._replace(strides=(3, 2))],
        [PAYLOAD, MATRIX._replace(strides=(0, 1))],
        [PAYLOAD, MATRIX._replace(strides=(-3, 1))],
        [PAYLOAD, MATRIX._replace(shape=(-2, -3))],
        [PAYLOAD, MATRIX._replace(shape=(2**40, 2**40), nbytes=4 * 2**80 % 2**63)],
        [PAYLOAD._replace(place=Placement.STREAM, nbytes=1 << 41)],
    ],
)
def test_what_cannot_be_is_refused(wrong: list[Item]) -> None:
    with pytest.raises(FrameError):
        unpack_table(pack_table(wrong), 10, 1 << 40)


LENT = MATRIX._replace(place=Placement.LENT, segment=4, position=6, device="cuda:0")


def test_lent_memory_has_its_handle_in_the_frame_and_belongs_on_a_device() -> None:
    items = [PAYLOAD._replace(nbytes=6), LENT]
    assert unpack_table(pack_table(items), 10, 100, tuple(Placement)) == items
    for wrong in (
        LENT._replace(segment=5),
        LENT._replace(position=7),
        LENT._replace(device=""),
        LENT._replace(nbytes=23),
    ):
        with pytest.raises(FrameError):
            unpack_table(pack_table([PAYLOAD, wrong]), 10, 100, tuple(Placement))
    with pytest.raises(FrameError, match="place 3"):
        unpack_table(pack_table(items), 10, 100)
    with pytest.raises(FrameError):
        unpack_table(
            pack_table([PAYLOAD._replace(place=Placement.LENT)]), 10, 100, tuple(Placement)
        )


def test_the_bytes_after_a_table_are_refused() -> None:
    with pytest.raises(FrameError, match="wrong length"):
        unpack_table(pack_table([PAYLOAD]) + b"x", 10, 100)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(3, 4)[:, :2],
        torch.zeros(3).expand(2, 3),
        torch.zeros(2, 2, dtype=torch.complex64).conj(),
        torch.eye(2).to_sparse(),
        torch.ones([1] * 65),
    ],
    ids=["gaps", "overlap", "conjugate", "sparse", "dimensions"],
)
def test_tensors_that_are_not_plain_and_dense_are_refused(tensor: torch.Tensor) -> None:
    with pytest.raises(EncodeError):
        look_at(tensor)


def test_a_source_is_the_memory_itself() -> None:
    tensor = torch.arange(4, dtype=torch.int16).reshape(2, 2).t()
    assert bytes(Source(tensor.data_ptr(), tensor.nbytes, tensor).view()) == bytes(
        [0, 0, 1, 0, 2, 0, 3, 0]
    )
    view = Source(tensor.data_ptr(), tensor.nbytes, tensor).view()
    view[0] = 9
    assert tensor[0, 0] == 9
    assert bytes(source_of_payload(memoryview(b"abcd").cast("H")).view()) == b"abcd"


def test_a_tensor_over_memory_shares_it() -> None:
    memory = bytearray(40)
    found = tensor_over(memory, MATRIX._replace(strides=(1, 2)), 16)
    found.fill_(1.0)
    assert found.stride() == (1, 2)
    assert bytes(memory) == bytes(16) + b"\x00\x00\x80\x3f" * 6


QUANTIZED = {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4}
DTYPES = {d for d in vars(torch).values() if isinstance(d, torch.dtype)} - QUANTIZED


@pytest.mark.parametrize("dtype", sorted(DTYPES, key=str), ids=str)
def test_a_tensor_of_every_dtype_travels(dtype: torch.dtype) -> None:
    sent = torch.arange(96, dtype=torch.uint8).view(2, 48).view(dtype)
    look = look_at(sent)
    row = Item(Placement.INLINE, 0, 0, look.nbytes, dtype, look.shape, look.strides, "")
    table = pack_table([PAYLOAD._replace(nbytes=0), row])
    _, found = unpack_table(table, 96, 96)
    arrived = tensor_over(bytearray(range(96)), found)
    assert (arrived.dtype, arrived.shape) == (dtype, sent.shape)
    assert arrived.view(torch.uint8).flatten().tolist() == list(range(96))


@pytest.mark.parametrize("shape", [(6,), (2, 3), ()])
def test_a_tensor_over_memory_is_no_view(shape: tuple[int, ...]) -> None:
    size = 4 * math.prod(shape)
    strides = torch.empty(shape).stride()
    found = tensor_over(bytearray(40), MATRIX._replace(nbytes=size, shape=shape, strides=strides))
    assert not found._is_view()
    assert found.detach_() is found


def test_a_tensor_over_memory_cannot_be_resized() -> None:
    row = MATRIX._replace(nbytes=40, shape=(10,), strides=(1,))
    with pytest.raises(RuntimeError, match="not resizable"):
        tensor_over(bytearray(40), row).resize_(20)
