"""The kernels of numba and of torch give the same bits, and those of plain Python and torch."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from tensorwire.parameter_server import kernels
from tensorwire.parameter_server.decisions.slots import slot_of

BOTH = [kernels.kernels(), kernels.torch_only()]
IDS = np.array([5, -3, 5, 2**62, 0, -3, 7, 5, -(2**63)], np.int64)

both = pytest.mark.parametrize("k", BOTH, ids=lambda module: module.NAME)


def table(size: int) -> np.ndarray:
    return np.full((size, 2), -1, np.int64)


def drawn(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def test_the_two_kinds_of_kernels_are_two() -> None:
    assert [module.NAME for module in BOTH] == ["numba", "torch"]


@both
def test_an_index_does_what_a_dict_does(k: ModuleType) -> None:
    r = random.Random(1)
    made, truth = table(97), {}
    for _ in range(150):
        ids = np.array(r.sample(range(-40, 40), r.randint(1, 12)), np.int64) * 1_000_003
        rows = np.empty(len(ids), np.int64)
        if r.random() < 0.6 or not truth:
            following = k.upsert(made, ids, rows, max(truth.values(), default=-1) + 1)
            for identity in ids.tolist():
                truth.setdefault(identity, max(truth.values(), default=-1) + 1)
            assert following == max(truth.values()) + 1
        else:
            gone = np.array(r.sample(sorted(truth), r.randint(1, len(truth))), np.int64)
            k.remove(made, gone)
            for identity in gone.tolist():
                del truth[identity]
            k.find(made, ids, rows)
        assert rows.tolist() == [truth.get(identity, -1) for identity in ids.tolist()]


@both
def test_an_index_grows_without_forgetting_and_rows_can_be_renumbered(k: ModuleType) -> None:
    ids = np.random.default_rng(0).permutation(5000).astype(np.int64) * 7919
    small, rows = table(7000), np.empty(5000, np.int64)
    assert k.upsert(small, ids, rows, 0) == 5000
    large = table(11000)
    k.rehash(small, large)
    k.set_rows(large, ids[:10].copy(), np.arange(10, dtype=np.int64) + 90_000)
    found = np.empty(5000, np.int64)
    k.find(large, ids, found)
    assert found[:10].tolist() == list(range(90_000, 90_010))
    assert (found[10:] == rows[10:]).all()


@both
def test_different_ids_come_in_the_order_in_which_they_were_seen(k: ModuleType) -> None:
    scratch, unique, inverse = table(32), np.empty(9, np.int64), np.empty(9, np.int64)
    for _ in range(2):  # the scratch is empty again
        count = k.dedup(scratch, IDS, unique, inverse)
        assert unique[:count].tolist() == [5, -3, 2**62, 0, 7, -(2**63)]
        assert inverse.tolist() == [0, 1, 0, 2, 3, 1, 4, 0, 5]


@both
def test_slots_are_those_of_the_decisions(k: ModuleType) -> None:
    out = np.empty(len(IDS), np.int64)
    k.slots(IDS, out)
    assert out.tolist() == [slot_of(identity) for identity in IDS.tolist()]


@both
def test_a_split_groups_and_keeps_the_order_within_groups(k: ModuleType) -> None:
    groups = np.array([2, 0, 2, 1, 0], np.int64)
    position, sizes = np.empty(5, np.int64), np.empty(4, np.int64)
    k.split(groups, 4, position, sizes)
    assert (position.tolist(), sizes.tolist()) == ([3, 0, 4, 2, 1], [2, 1, 2, 0])
    out = np.empty(5, np.int64)
    k.permute(np.array([10, 11, 12, 13, 14], np.int64), position, out)
    assert out.tolist() == [11, 14, 13, 10, 12]
    inverse = np.array([0, 4, 4, 2], np.int64)
    k.translate(inverse, position)
    assert inverse.tolist() == [3, 1, 1, 4]


@both
def test_numbers_that_are_none_are_found_anywhere(k: ModuleType) -> None:
    values = drawn(4, 100)
    assert k.finite(values.view(np.int32))
    for place, bad in ((0, np.nan), (57, np.inf), (99, -np.inf)):
        spoilt = values.copy()
        spoilt[place] = bad
        assert not k.finite(spoilt.view(np.int32))


@both
def test_numbers_are_looked_at_while_they_are_copied_wherever_they_lie(k: ModuleType) -> None:
    for size in (0, 1, 7, 8, 9, 41, 1 << 17):
        for first in range(9):
            source = drawn(size, size).view(np.int32)
            target = np.zeros(first + size + 8, np.int32)
            assert k.stream_finite(source, target[first : first + size])
            assert (target == np.concatenate(([0] * first, source, [0] * 8))).all()
            for place in {0, size // 2, size - 1} if size else ():
                spoilt = source.copy()
                spoilt.view(np.float32)[place] = -np.inf if place % 2 else np.nan
                assert not k.stream_finite(spoilt, target[first : first + size])
                assert (target[first : first + size] == spoilt).all()


def test_digests_are_the_same_and_differ_after_any_change() -> None:
    words = np.random.default_rng(1).integers(0, 2**32, 5000, dtype=np.uint32)
    one, other = (k.digest(words, 7) for k in BOTH)
    assert int(one) == int(other)
    halves = [int(BOTH[0].digest(part, 7 + begin)) for part, begin in
              ((words[:2000], 0), (words[2000:], 2000))]  # fmt: skip
    assert sum(halves) % 2**64 == int(one)
    changes: list[Callable[[Any], Any]] = [
        lambda w: w ^ np.uint32(1 << 31),  # as if all numbers got the other sign
        lambda w: w[::-1].copy(),
        lambda w: np.concatenate((w[1:2], w[:1], w[2:])),
        lambda w: np.roll(w, 1),
        *(partial(_flipped, bit) for bit in range(32)),
    ]
    assert len({int(BOTH[0].digest(change(words), 7)) for change in changes} - {int(one)}) == 36


def _flipped(bit: int, words: Any) -> Any:
    changed = words.copy()
    changed[1234] ^= np.uint32(1 << bit)
    return changed


@both
@pytest.mark.parametrize("width", [1, 7, 64])
def test_sums_of_rows_are_those_of_an_embedding_s_backward_pass(k: ModuleType, width: int) -> None:
    inverse = np.random.default_rng(2).integers(0, 20, 300)
    inverse[:20] = np.arange(20)
    values = drawn(3, 300, width)
    out, seen = np.full((20, width), np.nan, np.float32), np.zeros(20, np.uint8)
    k.segment_sum(values, inverse, seen, out)
    weight = torch.zeros(20, width, requires_grad=True)
    torch.nn.functional.embedding(torch.from_numpy(inverse), weight).backward(
        torch.from_numpy(values)
    )
    assert weight.grad is not None
    assert torch.equal(torch.from_numpy(out), weight.grad)
    k.add_rows(values, inverse, out)
    assert not torch.equal(torch.from_numpy(out), weight.grad)


@both
def test_rows_are_gathered_scattered_and_claimed(k: ModuleType) -> None:
    source, out = drawn(4, 30, 5), np.zeros((3, 5), np.float32)
    k.gather(source, np.array([4, -1, 29], np.int64), out)
    assert (out == np.stack([source[4], np.zeros(5, np.float32), source[29]])).all()
    k.scatter(out, np.array([1, 2, 3], np.int64), source)
    assert (source[1:4] == out).all()
    pending, claimed = np.array([1, 1, 0, 1], np.uint8), np.empty(5, np.int64)
    count = k.claim(pending, np.array([3, 2, -1, 0, 9], np.int64), claimed)
    assert claimed[:count].tolist() == [3, 0]
    assert pending.tolist() == [0, 1, 0, 0]


@pytest.mark.parametrize("name", ["uniform", "normal"])
def test_initial_rows_depend_on_seed_id_and_column_only_and_are_the_same_bits(name: str) -> None:
    ids = np.random.default_rng(5).integers(-(2**62), 2**62, 400)
    places = np.arange(400)
    first, second = (np.empty((400, 33), np.float32) for _ in BOTH)
    for module, out in zip(BOTH, (first, second), strict=True):
        getattr(module, name)(out, places, ids, 7, -0.5, 1.5)
    assert (first == second).all()
    backwards = np.empty((400, 33), np.float32)
    getattr(BOTH[0], name)(backwards, places, ids[::-1].copy(), 7, -0.5, 1.5)
    assert (backwards[::-1] == first).all()
    other = np.empty((400, 33), np.float32)
    getattr(BOTH[0], name)(other, places, ids, 8, -0.5, 1.5)
    assert (other != first).mean() > 0.99


def test_uniform_rows_are_uniform_and_normal_ones_normal() -> None:
    ids, places = np.arange(20_000), np.arange(20_000)
    out = np.empty((20_000, 16), np.float32)
    BOTH[0].uniform(out, places, ids, 1, -2.0, 4.0)
    assert (out.min(), out.max()) == pytest.approx((-2, 4), abs=0.01)
    assert (out.mean(), out.var()) == pytest.approx((1, 3), abs=0.05)
    BOTH[0].normal(out, places, ids, 1, 1.0, 2.0)
    assert (out.mean(), out.std()) == pytest.approx((1, 2), abs=0.02)
    assert np.abs(np.corrcoef(out[:, :4].T) - np.eye(4)).max() < 0.03


SPECIAL = [0.0, -0.0, 1.0, -1.5, 1e-7, 6e-8, 3e-8, 1e-40, 65504.0, 65520.0, 1e9, -1e30]


@pytest.mark.parametrize("name", ["to_bfloat16", "to_float16"])
def test_sixteen_bits_are_the_same_and_one_of_the_two_neighbours(name: str) -> None:
    values = np.concatenate([drawn(6, 500, 12), np.array([SPECIAL], np.float32)])
    values = np.concatenate([values, np.full((1, 12), np.inf, np.float32)])
    ids = np.arange(len(values)) * 31
    first, second = (np.empty(values.shape, np.uint16) for _ in BOTH)
    for module, out in zip(BOTH, (first, second), strict=True):
        getattr(module, name)(values, ids, 3, 5, out)
    assert (first == second).all()
    dtype = torch.bfloat16 if name == "to_bfloat16" else torch.float16
    got = torch.from_numpy(first.view(np.int16)).view(dtype).float()
    wanted = torch.from_numpy(values).clamp(-65504, 65504) if dtype is torch.float16 else values
    wanted = torch.as_tensor(wanted)[:-1]
    spacing = (wanted.abs() * torch.finfo(dtype).eps).clamp(min=2**-24)
    assert ((got[:-1] - wanted).abs() <= spacing).all()
    assert got[-1].isinf().all()


@both
def test_rounding_by_chance_has_the_right_mean(k: ModuleType) -> None:
    values = np.full((4000, 8), 1.0 + 0.3 * 2**-7, np.float32)
    out = np.empty(values.shape, np.uint16)
    k.to_bfloat16(values, np.arange(4000), 1, 1, out)
    got = torch.from_numpy(out.view(np.int16)).view(torch.bfloat16).float()
    assert float(got.mean()) == pytest.approx(1.0 + 0.3 * 2**-7, abs=0.02 * 2**-7)
    again = np.empty(values.shape, np.uint16)
    k.to_bfloat16(values, np.arange(4000), 1, 2, again)
    assert (again != out).any()


@both
def test_different_ids_of_many_tables_are_found_table_by_table(k: ModuleType) -> None:
    r = np.random.default_rng(5)
    parts = [r.integers(-9, 9, n) for n in (40, 0, 7, 300)]
    ids, ends = np.concatenate(parts), np.cumsum([len(part) for part in parts])
    unique, inverse = np.empty_like(ids), np.empty_like(ids)
    counts = np.empty(len(parts), np.int64)

    count = k.dedup_many(table(600), ids, ends, unique, inverse, counts)

    seen = [list(dict.fromkeys(part.tolist())) for part in parts]
    assert counts.tolist() == [len(each) for each in seen]
    assert unique[:count].tolist() == [each for some in seen for each in some]
    assert np.array_equal(unique[inverse], ids)


@both
def test_ids_are_ordered_by_shard_and_counted_by_table(k: ModuleType) -> None:
    ids = np.random.default_rng(6).integers(-(2**62), 2**62, 500)
    ends, shard_of = np.array([100, 100, 500]), np.arange(1024) % 3
    order, sizes = np.empty(500, np.int64), np.empty((3, 3), np.int64)

    k.partition(shard_of, 3, ids, ends, order, sizes)

    found = np.array([slot_of(identity) % 3 for identity in ids.tolist()])
    assert order.tolist() == np.argsort(found, kind="stable").tolist()
    for shard in range(3):
        mine = found == shard
        assert sizes[shard].tolist() == [mine[:100].sum(), 0, mine[100:].sum()]
