"""The two libraries behind one face, so that each workload is written once.

The fields are the libraries' own functions, and a call through them costs what it costs
a user; only ``backward_and_step`` is for torch the two calls that it takes there.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

OURS = "ours"
TORCH = "torch"

_ROOT = Path(__file__).parents[1]


@dataclass(frozen=True, slots=True)
class Api:
    """The part of a library workloads use. Signatures are those of ``torch.distributed.rpc``."""

    library: str
    rpc: ModuleType
    autograd: ModuleType
    optim: ModuleType
    rpc_sync: Callable[..., Any]
    rpc_async: Callable[..., Any]
    remote: Callable[..., Any]
    reference: Callable[[Any], Any]
    context: Callable[[], AbstractContextManager[int]]
    backward: Callable[..., None]
    optimizer: Callable[..., Any]
    backward_and_step: Callable[[Any, int, list[Any]], None]
    """Of an optimizer, in a context, for some losses; torch has two calls for it."""

    def join(self, rank: int, size: int, backend: str, options: dict[str, Any]) -> None:
        """Join the group of this run as ``worker<rank>``; returns when all have."""
        kind = self.rpc.BackendType[backend]
        chosen = self.rpc.backend_registry.construct_rpc_backend_options(kind, **options)
        self.rpc.init_rpc(worker(rank), kind, rank, size, chosen)


def worker(rank: int) -> str:
    """Return the name of the worker with this rank."""
    return f"worker{rank}"


@functools.cache
def load(library: str) -> Api:
    """Import a library, :data:`OURS` or :data:`TORCH`, and return it as an Api."""
    return _ours() if library == OURS else _torch()


def make_main_job_importable(api: Api) -> None:
    """Let ``import tutorials`` find the main job, and the main job find this library.

    It imports ``rpc``, ``autograd_dist`` and ``optim_dist``. In a process
    that measures torch these names are torch's modules: changing imports is all
    that a program has to do to move between the two.
    """
    sys.path.insert(0, str(_ROOT))
    sys.modules.update(rpc=api.rpc, autograd_dist=api.autograd, optim_dist=api.optim)


def _ours() -> Api:
    import autograd_dist
    import optim_dist
    import rpc

    fused = optim_dist.DistributedOptimizer.backward_and_step
    return _api(OURS, rpc, autograd_dist, optim_dist, fused)


def _torch() -> Api:
    import torch.distributed.autograd
    import torch.distributed.optim
    import torch.distributed.rpc

    distributed = torch.distributed
    autograd: Any = distributed.autograd

    def backward_and_step(optimizer: Any, context: int, losses: list[Any]) -> None:
        autograd.backward(context, losses)
        optimizer.step(context)

    return _api(TORCH, distributed.rpc, autograd, distributed.optim, backward_and_step)


def _api(
    library: str,
    rpc: ModuleType,
    autograd: ModuleType,
    optim: ModuleType,
    backward_and_step: Callable[[Any, int, list[Any]], None],
) -> Api:
    return Api(
        library=library,
        rpc=rpc,
        autograd=autograd,
        optim=optim,
        rpc_sync=rpc.rpc_sync,
        rpc_async=rpc.rpc_async,
        remote=rpc.remote,
        reference=rpc.RRef,
        context=autograd.context,
        backward=autograd.backward,
        optimizer=optim.DistributedOptimizer,
        backward_and_step=backward_and_step,
    )
