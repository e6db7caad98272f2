"""Work that is divided among threads is done once, all of it, with the bits of one thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from rpc.extend import Helpers
from tensorwire import parameter_server as ps
from tensorwire.parameter_server.client.lookup import spread
from tensorwire.parameter_server.declarations.dense_spec import Spread, describe
from tensorwire.parameter_server.declarations.spec import TableSpec
from tensorwire.parameter_server.declarations.wire import Wire
from tensorwire.parameter_server.kernels import copying, kernels, sharing, torch_only
from tensorwire.parameter_server.storage.dense import DensePart, DenseShard
from tensorwire.parameter_server.storage.table import Part, TableShard


@pytest.fixture
def helpers() -> Iterator[Helpers]:
    made = Helpers("test", 3)
    yield made
    made.close()


def _drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_helpers_work_at_the_same_time(helpers: Helpers) -> None:
    together, done = threading.Barrier(4), []

    def work(number: int) -> None:
        together.wait(60)
        done.append(number)

    helpers.run([partial(work, number) for number in range(4)])
    assert sorted(done) == [0, 1, 2, 3]


def test_an_error_is_raised_when_all_the_rest_is_done(helpers: Helpers) -> None:
    done: list[int] = []

    def work(number: int) -> None:
        if number == 1:
            raise ValueError("the second")
        done.append(number)

    with pytest.raises(ValueError, match="the second"):
        helpers.run([partial(work, number) for number in range(6)])
    assert sorted(done) == [0, 2, 3, 4, 5]


def test_without_helpers_the_caller_does_all(helpers: Helpers) -> None:
    helpers.close()
    done: list[str] = []
    helpers.run([lambda: done.append(threading.current_thread().name)] * 3)
    assert done == [threading.current_thread().name] * 3


@pytest.fixture
def both_ways(helpers: Helpers, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Compares what a function returns with and without helpers."""

    def compare(make: Callable[[], list[Tensor]]) -> None:
        alone = make()
        shared: list[int] = []
        monkeypatch.setattr(sharing, "_helpers", lambda: shared.append(0) or helpers)
        for module in (sharing, copying):
            monkeypatch.setattr(module, "WORTH", 64)
        together = make()
        assert shared
        for one, other in zip(alone, together, strict=True):
            assert torch.equal(one, other)

    return compare


def test_rows_are_spread_and_their_gradients_summed_alike(both_ways: Callable[..., None]) -> None:
    places = torch.cat((torch.arange(300), torch.arange(900) % 37)).view(2, 600)

    def make() -> list[Tensor]:
        rows = _drawn(1, 300, 5).requires_grad_()
        found = spread(rows, places)
        found.backward(_drawn(2, 2, 600, 5))
        assert rows.grad is not None
        return [found.detach(), rows.grad]

    both_ways(make)


@pytest.mark.parametrize(
    "rule", [ps.SGD(0.1, 0.9), ps.Adagrad(0.1), ps.RowwiseAdagrad(0.1), ps.Adam(0.1), ps.FTRL(0.1)]
)
def test_rows_are_moved_alike(rule: ps.Rule, both_ways: Callable[..., None]) -> None:
    spec = TableSpec("t", 5, rule, ps.Uniform(0.1), None, None, ps.Precision.FLOAT32, Wire())

    def make() -> list[Tensor]:
        table, out = TableShard(spec, kernels()), np.empty((203, 5), np.float32)
        for step in range(3):
            ids = (np.arange(203) * 7919) % 401
            table.apply([Part(ids, _drawn(step, 203, 5).numpy())], step)
            table.pull(ids, out, step)
        return [torch.from_numpy(out)]

    both_ways(make)


def test_dense_parameters_are_moved_alike(
    both_ways: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.get_num_threads", lambda: 1)
    parameters = [nn.Parameter(_drawn(n, 40_000)) for n in range(3)]
    optimizer = torch.optim.Adam(parameters, 0.1)
    spec = describe("d", optimizer, Spread.ELEMENTS)
    assert len(spec.pieces) > 4

    def make() -> list[Tensor]:
        shard = DenseShard(spec, (0,) * 1024, 0)
        for step in range(3):
            grads = {torch.float32: _drawn(step, 120_000)}
            shard.apply([DensePart(grads, frozenset(), spec.groups)], None)
        return [flat.clone() for flat in shard.values().values()]

    both_ways(make)


@pytest.mark.parametrize("stream_from", [64, 1 << 30])
@pytest.mark.parametrize("k", [kernels(), torch_only()], ids=lambda module: module.NAME)
def test_tensors_are_joined_and_copied_as_torch_does(
    k: ModuleType,
    stream_from: int,
    both_ways: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(copying, "STREAM_FROM", stream_from)
    monkeypatch.setattr(copying, "kernels", lambda: k)
    parts = [_drawn(n, 50 + n) for n in range(9)]

    def make() -> list[Tensor]:
        out, target = torch.empty(sum(map(len, parts))), nn.Parameter(torch.empty(6, 81))
        version = target._version
        copying.joined(parts, out)
        with torch.no_grad():
            copying.copied(out, target)
        assert target._version == version + 1
        assert torch.equal(out, torch.cat(parts))
        again = torch.empty_like(out)
        assert copying.joined_finite(parts, again)
        spoilt = [*parts[:4], parts[4].clone(), *parts[5:]]
        spoilt[4][-1] = torch.inf
        assert not copying.joined_finite(spoilt, torch.empty_like(out))
        return [out, target.detach(), again]

    both_ways(make)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.complex64, torch.int64])
def test_tensors_of_other_dtypes_are_joined_too(dtype: torch.dtype) -> None:
    parts = [_drawn(n, 50).mul(100).to(dtype) for n in range(3)]
    out = torch.empty(150, dtype=dtype)
    assert copying.joined_finite(parts, out)
    assert torch.equal(out, torch.cat(parts))
    if dtype.is_floating_point:
        parts[1][7] = torch.nan
        assert not copying.joined_finite(parts, out)


def test_tensors_that_lie_otherwise_in_memory_are_copied_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(copying, "WORTH", 64)
    source, target = _drawn(3, 180), torch.empty(9, 20).t()
    copying.copied(source, target)
    assert torch.equal(target, source.view(20, 9))
