"""Tensors arrive from a tensor table as they were packed, and no bytes can make it crash."""

from __future__ import annotations

import math
import random
import struct
import warnings
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd import forward_ad

from rpc.errors import EncodeError, FrameError
from rpc.wire.tensor_table import INLINE_LIMIT, pack_tensors, unpack_tensors

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
]
INTEGER_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def travel(tensor: Tensor, *, inline_limit: int = INLINE_LIMIT) -> Tensor:
    table, slots = pack_tensors([tensor], inline_limit)
    (arrived,) = unpack_tensors(table, slots).finish()
    return arrived


def bits(tensor: Tensor) -> Tensor:
    """The tensor as integers, for dtypes that torch cannot compare."""
    if tensor.dtype.is_complex:
        return torch.view_as_real(tensor.detach().resolve_conj().resolve_neg())
    return tensor.detach().clone().view(INTEGER_OF_SIZE[tensor.itemsize])


def assert_same(arrived: Tensor, sent: Tensor) -> None:
    assert arrived.dtype == sent.dtype
    assert arrived.shape == sent.shape
    assert arrived.requires_grad == sent.requires_grad
    assert torch.equal(bits(arrived), bits(sent))


def some_tensor(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.parametrize("limit", [INLINE_LIMIT, -1], ids=["inline", "slot"])
@pytest.mark.parametrize("shape", [(), (0,), (1,), (5,), (3, 4), (3, 0, 2), (2, 1, 3)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_and_shape_arrives_as_it_was(
    dtype: torch.dtype, shape: tuple[int, ...], limit: int
) -> None:
    sent = some_tensor(dtype, *shape)
    arrived = travel(sent, inline_limit=limit)
    assert_same(arrived, sent)
    assert arrived.is_contiguous()


def test_half_precision_complex_arrives_as_it_was() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sent = torch.tensor([1 + 2j, -3j], dtype=torch.complex64).to(torch.complex32)
    arrived = travel(sent)
    assert arrived.dtype == torch.complex32
    assert torch.equal(torch.view_as_real(arrived), torch.view_as_real(sent))


@pytest.mark.parametrize("limit", [INLINE_LIMIT, -1], ids=["inline", "slot"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool], ids=str)
def test_order_of_dimensions_in_memory_survives(dtype: torch.dtype, limit: int) -> None:
    image = some_tensor(dtype, 2, 3, 4, 5)
    for sent in (
        image[0, 0].t(),
        image.to(memory_format=torch.channels_last),
        image.permute(3, 1, 0, 2),
    ):
        arrived = travel(sent, inline_limit=limit)
        assert_same(arrived, sent)
        assert arrived.stride() == sent.stride()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool], ids=str)
@pytest.mark.parametrize("limit", [INLINE_LIMIT, -1], ids=["inline", "slot"])
@pytest.mark.parametrize("shape", [(2, 1, 4, 4), (2, 3, 1, 1), (0, 3, 4, 4), (1, 1, 1, 1)], ids=str)
def test_the_memory_format_of_an_image_survives_whatever_its_size(
    shape: tuple[int, ...], limit: int, dtype: torch.dtype
) -> None:
    sent = some_tensor(dtype, *shape).to(memory_format=torch.channels_last)
    arrived = travel(sent, inline_limit=limit)
    assert_same(arrived, sent)
    assert arrived.stride() == sent.stride()
    assert arrived.is_contiguous(memory_format=torch.channels_last)


def test_the_order_of_dimensions_survives_where_there_are_no_elements() -> None:
    assert travel(torch.empty(0, 5).t()).stride() == (1, 5)
    for contiguous in (torch.empty(0, 3), torch.empty(2, 0, 3, dtype=torch.bfloat16)):
        assert travel(contiguous).stride() == contiguous.stride()
    assert travel(torch.empty(4, 6)[:, :0]).shape == (4, 0)


def test_an_ordinary_tensor_has_no_strides_in_its_table() -> None:
    for shape in ((3, 1), (1, 3), (0, 3), (2, 3), (1,), ()):
        table, _ = pack_tensors([torch.ones(shape)])
        assert len(table) == 4 + 3 + 8 * len(shape) + 4 * math.prod(shape)


EXPANDED = [
    torch.arange(3.0).view(3, 1).expand(3, 40),
    torch.arange(3.0).expand(20, 3),
    torch.ones(()).expand(2, 3),
    torch.arange(24.0).reshape(2, 3, 4).permute(2, 0, 1)[:, None].expand(4, 5, 2, 3),
    torch.tensor([1 + 2j]).conj().expand(4),
    torch.ones(1, dtype=torch.bfloat16).expand(5),
]


@pytest.mark.parametrize("limit", [INLINE_LIMIT, -1], ids=["inline", "slot"])
@pytest.mark.parametrize("sent", EXPANDED, ids=lambda sent: str(tuple(sent.shape)))
def test_an_expanded_tensor_arrives_as_one(sent: Tensor, limit: int) -> None:
    arrived = travel(sent, inline_limit=limit)
    assert_same(arrived, sent)
    assert arrived.stride() == sent.stride()


@pytest.mark.parametrize("limit", [INLINE_LIMIT, -1], ids=["inline", "slot"])
def test_an_expanded_tensor_sends_each_element_once(limit: int) -> None:
    sent = torch.ones(3, 1).expand(3, 10**6)
    table, slots = pack_tensors([sent, torch.ones(2)], limit)
    assert len(table) + sum(slot.nbytes for slot in slots) < 100
    arrived, after = unpack_tensors(table, slots).finish()
    assert arrived.shape == (3, 10**6)
    assert after.tolist() == [1.0, 1.0]


def test_one_element_that_is_shown_everywhere_travels_without_strides() -> None:
    table, _ = pack_tensors([torch.ones(()).expand(2, 3)])
    assert table == struct.pack("<IBBBQQf", 1, 4 | 64, 0, 2, 2, 3, 1.0)


@given(st.lists(st.integers(0, 3), max_size=4), st.sampled_from(DTYPES), st.data(), st.booleans())
def test_a_tensor_with_any_strides_arrives_with_elements_equal(
    shape: list[int], dtype: torch.dtype, data: st.DataObject, inline: bool
) -> None:
    strides = [data.draw(st.sampled_from([0, 0, 1, 2, 3, 9])) for _ in shape]
    # The last element of four dimensions lies at 4 * 2 * 9 + 3.
    sent = some_tensor(dtype, 76).as_strided(shape, strides, data.draw(st.integers(0, 3)))
    if data.draw(st.booleans()) and dtype.is_complex:
        sent = sent.conj()
    arrived = travel(sent, inline_limit=INLINE_LIMIT if inline else -1)
    assert_same(arrived, sent)
    table, slots = pack_tensors([sent, torch.ones(2)], INLINE_LIMIT if inline else -1)
    again, after = unpack_tensors(table, slots).finish()
    assert again.stride() == arrived.stride()
    assert after.tolist() == [1.0, 1.0]


def test_an_expanded_tensor_may_require_grad_or_be_a_parameter() -> None:
    leaf = torch.ones(1).expand(3).requires_grad_()
    assert travel(leaf).requires_grad
    assert isinstance(travel(nn.Parameter(leaf)), nn.Parameter)


@pytest.mark.parametrize("limit", [INLINE_LIMIT, -1], ids=["inline", "slot"])
def test_a_view_sends_only_the_elements_it_shows(limit: int) -> None:
    base = torch.arange(1000.0).reshape(10, 100)
    for view in (base[:, ::7], base[2:5, 3:6], base.t()[::3], base[0].expand(4, 100), base[7]):
        table, slots = pack_tensors([view], limit)
        visible = view.numel() * 4
        assert len(table) + sum(slot.nbytes for slot in slots) < visible + 64
        assert_same(unpack_tensors(table, slots).finish()[0], view)


def test_a_dense_tensor_enters_its_slot_without_a_copy() -> None:
    base = torch.zeros(64, 64)
    for sent in (base, base.t(), base[3], base[8:16]):
        _, (slot,) = pack_tensors([sent], 0)
        assert slot.data_ptr() == sent.data_ptr()
        assert slot.stride() == sent.stride()


def test_slots_are_detached_from_the_graph() -> None:
    leaf = torch.ones(20_000, requires_grad=True)
    _, (first, second) = pack_tensors([leaf, leaf * 2])
    assert first.grad_fn is None
    assert not first.requires_grad
    assert not second.requires_grad


def test_packing_leaves_the_tensor_resizable() -> None:
    sent = torch.ones(4)
    pack_tensors([sent])
    sent.resize_(100)
    assert sent.shape == (100,)


def test_pending_conjugation_and_negation_are_carried_out() -> None:
    sent = torch.tensor([1 + 2j, 3 - 4j]).conj()
    assert sent.is_conj()
    assert torch.equal(travel(sent), torch.tensor([1 - 2j, 3 + 4j]))
    assert torch.equal(travel(sent, inline_limit=-1), torch.tensor([1 - 2j, 3 + 4j]))
    assert sent.imag.is_neg()
    assert travel(sent.imag).tolist() == [-2.0, 4.0]
    assert travel(sent.imag, inline_limit=-1).tolist() == [-2.0, 4.0]


@pytest.mark.parametrize("limit", [INLINE_LIMIT, -1], ids=["inline", "slot"])
@pytest.mark.parametrize("shape", [(), (5,), (0,), (2, 3)], ids=str)
def test_zeros_without_memory_arrive_as_zeros(shape: tuple[int, ...], limit: int) -> None:
    """Autograd makes such where a gradient is known to be zero."""
    zeros = torch._efficientzerotensor(shape, dtype=torch.complex64)
    for sent in (zeros, zeros.t() if zeros.ndim == 2 else zeros, zeros.real):
        arrived = travel(sent, inline_limit=limit)
        assert not arrived._is_zerotensor()
        assert torch.equal(arrived, torch.zeros(sent.shape, dtype=sent.dtype))


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0, 2)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_empty_tensors_arrive_with_the_strides_that_torch_gives_them(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    sent = torch.empty(shape, dtype=dtype)
    assert travel(sent).stride() == sent.stride()


@pytest.mark.parametrize("left", [0, 1, 4, 7])
@pytest.mark.parametrize(
    "freed",
    [
        lambda: torch.ones(1000),
        lambda: torch.ones(100_000),
        lambda: torch.ones(10)[8:],
        lambda: torch.ones(100, 100).t(),
        lambda: torch.ones(1000, 300)[:, ::2],
        lambda: torch.ones(2).expand(3, 2),
        lambda: torch.ones(1, 100),
        lambda: torch.ones(100, requires_grad=True),
        lambda: nn.Parameter(torch.ones(100_000)),
        lambda: torch.ones(4, dtype=torch.complex64).conj(),
    ],
)
@pytest.mark.parametrize("limit", [-1, INLINE_LIMIT])
def test_elements_whose_storage_was_freed_are_refused(
    freed: Callable[[], Tensor], left: int, limit: int
) -> None:
    tensor = freed()
    if left >= 4 and not any(tensor.stride()):
        pytest.skip("the one element that it shows again and again is still there")
    tensor.untyped_storage().resize_(left)
    with pytest.raises(EncodeError, match=rf"storage was freed, or shrunk to {left} of the \d+ by"):
        pack_tensors([torch.ones(2), tensor], limit)


@pytest.mark.parametrize("limit", [-1, INLINE_LIMIT])
@pytest.mark.parametrize(
    "last",
    [
        lambda storage: storage,
        lambda storage: storage[90:],
        lambda storage: storage[99],
        lambda storage: storage.view(10, 10).t(),
        lambda storage: storage.view(10, 10)[:, ::3],
        lambda storage: storage.view(1, 100),
        lambda storage: storage[99:].expand(5),
        lambda storage: storage.view(10, 10)[9].expand(3, 10),
        lambda storage: storage.view(torch.complex64).conj(),
    ],
)
def test_a_storage_is_needed_up_to_the_last_element_that_is_shown(
    last: Callable[[Tensor], Tensor], limit: int
) -> None:
    storage = torch.arange(100.0)
    shown = last(storage)
    expected = shown.clone()
    assert torch.equal(travel(shown, inline_limit=limit), expected)
    storage.untyped_storage().resize_(399)
    with pytest.raises(EncodeError, match="storage was freed, or shrunk to 399 of the 400 bytes"):
        pack_tensors([torch.ones(2), shown], limit)


@pytest.mark.parametrize("limit", [-1, INLINE_LIMIT])
def test_no_elements_need_no_storage(limit: int) -> None:
    tensor = torch.ones(3)[3:]
    tensor.untyped_storage().resize_(0)
    assert travel(tensor, inline_limit=limit).shape == (0,)


@pytest.mark.parametrize("limit", [-1, INLINE_LIMIT])
@pytest.mark.parametrize(
    "transform",
    [
        lambda pack: torch.func.vmap(pack)(torch.ones(2, 3)),
        lambda pack: torch.func.grad(pack)(torch.ones(3)),
        lambda pack: torch.func.functionalize(pack)(torch.ones(3)),
    ],
)
def test_what_a_transform_of_functions_hands_out_is_refused(
    transform: Callable[[Callable[[Tensor], object]], object], limit: int
) -> None:
    with pytest.raises(EncodeError, match="cannot be sent"):
        transform(lambda tensor: pack_tensors([tensor], limit))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch uses it there
@pytest.mark.parametrize("limit", [INLINE_LIMIT, -1], ids=["inline", "slot"])
def test_a_dual_tensor_is_refused_while_its_tangent_means_something(limit: int) -> None:
    with forward_ad.dual_level():  # type: ignore[no-untyped-call]
        primal, tangent = torch.ones(3), torch.full((3,), 2.0)
        dual = forward_ad.make_dual(primal, tangent)  # type: ignore[no-untyped-call]
        with pytest.raises(EncodeError, match=r"a dual tensor of shape \(3,\) cannot be sent: its"):
            pack_tensors((torch.ones(2, dtype=torch.int64), dual), limit)
        halves = forward_ad.unpack_dual(dual)  # type: ignore[no-untyped-call]
        table, slots = pack_tensors((*halves, torch.ones(2, dtype=torch.int64)), limit)
    assert unpack_tensors(table, slots).tensors[1].equal(tangent)
    assert pack_tensors((dual,), limit)[0]


def test_the_limit_separates_inline_tensors_from_slots() -> None:
    small, large = torch.zeros(INLINE_LIMIT // 4), torch.zeros(INLINE_LIMIT // 4 + 1)
    _, slots = pack_tensors([small, large])
    assert [slot.numel() for slot in slots] == [large.numel()]


@pytest.mark.interpreted
def test_what_is_too_much_for_one_header_gets_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rpc.wire.tensor_table._INLINE_IN_ALL", 100)
    sent = [torch.full((10,), float(number)) for number in range(4)]
    table, slots = pack_tensors(sent)
    assert [slot.tolist() for slot in slots] == [[2.0] * 10, [3.0] * 10]
    arrived = unpack_tensors(table, slots).finish()
    assert [tensor.tolist() for tensor in arrived] == [tensor.tolist() for tensor in sent]


def test_tensors_on_other_devices_never_become_bytes() -> None:
    elsewhere = torch.empty(3, device="meta")
    _, (slot,) = pack_tensors([elsewhere])
    assert slot.is_meta


def test_inline_and_slot_tensors_keep_their_order() -> None:
    sent = [torch.full((size,), float(size)) for size in (1, 5000, 2, 6000, 3)]
    table, slots = pack_tensors(sent)
    arrived = unpack_tensors(table, slots).finish()
    assert [tensor.numel() for tensor in arrived] == [1, 5000, 2, 6000, 3]


def test_no_tensors_make_an_empty_table() -> None:
    table, slots = pack_tensors([])
    assert slots == ()
    assert unpack_tensors(table, ()).finish() == []


def test_a_table_is_read_from_any_kind_of_buffer() -> None:
    table, _ = pack_tensors([torch.ones(2)])
    for buffer in (bytearray(table), memoryview(bytearray(table))):
        assert unpack_tensors(buffer, ()).tensors[0].tolist() == [1.0, 1.0]


def test_inline_tensors_own_writable_memory() -> None:
    table, _ = pack_tensors([torch.zeros(2), torch.zeros(2)])
    buffer = bytearray(table)
    first, second = unpack_tensors(buffer, ()).finish()
    buffer[:] = b"\xff" * len(buffer)
    first.fill_(7)
    assert second.tolist() == [0.0, 0.0]
    assert pack_tensors([second, second])[0] == table


@pytest.mark.parametrize("limit", [INLINE_LIMIT, -1], ids=["inline", "slot"])
def test_parameters_and_requires_grad_survive(limit: int) -> None:
    for sent in (
        torch.ones(3, requires_grad=True),
        nn.Parameter(torch.ones(3)),
        nn.Parameter(torch.ones(3, dtype=torch.int64), requires_grad=False),
        torch.ones(3),
    ):
        arrived = travel(sent, inline_limit=limit)
        assert_same(arrived, sent)
        assert type(arrived) is type(sent)
        assert arrived.is_leaf


def test_tensors_are_plain_until_finished() -> None:
    sent = [torch.ones(1), nn.Parameter(torch.ones(1)), torch.ones(1, requires_grad=True)]
    unpacked = unpack_tensors(*pack_tensors(sent))
    assert [type(tensor) for tensor in unpacked.tensors] == [Tensor] * 3
    assert not any(tensor.requires_grad for tensor in unpacked.tensors)
    assert unpacked.requiring_grad == [1, 2]
    assert unpacked.parameters == [1]


def test_a_tensor_that_joined_a_graph_stays_in_it_and_passes_for_a_parameter() -> None:
    unpacked = unpack_tensors(*pack_tensors([nn.Parameter(torch.ones(1))]))
    source = torch.ones(1, requires_grad=True)
    unpacked.tensors[0] = source * 2
    (arrived,) = unpacked.finish()
    assert isinstance(arrived, nn.Parameter)
    arrived.sum().backward()
    assert source.grad is not None
    assert source.grad.item() == 2.0


def test_a_strided_table_of_many_dimensions_survives() -> None:
    sent = torch.ones([1] * 40 + [3])
    assert travel(sent).shape == sent.shape


def coo(*, coalesced: bool = False) -> Tensor:
    tensor = torch.sparse_coo_tensor([[0, 2, 0], [1, 1, 1]], [1.0, 2.0, 4.0], (3, 2))
    return (tensor.coalesce() if coalesced else tensor).requires_grad_()


@pytest.mark.parametrize("coalesced", [True, False])
@pytest.mark.parametrize("limit", [0, INLINE_LIMIT])
def test_a_sparse_tensor_that_requires_grad_arrives_entry_by_entry(
    coalesced: bool, limit: int
) -> None:
    sent = [torch.ones(2), coo(coalesced=coalesced), nn.Parameter(coo().detach()), torch.ones(3)]
    table, slots = pack_tensors(sent, limit)
    assert all(slot.layout is torch.strided and not slot.requires_grad for slot in slots)
    arrived = unpack_tensors(table, slots).finish()
    assert [type(tensor) for tensor in arrived] == [Tensor, Tensor, nn.Parameter, Tensor]
    assert arrived[1].is_coalesced() is coalesced
    for tensor, original in zip(arrived[1:3], sent[1:3], strict=True):
        assert tensor.requires_grad
        assert tensor.is_leaf
        assert tensor.shape == original.shape
        assert torch.equal(tensor.detach()._indices(), original.detach()._indices())
        assert torch.equal(tensor.detach()._values(), original.detach()._values())
    assert arrived[3].tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("limit", [INLINE_LIMIT, -1], ids=["inline", "slot"])
def test_the_values_of_a_sparse_tensor_may_be_expanded(limit: int) -> None:
    values = torch.ones(2, 1).expand(2, 3)
    for shown in (values, values[:1, :1].expand(2, 3)):
        sent = torch.sparse_coo_tensor([[0, 2]], shown, (3, 3), check_invariants=True)
        arrived = travel(sent.requires_grad_(), inline_limit=limit)
        assert torch.equal(arrived.detach().to_dense(), sent.detach().to_dense())


def test_a_cut_off_sparse_tensor_is_refused_at_every_length() -> None:
    table, _ = pack_tensors([coo()])
    for length in range(len(table)):
        with pytest.raises(FrameError):
            unpack_tensors(table[:length], ())


def test_what_cannot_be_a_sparse_tensor_is_refused() -> None:
    table, (indices, values) = pack_tensors([coo()], 0)
    parts = len(table) - struct.calcsize("<IBB")
    for slots in ((values, indices), (indices + 9, values), (indices, values[:1])):
        with pytest.raises(FrameError):
            unpack_tensors(table, slots)
    for damage in ({parts: 1}, {4: 1 | 16 | 8}, {4: 1 | 32}, {5: 200}, {len(table) - 1: 17}):
        damaged = bytearray(table)
        for place, byte in damage.items():
            damaged[place] = byte
        with pytest.raises(FrameError):
            unpack_tensors(damaged, (indices, values))


def test_cut_off_tables_are_refused_at_every_length() -> None:
    sent = [
        torch.ones(2, 3).t(),
        torch.ones(4, dtype=torch.bfloat16),
        torch.ones(2).expand(3, 2),
        torch.ones(()).expand(3),
    ]
    table, _ = pack_tensors(sent)
    for length in range(len(table)):
        with pytest.raises(FrameError):
            unpack_tensors(table[:length], ())


@pytest.mark.parametrize(
    "table",
    [
        pytest.param(struct.pack("<I", 2**32 - 1), id="count without entries"),
        pytest.param(struct.pack("<IB", 1, 0), id="slot that is not there"),
        pytest.param(struct.pack("<IBB", 0, 4, 0), id="bytes behind the end"),
        pytest.param(struct.pack("<IBBB", 1, 4, 250, 0), id="unknown dtype"),
        pytest.param(struct.pack("<IBBB", 1, 4, 0, 200), id="too many dimensions"),
        pytest.param(struct.pack("<IBBBq", 1, 4, 0, 1, 2**60), id="huge"),
        pytest.param(struct.pack("<IBBBq", 1, 4, 0, 1, -1), id="negative"),
        pytest.param(struct.pack("<IBBBqq", 1, 4, 0, 2, -1, -1), id="product of negatives"),
        pytest.param(struct.pack("<IBBBqqq", 1, 4, 0, 3, 2**62, 4, 0), id="overflowing empty"),
        pytest.param(struct.pack("<IBBBqq4x", 1, 12, 0, 1, 1, 2**62)[:-4], id="no data"),
        pytest.param(struct.pack("<IBBBqq8x", 1, 12, 0, 1, 2, 0), id="overlapping"),
        pytest.param(struct.pack("<IBBBqq8x", 1, 12, 0, 1, 2, 9), id="gaps"),
        pytest.param(struct.pack("<IBBBqq8x", 1, 12, 0, 1, 2, -1), id="backwards"),
        pytest.param(struct.pack("<IBBB8x", 1, 5, 4, 0), id="integer that requires grad"),
        pytest.param(struct.pack("<IBBB4x", 1, 0x84, 0, 0), id="unknown flag"),
        pytest.param(struct.pack("<IBBqIBBB4x", 1, 64, 1, 3, 1, 4, 0, 0), id="more dimensions"),
        pytest.param(struct.pack("<IBBIBBB4x", 1, 64, 0, 1, 64, 0, 0), id="expanded twice"),
        pytest.param(struct.pack("<IBBqI", 1, 64, 1, 3, 0), id="expanded nothing"),
        pytest.param(struct.pack("<IBBBq3x", 1, 68, 0, 1, 3), id="one element, cut off"),
        pytest.param(struct.pack("<IBBBq3x", 1, 68, 0, 1, 0), id="one element, cut off and hidden"),
        pytest.param(struct.pack("<IBBBqq4x", 1, 68, 0, 2, 2**40, 2**40), id="one, too often"),
        pytest.param(struct.pack("<IBBBqq4x", 1, 76, 0, 1, 3, 0), id="one element with strides"),
        pytest.param(struct.pack("<IBBqIBBBq4x", 1, 64, 1, -1, 1, 4, 0, 1, 1), id="expanded by -1"),
        pytest.param(struct.pack("<IBBqIBBBq8x", 1, 64, 1, 3, 1, 4, 0, 1, 2), id="2 expanded to 3"),
    ],
)
def test_malformed_tables_are_refused(table: bytes) -> None:
    with pytest.raises(FrameError):
        unpack_tensors(table, ())


def test_slots_that_the_table_does_not_name_are_refused() -> None:
    table, slots = pack_tensors([torch.ones(5000)])
    with pytest.raises(FrameError):
        unpack_tensors(table, (*slots, torch.ones(1)))


@given(st.integers(0, 2**32), st.integers(1, 6))
def test_damaged_tables_raise_frame_errors_or_give_tensors(seed: int, damages: int) -> None:
    rng = random.Random(seed)
    expanded = torch.ones(2, 1).expand(2, 3)
    one = torch.ones(()).expand(3)
    sent = [torch.ones(2, 3).t(), torch.ones(2, requires_grad=True), coo(), expanded, one]
    table, _ = pack_tensors(sent)
    damaged = bytearray(table)
    for _ in range(damages):
        damaged[rng.randrange(len(damaged))] = rng.randrange(256)
    try:
        arrived = unpack_tensors(damaged, ()).finish()
    except FrameError:
        return
    dense = [tensor.untyped_storage() for tensor in arrived if not tensor.is_sparse]
    assert sum(storage.nbytes() for storage in dense) < len(table)


@given(
    st.lists(st.integers(0, 4), max_size=4), st.sampled_from(DTYPES), st.randoms(), st.booleans()
)
def test_permuted_and_sliced_tensors_arrive_equal(
    shape: list[int], dtype: torch.dtype, rng: random.Random, inline: bool
) -> None:
    sent = some_tensor(dtype, *shape).permute(rng.sample(range(len(shape)), len(shape)))
    if sent.dim() and rng.random() < 0.5:
        sent = sent[..., :: rng.randint(1, 3)]
    assert_same(travel(sent, inline_limit=INLINE_LIMIT if inline else -1), sent)
