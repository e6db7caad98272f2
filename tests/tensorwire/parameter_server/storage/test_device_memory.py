"""Tables whose rows lie on a device: torch's own CPU stands in for it where there is no GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from rpc.testing import as_worker, local_group
from tensorwire import parameter_server as ps
from tensorwire.parameter_server import kernels
from tensorwire.parameter_server.declarations import rules
from tensorwire.parameter_server.declarations.initialisers import Normal
from tensorwire.parameter_server.declarations.lifetimes import UnusedFor
from tensorwire.parameter_server.declarations.rules import Rule
from tensorwire.parameter_server.declarations.spec import TableSpec
from tensorwire.parameter_server.rows.device_memory import DeviceColumn
from tensorwire.parameter_server.server import available
from tensorwire.parameter_server.server.host import host
from tensorwire.parameter_server.storage.table import Part, TableShard

_CPU = torch.device("cpu")
_GPU = pytest.param(
    torch.device("cuda"),
    marks=[
        pytest.mark.cuda,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    ],
    id="cuda",
)
devices = pytest.mark.parametrize("device", [pytest.param(_CPU, id="cpu"), _GPU])


def _trained(rule: Rule, device: torch.device | None, **settings: Any) -> TableShard:
    table = TableShard(
        TableSpec("t", 5, rule, Normal(0.1, seed=4), **settings), kernels.kernels(), device
    )
    draw = np.random.default_rng(0)
    for time in range(1, 9):
        ids = draw.permutation(4000)[:900]
        grad = draw.standard_normal((900, 5), np.float32)
        places = table.pull(ids, np.empty((900, 5), np.float32), time - 1) if time % 2 else None
        table.apply([Part(ids, grad, places)], time)
    return table


@devices
@pytest.mark.parametrize(
    "rule",
    [
        rules.SGD(0.1, momentum=0.9),
        rules.Adagrad(0.1, initial_accumulator_value=0.2),
        rules.RowwiseAdagrad(0.1),
        rules.Adam(0.01),
        rules.FTRL(0.1, l1=0.1),
    ],
    ids=lambda rule: type(rule).__name__,
)
def test_rows_on_a_device_are_those_of_the_host(rule: Rule, device: torch.device) -> None:
    (ids, rows), (others, theirs) = _trained(rule, device).all(), _trained(rule, None).all()
    assert torch.equal(ids, others)
    assert torch.allclose(rows, theirs, rtol=1e-5, atol=1e-6)


@devices
def test_rows_leave_a_device_and_come_to_another(device: torch.device) -> None:
    table = _trained(rules.Adam(0.01), device, evict=UnusedFor(3))
    host_table = _trained(rules.Adam(0.01), None, evict=UnusedFor(3))
    assert len(table) == len(host_table) < 3000  # some were evicted

    other = TableShard(table.spec, kernels.kernels(), device)
    for piece in table.pieces(500):
        other.enter(piece)
    for mine, theirs in zip(other.all(), host_table.all(), strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-5, atol=1e-6)


@devices
def test_a_column_grows_and_gives_its_memory_back(device: torch.device) -> None:
    column = DeviceColumn(2, device)
    column.reserve(100_000)
    column.rows[np.array([5, 99_999])] = np.array([[1.0, 2.0], [3.0, 4.0]], np.float32)
    column.release(6)
    assert len(column) < 2000
    assert column.rows[np.array([5, 6])].tolist() == [[1.0, 2.0], [0.0, 0.0]]


@devices
def test_a_model_on_a_device_trains_with_a_server_whose_rows_are_on_one(
    device: torch.device,
) -> None:
    with local_group("ps0", "trainer0") as agents:
        with as_worker(agents[0]):
            host().device = device
        with as_worker(agents[1]):
            cluster = ps.connect(["ps0"])
            model = ps.Embedding(cluster.table("items", 3, ps.SGD(lr=1.0)))
            optimizer = ps.Optimizer(cluster, model)
            ids = torch.tensor([4, 9, 4], device=device)
            for _ in range(2):
                optimizer.zero_grad()
                found = model(ids)
                assert found.device.type == device.type
                found.sum().backward()
                optimizer.step()
            assert model.table.pull(torch.tensor([9, 4, 1]))[:, 0].tolist() == [-2.0, -4.0, 0.0]
            cluster.finish()


def test_a_device_that_is_not_there_is_refused() -> None:
    assert available.device("cpu") is None
    for strange in ("cuda:77", "no such"):
        with pytest.raises(ValueError, match=f"device='{strange}' cannot be used here"):
            available.device(strange)
