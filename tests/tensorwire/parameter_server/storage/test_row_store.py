"""Every store of rows keeps what a store promises, wherever its rows are."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from tensorwire.parameter_server import kernels
from tensorwire.parameter_server.declarations import rules
from tensorwire.parameter_server.declarations.initialisers import Constant
from tensorwire.parameter_server.declarations.spec import Precision, TableSpec
from tensorwire.parameter_server.storage.row_store import RowStore, store_for

DIM, COUNT = 4, 6
RULE = rules.SGD(lr=0.5, momentum=0.5)
SPEC = TableSpec("t", DIM, RULE, Constant(2.0))
IDS = np.arange(100, 100 + COUNT)
ROWS = np.arange(COUNT)
KINDS = {
    "host": (Precision.FLOAT32, None),
    "bfloat16": (Precision.BFLOAT16, None),
    "float16": (Precision.FLOAT16, None),
    "device": (Precision.FLOAT32, torch.device("cpu")),
}


@pytest.fixture(params=KINDS)
def store(request: pytest.FixtureRequest) -> RowStore:
    """Six rows that began with 2; row n was then written with n."""
    precision, device = KINDS[request.param]
    made = store_for(replace(SPEC, precision=precision), kernels.kernels(), device)
    made.reserve(COUNT)
    made.begin(ROWS, IDS, RULE, 0)
    assert (read(made, ROWS) == 2).all()
    made.write(ROWS, IDS, np.tile(ROWS[:, None].astype(np.float32), DIM), 0)
    return made


def read(store: RowStore, rows: np.ndarray) -> np.ndarray:
    out = np.full((len(rows), DIM), -1.0, np.float32)
    store.read(rows, out)
    assert (out == out[:, :1]).all()
    return out[:, 0]


def test_a_row_that_is_not_there_is_left_out(store: RowStore) -> None:
    assert read(store, np.array([3, -1, 0])).tolist() == [3.0, -1.0, 0.0]


def test_an_update_moves_rows_and_their_state_only(store: RowStore) -> None:
    grad = np.full((2, DIM), 2.0, np.float32)
    for step in (1, 2):
        store.update(np.array([1, 4]), IDS[[1, 4]], grad, RULE, step)
    assert read(store, ROWS).tolist() == [0.0, -1.5, 2.0, 3.0, 1.5, 5.0]  # by 1, then by 1.5
    state = store.take(ROWS)["state.momentum"]
    assert state[:, 0].tolist() == [0.0, 3.0, 0.0, 0.0, 3.0, 0.0]
    assert (grad == 2).all()


def test_rows_begin_again_with_their_state(store: RowStore) -> None:
    store.update(ROWS, IDS, np.ones((COUNT, DIM), np.float32), RULE, 1)
    store.begin(np.array([5]), IDS[5:], RULE, 1)
    assert read(store, np.array([5])).tolist() == [2.0]
    assert store.take(np.array([5, 4]))["state.momentum"][:, 0].tolist() == [0.0, 1.0]


def test_what_was_taken_can_be_put_into_another_store_of_its_kind(store: RowStore) -> None:
    store.update(ROWS, IDS, np.ones((COUNT, DIM), np.float32), RULE, 1)
    columns = store.take(np.array([2, 3]))
    assert sum(each[0].nbytes for each in columns.values()) == store.row_bytes
    before = read(store, np.array([2, 3]))
    store.put(np.array([0, 5]), columns)
    assert (read(store, np.array([0, 5])) == before).all()
    store.put(np.array([1]), {"state.momentum": np.full((1, DIM), 7.0, np.float32)})
    assert store.take(np.array([1]))["state.momentum"].tolist() == [[7.0] * DIM]
    assert read(store, np.array([1])).tolist() == [0.5]


def test_rows_move_and_those_behind_are_forgotten(store: RowStore) -> None:
    store.update(ROWS, IDS, np.ones((COUNT, DIM), np.float32), RULE, 1)
    store.move(np.array([5, 4]), np.array([0, 2]))
    store.release(4)
    assert read(store, np.arange(4)).tolist() == [4.5, 0.5, 3.5, 2.5]
    assert store.take(np.arange(4))["state.momentum"].tolist() == [[1.0] * DIM] * 4
    store.reserve(COUNT)
    assert read(store, np.array([4, 5])).tolist() == [0.0, 0.0]


def test_a_store_grows_and_keeps_its_rows(store: RowStore) -> None:
    store.reserve(5000)
    store.begin(np.array([4999]), np.array([7]), RULE, 0)
    assert read(store, np.array([4999, *ROWS])).tolist() == [2.0, 0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
