"""Columns of rows: they grow in place, and any number of tables finds room for its own."""

from __future__ import annotations

import mmap

import numpy as np

from tensorwire.parameter_server.rows.memory import Column


def test_the_columns_of_hundreds_of_tables_leave_addresses_for_others() -> None:
    columns = [Column(np.float32, 16) for _ in range(1200)]
    columns[-1].rows[1_000_000] = 1.0
    with mmap.mmap(-1, 1 << 40, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000) as others:
        assert len(others) == 1 << 40


def test_a_column_that_outgrows_its_addresses_keeps_its_rows() -> None:
    column = Column(np.int64, 2, reserved=1 << 26)
    column.rows[:3] = [[1, 2], [3, 4], [5, 6]]
    most = len(column.rows)
    column.reserve(most + 1)
    assert len(column.rows) > most
    assert column.rows[:4].tolist() == [[1, 2], [3, 4], [5, 6], [0, 0]]
