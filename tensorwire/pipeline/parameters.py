"""Parameters of all stages together: gathered, replaced, their gradients clipped."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

import rpc
from optim_dist.clipping import total_norm
from tensorwire.pipeline import sessions
from tensorwire.pipeline.formation import Design

Norms = Mapping[int, Sequence[torch.Tensor]]
"""By stage, the norms of its gradients."""


def gathered(design: Design) -> dict[str, Any]:
    """All parameters and buffers, of replicas the first's, by their names in the pipeline."""
    pairs = zip(design.stages, design.prefixes, strict=True)
    return {
        prefix + name: each
        for replicas, prefix in pairs
        for name, each in replicas[0].state_dict().items()
    }


def replaced(design: Design, state_dict: Mapping[str, Any]) -> None:
    """Takes over what :func:`gathered` returned, in all replicas.

    Raises:
        RuntimeError: names are missing or too many.
    """
    known: set[str] = set()
    for replicas, prefix in zip(design.stages, design.prefixes, strict=True):
        for replica in replicas:
            rref = replica.get_module_rref()
            names = rpc.rpc_sync(rref.owner(), sessions.state_names, (rref,))
            own = {n: state_dict[prefix + n] for n in names if prefix + n in state_dict}
            replica.load_state_dict(own)
            known.update(prefix + name for name in names)
    if rest := sorted(set(state_dict) - known):
        raise RuntimeError(f"no stage has what the state has: {rest}")


def norm_of(
    stages: int, by_worker: Iterable[Norms], norm_type: float, error_if_nonfinite: bool
) -> torch.Tensor:
    """The norm of all gradients together, from those that the workers found."""
    known = list(by_worker)
    norms = [norm for stage in range(stages) for each in known for norm in each.get(stage, ())]
    return total_norm(norms, norm_type, error_if_nonfinite)
