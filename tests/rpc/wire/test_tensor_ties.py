"""Tensors of one message that show the same memory do so where they arrive."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd import forward_ad

from rpc.errors import EncodeError, FrameError
from rpc.testing import local_group
from rpc.wire.tensor_table import INLINE_LIMIT, pack_tensors, pack_tied_tensors, unpack_tensors

ELEMENTS = 24
LIMITS = pytest.mark.parametrize("limit", [INLINE_LIMIT, -1], ids=["inline", "slots"])


def travel(tensors: Sequence[Tensor], limit: int = INLINE_LIMIT) -> list[Tensor]:
    table, slots = pack_tied_tensors(tensors, limit)
    return unpack_tensors(table, [slot.clone() for slot in slots]).finish()


def size_of(packed: tuple[bytes, tuple[Tensor, ...]]) -> int:
    table, slots = packed
    return len(table) + sum(slot.nbytes for slot in slots)


@LIMITS
@pytest.mark.parametrize(
    "view",
    [
        torch.detach,
        lambda x: x.data,
        lambda x: x.view(2, 3, 4),
        lambda x: x.view(4, 6).t(),
        lambda x: x[3:20],
        lambda x: x[::2],
        lambda x: x.view(torch.int32),
        lambda x: x[:1].expand(5),
        lambda x: x[7],
    ],
)
def test_who_changes_one_changes_the_other(view: Callable[[Tensor], Tensor], limit: int) -> None:
    here = torch.arange(1.0, ELEMENTS + 1)
    for sent in ([here, view(here)], [view(here), here]):
        arrived = travel(sent, limit)
        for there, one in zip(arrived, sent, strict=True):
            assert torch.equal(there, one)
            assert there.stride() == one.stride()
        arrived[0].zero_()
        twin = torch.arange(1.0, ELEMENTS + 1)
        twins = [twin, view(twin)] if sent[0] is here else [view(twin), twin]
        twins[0].zero_()
        assert torch.equal(arrived[1], twins[1])
        assert not torch.equal(arrived[1], sent[1])


def views(draw: st.DrawFn, memory: Tensor) -> list[Tensor]:
    """Some windows of a storage, in any order."""
    found = []
    for _ in range(draw(st.integers(2, 5))):
        start = draw(st.integers(0, ELEMENTS - 1))
        window = memory[start : draw(st.integers(start + 1, ELEMENTS)) : draw(st.integers(1, 3))]
        if len(window) % 2 == 0 and draw(st.booleans()):
            window = window.view(2, -1).t()
        found.append(window)
    return found


@given(st.data(), st.sampled_from([INLINE_LIMIT, -1]))
def test_any_windows_arrive_with_their_values_and_no_more_bytes_than_apart(
    data: st.DataObject, limit: int
) -> None:
    sent = views(data.draw, torch.arange(float(ELEMENTS)))
    for there, here in zip(travel(sent, limit), sent, strict=True):
        assert torch.equal(there, here)
    heads = 200 * len(sent)
    assert size_of(pack_tied_tensors(sent, limit)) <= size_of(pack_tensors(sent, limit)) + heads


@given(st.data())
def test_only_those_are_tied_that_common_elements_connect(data: st.DataObject) -> None:
    sent = views(data.draw, torch.arange(float(ELEMENTS)))
    arrived = travel(sent)
    connected = [{number} for number in range(len(sent))]
    for first, second in itertools.combinations(range(len(sent)), 2):
        if np.shares_memory(sent[first].numpy(), sent[second].numpy()):
            union = connected[first] | connected[second]
            for each in union:
                connected[each] = union
    for first, second in itertools.combinations(range(len(sent)), 2):
        if np.shares_memory(arrived[first].numpy(), arrived[second].numpy()):
            assert np.shares_memory(sent[first].numpy(), sent[second].numpy())
        elif arrived[first].untyped_storage()._cdata == arrived[second].untyped_storage()._cdata:
            assert second in connected[first]


@given(st.data())
def test_what_overlaps_without_gaps_stays_tied(data: st.DataObject) -> None:
    memory = torch.zeros(ELEMENTS)
    middle = data.draw(st.integers(1, ELEMENTS - 1))
    first, second = travel([memory[: middle + 1], memory[middle - 1 :]])
    first.fill_(1)
    assert second.sum() == 2


def test_views_that_lie_apart_are_sent_apart() -> None:
    memory = torch.zeros(2, 100_000)
    first, second = travel([memory[0], memory[1]])
    assert first.untyped_storage().data_ptr() != second.untyped_storage().data_ptr()


@pytest.mark.parametrize(
    "views",
    [
        lambda x: x.chunk(3, -1),
        lambda x: x.unbind(1),
        lambda x: (x.view(-1)[::2], x.view(-1)[1::2]),
        lambda x: (x.view(-1)[4:], x.view(-1)[:4]),
    ],
)
def test_views_that_take_turns_in_one_memory_are_sent_apart(
    views: Callable[[Tensor], Sequence[Tensor]],
) -> None:
    sent = views(torch.arange(36.0).view(6, 6))
    for there, here in zip(travel(sent), sent, strict=True):
        assert torch.equal(there.view(-1), here.reshape(-1))
        assert there.untyped_storage().nbytes() == here.nbytes


def test_what_is_tied_among_those_that_take_turns_is_found() -> None:
    query, key, value = torch.arange(36.0).view(2, 18).chunk(3, -1)
    sent = [query, key, value, value.detach(), query.detach(), query[1]]
    twins = torch.arange(36.0).view(2, 18).chunk(3, -1)
    arrived = travel(sent)
    arrived[5].zero_()
    twins[0][1].zero_()
    arrived[3][0].fill_(7)
    twins[2][0].fill_(7)
    for there, here in zip(arrived, [*twins, twins[2], twins[0], twins[0][1]], strict=True):
        assert torch.equal(there, here)
    assert arrived[1].untyped_storage().nbytes() == key.nbytes


def test_a_view_in_its_tensor_stays_tied_beside_one_that_lies_far_out() -> None:
    memory = torch.zeros(1000)
    dense, within, far = travel([memory[:10], memory[1:9:2], memory[9::300]])
    dense.fill_(3)
    assert within.sum() == 12
    assert far.sum() == 0


def test_two_columns_do_not_drag_what_is_between_them() -> None:
    table, slots = pack_tied_tensors([(matrix := torch.zeros(100, 100))[:, 0], matrix[:, 50]])
    assert len(table) + sum(slot.nbytes for slot in slots) < 1_000


def test_what_is_sent_twice_travels_once() -> None:
    large = torch.zeros(1 << 20)
    _, slots = pack_tied_tensors([large, large.detach(), large.view(1024, 1024)])
    assert sum(slot.nbytes for slot in slots) == large.nbytes


@LIMITS
def test_a_parameter_stays_one_beside_its_data(limit: int) -> None:
    parameter = nn.Parameter(torch.zeros(3))
    arrived, data = travel([parameter, parameter.data], limit)
    assert isinstance(arrived, nn.Parameter)
    assert (arrived.requires_grad, data.requires_grad) == (True, False)
    data.fill_(2)
    assert arrived.tolist() == [2, 2, 2]


def test_others_in_between_keep_their_places() -> None:
    memory, other = torch.zeros(4), torch.arange(3)
    sparse = torch.eye(2).to_sparse().requires_grad_()
    sent = [memory, other, memory[1:], torch.empty(0), sparse, memory[:1]]
    arrived = travel(sent)
    arrived[0].fill_(5)
    assert [each.tolist() for each in (arrived[2], arrived[5])] == [[5, 5, 5], [5]]
    assert arrived[1].tolist() == [0, 1, 2]
    assert torch.equal(arrived[4].to_dense(), torch.eye(2))


def test_a_pending_conjugation_is_carried_out_on_a_copy() -> None:
    values = torch.tensor([1 + 2j, 3 - 1j])
    arrived = travel([values, values.conj()])
    assert torch.equal(arrived[0], values)
    assert torch.equal(arrived[1], values.conj().resolve_conj())


def test_shared_memory_that_was_freed_is_refused() -> None:
    memory = torch.zeros(10)
    sent = [memory, memory[2:]]
    memory.untyped_storage().resize_(8)
    with pytest.raises(EncodeError, match=r"shape \(10,\).*was freed, or shrunk to 8"):
        pack_tied_tensors(sent)


def test_a_tensor_beyond_shrunk_memory_is_refused_and_the_memory_left_alone() -> None:
    memory = torch.zeros(100)
    sent = [memory[:10], memory]
    memory.untyped_storage().resize_(200)
    with pytest.raises(EncodeError, match=r"shape \(100,\).*shrunk to 200"):
        pack_tied_tensors(sent)
    assert memory.untyped_storage().nbytes() == 200


@LIMITS
def test_autograd_notices_a_change_through_another_of_them(limit: int) -> None:
    weight = torch.ones(4, requires_grad=True)
    arrived, beside = travel([weight, weight.detach()[:2]], limit)
    loss = (arrived * arrived).sum()
    beside.mul_(10)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()  # type: ignore[no-untyped-call]


@LIMITS
def test_elements_of_several_sizes_show_memory_that_no_even_number_of_them_fills(
    limit: int,
) -> None:
    memory = torch.arange(7, dtype=torch.uint8)
    pairs = memory[:6].view(torch.bfloat16)
    arrived, there = travel([memory, pairs], limit)
    arrived.zero_()
    assert there.tolist() == [0, 0, 0]


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch uses it there
def test_a_dual_tensor_is_refused_here_as_well() -> None:
    with forward_ad.dual_level():  # type: ignore[no-untyped-call]
        primal = torch.ones(2)
        dual = forward_ad.make_dual(primal, torch.ones(2))  # type: ignore[no-untyped-call]
        with pytest.raises(EncodeError, match="tangent"):
            pack_tied_tensors([primal, dual])


MEMORY = torch.arange(6.0)


def table() -> bytes:
    return pack_tied_tensors([MEMORY, MEMORY.view(2, 3).t(), MEMORY[1:]])[0]


def test_cut_off_tables_are_refused_at_every_length() -> None:
    whole = table()
    for length in range(len(whole)):
        with pytest.raises(FrameError):
            unpack_tensors(whole[:length], ())


@given(st.integers(0, 1 << 40), st.integers(1, 4))
def test_damaged_tables_raise_frame_errors_or_give_tensors(seed: int, damages: int) -> None:
    chance = random.Random(seed)
    damaged = bytearray(table())
    for _ in range(damages):
        damaged[chance.randrange(len(damaged))] = chance.randrange(256)
    try:
        arrived = unpack_tensors(damaged, ()).finish()
    except FrameError:
        return
    for tensor in arrived:
        tensor.clone()


@pytest.mark.parametrize(
    ("at", "value"),
    [
        (5, 1),  # memory that was never sent
        (9, 250),  # a dtype that there is not
        (10, 65),  # more dimensions than there may be
        (11, 1),  # an offset that is no multiple of an element
        (11, 4),  # beyond the end
        (19, 7),  # longer than the memory
        (27, 2),  # steps over its end
    ],
)
def test_a_place_that_is_not_there_is_refused(at: int, value: int) -> None:
    wrong = bytearray(table())
    wrong[at] = value
    with pytest.raises(FrameError):
        unpack_tensors(wrong, ())


class Flat(nn.Module):
    """Parameters that are windows of one buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.flat = torch.zeros(6)
        self.weight = nn.Parameter(self.flat[:4].view(2, 2))
        self.bias = nn.Parameter(self.flat[4:])

    def fill(self, value: float) -> list[float]:
        self.flat.fill_(value)
        return [self.weight.sum().item(), self.bias.sum().item()]


def fill(module: Flat, value: float) -> list[float]:
    return module.fill(value)


def load(module: nn.Linear, state: dict[str, Tensor]) -> float:
    state["weight"].fill_(5.0)
    return module.weight.sum().item()


def add(first: Tensor, second: Tensor) -> Tensor:
    first.add_(1)
    return second


def pair_of_views() -> tuple[Tensor, Tensor]:
    memory = torch.zeros(3)
    return memory, memory[1:]


def test_calls_and_values_keep_what_belongs_together() -> None:
    with local_group("here", "there") as (here, _):
        assert here.rpc_sync("there", fill, (Flat(), 3.0)) == [12, 6]
        linear = nn.Linear(1, 1, bias=False)
        assert here.rpc_sync("there", load, (linear, linear.state_dict())) == 5
        tensor = torch.zeros(2)
        assert here.rpc_sync("there", add, (tensor, tensor.detach())).tolist() == [1, 1]
        assert tensor.tolist() == [0, 0]
        whole, rest = here.rpc_sync("there", pair_of_views)
        whole.fill_(4)
        assert rest.tolist() == [4, 4]
        module = here.remote("there", Flat).to_here()
        assert module.fill(1.0) == [4, 2]
