"""The state of one shard, by itself."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from tensorwire.parameter_server.decisions import orders
from tensorwire.parameter_server.decisions.consistency import BSP
from tensorwire.parameter_server.decisions.slots import evenly
from tensorwire.parameter_server.declarations import spec as specs
from tensorwire.parameter_server.declarations.dense_spec import describe, spread_of
from tensorwire.parameter_server.kernels import torch_kernels
from tensorwire.parameter_server.server.state import ShardState


def _memory(to: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(tuple(shape), dtype=dtype)


def test_what_is_declared_before_a_shard_knows_its_share_has_that_share() -> None:
    """A coordinator that takes over tells all shards of it, also those that are still to begin."""
    optimizer = torch.optim.SGD(nn.Linear(50, 40).parameters(), lr=0.1)
    spec = describe("net", optimizer, spread_of(optimizer))
    state = ShardState(1, BSP(), torch_kernels, _memory)
    state.run(orders.Declare("net", specs.encode(spec)))
    assert not state.dense
    slots = evenly(range(2))
    state.run(orders.Prime({}, 0, 0, slots))
    assert list(state.dense["net"].pieces) == list(spec.kept_by(slots, 1))
    assert 0 < len(state.dense["net"].pieces) < len(spec.pieces)
