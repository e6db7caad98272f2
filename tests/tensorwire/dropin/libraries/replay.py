"""A library in the manner of TorchRL's replay buffers: it imports torch's RPC by its own names.

Its methods may be called with a reference in place of the object, and take the object out of it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed import rpc


def unwraps_references(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def unwrapping(self: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self, torch._C._distributed_rpc.PyRRef):
            self = self.local_value()
        return method(self, *args, **kwargs)

    return unwrapping


class ReplayBuffer:
    def __init__(self, capacity: int) -> None:
        self._rows: list[torch.Tensor] = []
        self._capacity = capacity

    @unwraps_references
    def extend(self, rows: torch.Tensor) -> int:
        self._rows = [*self._rows, *rows][-self._capacity :]
        return len(self._rows)

    @unwraps_references
    def newest(self, count: int) -> torch.Tensor:
        return torch.stack(self._rows[-count:])


class RemoteReplayBuffer:
    """The buffer of another worker."""

    def __init__(self, worker: str, capacity: int) -> None:
        self._buffer = rpc.remote(worker, ReplayBuffer, args=(capacity,))
        self._owner = self._buffer.owner()

    def extend(self, rows: torch.Tensor) -> int:
        return rpc.rpc_sync(self._owner, ReplayBuffer.extend, args=(self._buffer, rows))

    def newest(self, count: int) -> torch.Tensor:
        future = rpc.rpc_async(self._owner, ReplayBuffer.newest, args=(self._buffer, count))
        return future.wait()
