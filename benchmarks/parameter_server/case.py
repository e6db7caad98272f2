"""The work that is compared: which rows are looked up, and their gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from benchmarks.stepping import Step

BATCHES: Final = 8
"""Different batches, which are trained on in turn."""
LR: Final = 0.05
EPS: Final = 1e-10


@dataclass(frozen=True, slots=True)
class Case:
    """The size of what is trained.

    Args:
        rows: of the table.
        ids: of a batch.
        dim: columns.
        threads: of torch, in each process.
        megabytes: of dense parameters.
    """

    rows: int
    ids: int
    dim: int
    threads: int
    megabytes: float

    def batches(self) -> list[Tensor]:
        """Ids with Zipf's distribution, exponent 1.05, the same in every process."""
        draw = torch.Generator().manual_seed(0)
        weights = torch.arange(1.0, self.rows + 1, dtype=torch.float64) ** -1.05
        ends = torch.cumsum(weights / weights.sum(), 0)
        names = torch.randperm(self.rows, generator=draw)
        uniform = torch.rand(BATCHES, self.ids, generator=draw, dtype=torch.float64)
        found = torch.searchsorted(ends, uniform).clamp_(max=self.rows - 1)
        return list(names[found].unbind())

    def gradient(self) -> Tensor:
        """The gradient of a batch of rows that were looked up."""
        return torch.randn(self.ids, self.dim, generator=torch.Generator().manual_seed(1))

    @property
    def numbers(self) -> int:
        """Dense parameters."""
        return int(self.megabytes * (1 << 20)) // 4


Program = Callable[[Case, int, str], Step | None]
"""Begins one process of a program, given its rank (0 trains) and a file to meet at."""

_NAMES: Final = ("trainer", "server", "server2")


def join(rank: int, meeting: str, size: int = 2) -> Any:
    """Joins a group of this library's RPC as a trainer or a server; returns the module ``rpc``."""
    import rpc

    options = rpc.TensorWireRpcBackendOptions(init_method=f"file://{meeting}", rpc_timeout=0)
    rpc.init_rpc(_NAMES[rank], rank=rank, world_size=size, rpc_backend_options=options)
    return rpc


def join_torch(rank: int, meeting: str, size: int = 2) -> Any:
    """Joins a group of torch's RPC; returns the module."""
    from torch import distributed

    rpc: Any = distributed.rpc
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{meeting}", rpc_timeout=0)
    rpc.init_rpc(_NAMES[rank], rank=rank, world_size=size, rpc_backend_options=options)
    return rpc
