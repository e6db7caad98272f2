"""A cache of rows keeps to its size and never hands out a row that is too old."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tensorwire.parameter_server.client.cache import Cache, RowCache

DIM = 3


def rows(ids: list[int], step: int) -> Tensor:
    """The rows that a table holds at a step: ids and step can be read off each row."""
    return torch.tensor([[float(each), float(step), 1.0] for each in ids]).view(-1, DIM)


class Fetcher:
    """Fetches through a cache from a table all of whose rows change with every step."""

    def __init__(self, size: int, staleness: int) -> None:
        self.cache = RowCache(Cache(size, staleness), DIM)
        self.fetched: list[list[int]] = []

    def fetch(self, ids: list[int], step: int) -> Tensor:
        wanted, out = torch.tensor(ids, dtype=torch.int64), torch.empty(len(ids), DIM)
        missing = self.cache.lookup(wanted, step, out)
        absent = wanted[missing].tolist()
        self.fetched.append(absent)
        out[missing] = rows(absent, step)
        self.cache.store(wanted[missing], out[missing], step)
        return out


def test_a_row_is_used_until_it_is_too_old() -> None:
    fetcher = Fetcher(10, staleness=2)

    for step in range(4):
        fetcher.fetch([7, step + 100], step)

    assert fetcher.fetched == [[7, 100], [101], [102], [7, 103]]
    assert (fetcher.cache.hits, fetcher.cache.misses) == (2, 6)


def test_the_rows_that_were_fetched_first_make_room() -> None:
    fetcher = Fetcher(3, staleness=9)
    for step, each in enumerate([1, 2, 3, 4]):
        fetcher.fetch([each], step)

    fetcher.fetch([2, 3, 4, 1], 4)

    assert fetcher.fetched[-1] == [1]


def test_a_cleared_cache_has_nothing() -> None:
    fetcher = Fetcher(3, staleness=9)
    fetcher.fetch([1], 0)

    fetcher.cache.clear()

    assert fetcher.fetch([1], 0).tolist() == rows([1], 0).tolist()
    assert fetcher.fetched == [[1], [1]]


@given(
    size=st.integers(1, 8),
    staleness=st.integers(1, 4),
    batches=st.lists(
        st.lists(st.integers(-4, 12), unique=True, min_size=1, max_size=10), max_size=30
    ),
)
def test_no_row_is_ever_too_old_or_another_ids(
    size: int, staleness: int, batches: list[list[int]]
) -> None:
    fetcher = Fetcher(size, staleness)
    for step, batch in enumerate(batches):
        found = fetcher.fetch(batch, step)
        assert found[:, 0].tolist() == batch
        assert (step - found[:, 1] <= staleness).all()
        assert len(fetcher.cache) <= size


def test_wrong_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="Cache: rows=0 must be at least 1"):
        Cache(0, 2)
    with pytest.raises(TypeError, match=r"staleness=1\.5"):
        Cache(3, 1.5)  # type: ignore[arg-type]
