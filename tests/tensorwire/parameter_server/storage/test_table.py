"""A table makes rows by pushes only, counts exactly, and gives its memory back."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
import torch

from tensorwire.parameter_server import kernels
from tensorwire.parameter_server.decisions.slots import SLOTS, slot_of
from tensorwire.parameter_server.declarations import rules
from tensorwire.parameter_server.declarations.initialisers import Constant, Uniform
from tensorwire.parameter_server.declarations.lifetimes import MinCount, UnusedFor
from tensorwire.parameter_server.declarations.spec import Precision, TableSpec
from tensorwire.parameter_server.storage.changes import Changes
from tensorwire.parameter_server.storage.table import Part, TableShard

K = kernels.kernels()
both = pytest.mark.parametrize("k", [K, kernels.torch_only()], ids=lambda module: module.NAME)


def counters(k=K, dim: int = 4, **settings) -> TableShard:
    """Rows that begin with 0 and count how often they were pushed."""
    spec = TableSpec("t", dim, rules.SGD(lr=1.0), **{"init": Constant(), **settings})
    return TableShard(spec, k)


def push(table: TableShard, ids: list[int], time: int, trainers: int = 1) -> None:
    parts = [
        Part(np.array(ids), np.full((len(ids), table.spec.dim), -1.0, np.float32))
        for _ in range(trainers)
    ]
    table.apply(parts, time)


def pulled(table: TableShard, ids: list[int], time: int = 0) -> list[float]:
    out = np.empty((len(ids), table.spec.dim), np.float32)
    table.pull(np.array(ids), out, time)
    assert (out == out[:, :1]).all()
    return out[:, 0].tolist()


def test_rows_saved_before_and_after_somebody_publishes_are_read_together() -> None:
    """A snapshot is under way when a first version is taken, and when the last one was."""
    table = counters()
    push(table, [1, 2, 3], 1)
    frozen = table.freeze()
    push(table, [1], 2)
    table.watchers.changes = Changes()
    push(table, [2], 3)
    table.watchers.changes = None
    push(table, [3], 4)
    (piece,) = iter(lambda: frozen.next_piece(10), None)
    assert sorted(piece.ids.tolist()) == [1, 2, 3]
    assert piece.columns["weight"][:, 0].tolist() == [1.0, 1.0, 1.0]
    frozen.thaw()
    assert not table.watchers, "updates cost as much as if nobody had ever published"


@both
def test_a_pull_changes_nothing(k) -> None:
    table = counters(k, init=Uniform(1.0, seed=1))
    push(table, [1, 2, 3], 1)
    before = table.bytes, len(table), table.all()[1].clone()
    out = np.empty((4, 4), np.float32)
    table.pull(np.array([1, 9, 10, 11]), out, 1)
    assert (table.bytes, len(table)) == before[:2]
    assert torch.equal(table.all()[1], before[2])
    again = np.empty((4, 4), np.float32)
    table.pull(np.array([11, 10, 9, 1]), again, 1)
    assert (again[::-1] == out).all()


@both
def test_pushes_of_several_trainers_are_one_update(k) -> None:
    table = counters(k)
    parts = [
        Part(np.array([5, 7]), np.full((2, 4), -1.0, np.float32)),
        Part(np.array([7, 9]), np.full((2, 4), -10.0, np.float32)),
    ]
    table.apply(parts, 1)
    assert (pulled(table, [5, 7, 9]), table.steps) == ([1.0, 11.0, 10.0], 1)
    parts = [Part(np.array([5]), np.full((1, 4), -3.0, np.float32)) for _ in range(2)]
    table.apply(parts, 2, share=2)
    assert pulled(table, [5]) == [4.0]


@both
def test_a_row_is_made_at_its_k_th_push_exactly(k) -> None:
    for needed in (1, 2, 5):
        table = counters(k, admit=MinCount(needed))
        for time in range(1, needed + 3):
            push(table, [3, 4], time)
            assert len(table) == (2 if time >= needed else 0)
            assert pulled(table, [3]) == [max(0.0, time - needed + 1)]
        assert table.dropped == 2 * (needed - 1)


@both
def test_admission_counts_the_pushes_of_each_trainer(k) -> None:
    table = counters(k, admit=MinCount(3))
    push(table, [3], 1, trainers=2)
    assert len(table) == 0
    push(table, [3], 2, trainers=2)
    assert pulled(table, [3]) == [2.0]


@both
def test_a_row_is_gone_after_its_time_exactly_and_begins_anew(k) -> None:
    table = counters(k, evict=UnusedFor(3))
    push(table, [1, 2], 1)
    for time in range(2, 9):
        push(table, [2], time)
        assert pulled(table, [1], time) == [1.0 if time < 4 else 0.0]
        assert pulled(table, [2], time) == [float(time)]
    assert len(table) == 1
    push(table, [1], 9)
    assert pulled(table, [1], 9) == [1.0]


@both
def test_admission_and_eviction_agree_with_a_model_over_random_pushes(k) -> None:
    r = random.Random(4)
    table = counters(k, admit=MinCount(2), evict=UnusedFor(5))
    value, touched, waiting, seen = Counter(), {}, Counter(), {}
    for time in range(1, 150):
        for each in [i for i in touched if time - 1 - touched[i] >= 5]:
            del touched[each], value[each]
        ids = r.sample(range(30), r.randint(1, 8))
        push(table, ids, time)
        for each in ids:
            if each in touched:
                value[each] += 1
                touched[each] = time
                continue
            waiting[each] += 1
            seen[each] = time
            if waiting[each] >= 2:
                del waiting[each]
                value[each], touched[each] = 1, time
        if table.swept == time:
            for each in [i for i in waiting if time - seen[i] >= 5]:
                del waiting[each]
        live = [
            float(value[i]) if i in touched and time - touched[i] < 5 else 0.0 for i in range(30)
        ]
        assert pulled(table, list(range(30)), time) == live, time


@both
def test_what_is_removed_is_gone_and_the_rest_is_still_found(k) -> None:
    r = np.random.default_rng(1)
    table = counters(k)
    ids = r.permutation(4000)
    for count, chunk in enumerate(np.split(ids, 4), 1):
        for _ in range(count):
            push(table, chunk.tolist(), 1)
    gone = r.permutation(4000)[:3500]
    taken = table.taken(gone)
    table.remove(gone)
    assert len(table) == 500
    kept = np.setdiff1d(ids, taken.ids)
    expected = {int(i): float(c) for c, chunk in enumerate(np.split(ids, 4), 1) for i in chunk}
    assert pulled(table, kept.tolist()) == [expected[int(i)] for i in kept]
    assert pulled(table, taken.ids.tolist()) == [0.0] * 3500
    table.enter(taken)
    assert pulled(table, ids.tolist()) == [expected[int(i)] for i in ids]


def test_places_of_a_pull_spare_the_push_a_search_until_rows_move() -> None:
    table = counters(evict=UnusedFor(2))
    push(table, [1, 2, 3], 1)
    out = np.empty((3, 4), np.float32)
    places = table.pull(np.array([3, 8, 1]), out, 1)
    table.apply([Part(np.array([3, 8, 1]), np.full((3, 4), -1.0, np.float32), places)], 2)
    assert pulled(table, [3, 8, 1], 2) == [2.0, 1.0, 2.0]
    push(table, [3, 1], 3)  # 2 is swept away, and another row takes its place
    table.apply([Part(np.array([3, 8, 1]), np.full((3, 4), -1.0, np.float32), places)], 4)
    assert pulled(table, [3, 8, 1, 2], 4) == [4.0, 2.0, 4.0, 0.0]


@both
def test_a_frozen_table_is_as_it_was_whatever_happens_meanwhile(k) -> None:
    for seed in range(4):
        r = random.Random(seed)
        table = counters(k, evict=UnusedFor(6))
        for time in range(1, 20):
            push(table, r.sample(range(200), 40), time)
        ids, rows = table.all()
        frozen = table.freeze()
        truth = dict(zip(ids.tolist(), rows[:, 0].tolist(), strict=True))
        got: dict[int, float] = {}
        time = 19
        while (piece := frozen.next_piece(7)) is not None:
            for each, row in zip(piece.ids.tolist(), piece.columns["weight"], strict=True):
                assert each not in got
                got[each] = float(row[0])
            for _ in range(2):
                time += 1
                push(table, r.sample(range(300), 30), time)
        frozen.thaw()
        assert got == truth


@both
def test_rows_go_by_slot(k) -> None:
    table = counters(k)
    push(table, list(range(3000)), 1)
    mine = np.zeros(SLOTS, bool)
    mine[:300] = True
    rows = table.rows_in(mine)
    assert sorted(table.taken(rows).ids.tolist()) == [i for i in range(3000) if slot_of(i) < 300]


@pytest.mark.parametrize("precision", [Precision.BFLOAT16, Precision.FLOAT16])
def test_short_rows_follow_long_ones_on_average_and_replicas_agree(precision: Precision) -> None:
    tables = [
        TableShard(
            TableSpec("t", 16, rules.SGD(lr=0.001), Uniform(1.0, seed=2), precision=p), kernels_used
        )
        for p, kernels_used in (
            (precision, K),
            (precision, kernels.torch_only()),
            (Precision.FLOAT32, K),
        )
    ]
    r = np.random.default_rng(0)
    ids = np.arange(500)
    for time in range(1, 60):
        grad = r.standard_normal((500, 16)).astype(np.float32) * 0.1 + 0.5
        for table in tables:
            table.apply([Part(ids, grad.copy())], time)
    (_, short), (_, other), (_, exact) = (table.all() for table in tables)
    assert torch.equal(short, other)
    assert not torch.equal(short, exact)
    # Rounded to the nearest, steps as small as these would be lost.
    assert float((short - exact).mean().abs()) < 2e-4
    assert tables[0].bytes < tables[2].bytes


def test_an_index_takes_at_most_forty_bytes_a_row() -> None:
    table = counters(dim=1)
    for end in range(2000, 60_000, 500):
        push(table, list(range(max(0, end - 5000), end)), 1)  # most of which are there
        assert table.bytes / len(table) - 4 <= 40


def resident() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * 4096


def test_memory_comes_back_when_rows_go() -> None:
    table = counters(dim=64, evict=UnusedFor(2))
    before = resident()
    ids = np.arange(200_000)
    table.apply([Part(ids, np.full((200_000, 64), -1.0, np.float32))], 1)
    grown = resident() - before
    push(table, [1], 4)
    push(table, [1], 6)
    assert len(table) == 1
    assert resident() - before < 0.4 * grown


@pytest.mark.kills
def test_ids_that_come_and_go_take_no_more_memory_than_those_that_are_there(
    request: pytest.FixtureRequest, record_property: Callable[[str, int], None]
) -> None:
    """10 000 000 ids under ``make kills``, of which 500 000 are there at a time."""
    pushes, batch = 2 * request.config.getoption("--kills"), 100_000
    table = counters(dim=8, evict=UnusedFor(5))
    grad = np.full((batch, 8), -1.0, np.float32)
    most, before = 0, resident()
    for time in range(1, pushes + 1):
        ids = np.arange(time * batch, (time + 1) * batch) * 7919
        table.apply([Part(ids, grad)], time)
        most = max(most, len(table))
        assert len(table) <= 7 * batch
        assert resident() - before < 150e6  # all of them would take 900 MB
    assert most >= 5 * batch
    record_property("times", pushes * batch)


def test_declarations_that_differ_say_in_what() -> None:
    one = TableSpec("t", 4, rules.SGD(lr=1.0), Constant())
    two = TableSpec("t", 8, rules.SGD(lr=1.0), Constant(), evict=UnusedFor(2))
    assert one.differences(one) == []
    assert one.differences(two) == ["dim=8, not 4", "evict=UnusedFor(steps=2), not None"]
    with pytest.raises(TypeError, match=r"not a rule such as ps.SGD"):
        TableSpec("t", 4, torch.optim.SGD, Constant())  # type: ignore[arg-type]
