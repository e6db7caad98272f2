"""Moving the tensors in a value; torch's ``meta`` device stands in for an accelerator."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from typing import NamedTuple

import torch
from torch.nn.utils.rnn import pack_sequence

from remote_module.devices import move_tensors

CPU = torch.device("cpu")
META = torch.device("meta")


class Point(NamedTuple):
    x: torch.Tensor
    name: str


class Items(list[object]):
    pass


def test_tensors_move_at_any_depth() -> None:
    value = (torch.ones(1), [{"a": torch.ones(2)}, 3], "word")
    first, (inner, number), word = move_tensors(value, META)
    assert (first.device, inner["a"].device, number, word) == (META, META, 3, "word")


def test_what_was_passed_in_stays_as_it_was() -> None:
    tensor, items, mapping = torch.ones(1), [torch.ones(1)], {"a": torch.ones(1)}
    move_tensors((tensor, items, mapping), META)
    assert tensor.device == items[0].device == mapping["a"].device == CPU


def test_containers_keep_their_types() -> None:
    tensor = torch.ones(1)
    point = move_tensors(Point(tensor, "p"), META)
    assert type(point) is Point
    assert point.x.device == META
    assert type(move_tensors(Items([tensor]), META)) is Items
    assert type(move_tensors(OrderedDict(a=tensor), META)) is OrderedDict
    counts = move_tensors(defaultdict(int, a=tensor), META)
    assert counts["missing"] == 0
    assert type(move_tensors(torch.max(torch.ones(2, 2), 0), META)) is torch.return_types.max


def test_what_need_not_move_is_the_same_object() -> None:
    value = {"a": [torch.ones(1), (1, 2)], "size": torch.Size([1])}
    assert move_tensors(value, CPU) is value


def test_batch_sizes_of_a_packed_sequence_stay_on_the_cpu() -> None:
    packed = move_tensors([pack_sequence([torch.ones(2, 1)])], META)[0]
    assert packed.data.device == META
    assert packed.batch_sizes.device == CPU


def test_a_move_is_part_of_the_autograd_graph() -> None:
    leaf = torch.ones(2, requires_grad=True)
    moved = move_tensors([leaf], META)[0]
    assert moved.grad_fn.next_functions[0][0].variable is leaf
