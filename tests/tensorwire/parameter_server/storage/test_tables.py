"""Many tables in one go are what each is by itself, to the bit, whatever they are."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from tensorwire import parameter_server as ps
from tensorwire.parameter_server import kernels
from tensorwire.parameter_server.declarations.spec import TableSpec
from tensorwire.parameter_server.storage import tables as many
from tensorwire.parameter_server.storage.table import TableShard
from tensorwire.parameter_server.storage.tables import ManyParts

DIM, STEPS = 8, 12
BOTH = [kernels.kernels(), kernels.torch_only()]

RULES: dict[str, Sequence[ps.Rule]] = {
    "sgd": [ps.SGD(lr=0.1)] * 4,
    "momentum": [ps.SGD(lr=0.1, momentum=0.9, weight_decay=0.01)] * 4,
    "adagrad": [ps.Adagrad(lr=0.1)] * 4,
    "rowwise": [ps.RowwiseAdagrad(lr=0.1)] * 4,
    "adam": [ps.Adam(lr=0.1)] * 4,
    "ftrl": [ps.FTRL(lr=0.1, l1=0.01)] * 4,
    "several": [ps.SGD(lr=0.1), ps.SGD(lr=0.2), ps.Adam(lr=0.1), ps.Adam(lr=0.1)],
}
OPTIONS = {
    "plain": [{}, {}, {}, {}],
    "one of another kind": [
        {},
        {"precision": ps.Precision.BFLOAT16},
        {"admit": ps.MinCount(2)},
        {"evict": ps.UnusedFor(steps=4)},
    ],
}


def made(k, rules: Sequence[ps.Rule], options: str = "plain") -> list[TableShard]:
    return [
        TableShard(TableSpec(f"t{n}", DIM, rule, ps.Uniform(0.1, seed=n), **given), k)
        for n, (rule, given) in enumerate(zip(rules, OPTIONS[options], strict=True))
    ]


def drawn(r: np.random.Generator) -> tuple[tuple[int, ...], np.ndarray]:
    """Different ids of each table, of one of them sometimes none."""
    parts = [r.permutation(60)[: r.integers(0, 30)] for _ in range(4)]
    return tuple(len(part) for part in parts), np.concatenate(parts)


@pytest.mark.parametrize("trainers", [1, 2])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("k", BOTH, ids=lambda module: module.NAME)
def test_many_tables_hold_what_each_holds_by_itself(k, rule, options, trainers) -> None:
    r = np.random.default_rng(7)
    together, apart = (made(k, RULES[rule], options) for _ in range(2))
    frozen = []
    for time in range(1, STEPS + 1):
        parts = []
        for _ in range(trainers):
            sizes, ids = drawn(r)
            out, other = (np.empty((len(ids), DIM), np.float32) for _ in range(2))
            places = many.pull(k, together, sizes, ids, out, time - 1)
            parts.append(ManyParts(sizes, ids, r.standard_normal(out.shape).astype("f4"), places))
            ends = np.cumsum((0, *sizes))
            for n, table in enumerate(apart):
                own = slice(ends[n], ends[n + 1])
                table.pull(ids[own], other[own], time - 1)
            assert np.array_equal(out, other)
        if time == STEPS - 2:
            frozen = [
                (table.freeze(), twin.all()) for table, twin in zip(together, apart, strict=True)
            ]
        share = 2.0 if trainers == 2 else None
        many.apply(k, together, parts, time, share)
        for n, table in enumerate(apart):
            table.apply([part.of(n) for part in parts], time, share)
    for table, twin in zip(together, apart, strict=True):
        one, other = (each.taken(np.arange(len(each))) for each in (table, twin))
        assert np.array_equal(one.ids, other.ids)
        for name, values in one.columns.items():
            assert np.array_equal(values, other.columns[name]), name
        assert (table.steps, len(table)) == (twin.steps, len(twin))
    for memory, (ids, rows) in frozen:
        saved = {}
        while (piece := memory.next_piece(7)) is not None:
            if piece.columns["weight"].dtype == np.float32:
                saved |= dict(zip(piece.ids.tolist(), piece.columns["weight"], strict=True))
        for identity, row in zip(ids.tolist(), rows.numpy(), strict=True):
            assert not saved or np.array_equal(saved[identity], row)


def test_rows_are_looked_for_again_if_one_table_has_numbered_its_rows_anew() -> None:
    k = kernels.kernels()
    tables = made(k, RULES["sgd"])
    ids, sizes = np.tile(np.arange(5), 4), (5,) * 4
    grad = np.ones((20, DIM), np.float32)
    many.apply(k, tables, [ManyParts(sizes, ids, grad)], 1)
    out = np.empty_like(grad)
    places = many.pull(k, tables, sizes, ids, out, 1)
    tables[2].remove(np.array([0]))

    many.apply(k, tables, [ManyParts(sizes, ids, grad, places)], 2)

    after = np.empty_like(grad)
    many.pull(k, tables, sizes, ids, after, 2)
    moved = out - np.float32(0.1)
    assert np.array_equal(after[:10], moved[:10])
    assert np.array_equal(after[11:], moved[11:])
    assert not np.array_equal(after[10], moved[10])  # it began anew
