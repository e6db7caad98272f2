"""Plans which parameters of a pipeline stay equal, and makes them so at the start."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import rpc
from remote_module import RemoteModule
from tensorwire.pipeline import sessions
from tensorwire.pipeline.plan import Member, Plan, Sharing

Tie: TypeAlias = Sequence[tuple[int, str]]
"""Parameters that are one and the same weight, each as its stage and its name there."""


def plan_sharing(
    stages: Sequence[Sequence[RemoteModule]],
    owners: Sequence[Sequence[str]],
    ties: Sequence[Tie],
) -> tuple[Sharing, ...]:
    """The gradients that are summed: those of tied parameters, and those of replicas.

    Raises:
        ValueError: a tie names a parameter that is not there, or one that another tie names.
    """
    involved = {stage for tie in ties for stage, _ in tie if 0 <= stage < len(stages)}
    names = {
        stage: rpc.rpc_sync(
            replicas[0].get_module_rref().owner(),
            sessions.parameter_names,
            (replicas[0].get_module_rref(),),
        )
        for stage, replicas in enumerate(stages)
        if len(replicas) > 1 or stage in involved
    }
    tied: set[tuple[int, str]] = set()
    for tie in ties:
        for stage, name in tie:
            if name not in names.get(stage, ()):
                raise ValueError(f"tied={list(ties)!r}: stage {stage} has no parameter {name!r}")
            if (stage, name) in tied:
                raise ValueError(f"tied={list(ties)!r}: {name!r} of stage {stage} is there twice")
            tied.add((stage, name))
    groups = [
        Sharing(
            tuple(Member(owner, stage, (name,)) for stage, name in tie for owner in owners[stage])
        )
        for tie in ties
    ]
    for stage, workers in enumerate(owners):
        if len(workers) > 1:
            own = tuple(name for name in names[stage] if (stage, name) not in tied)
            groups.append(Sharing(tuple(Member(worker, stage, own) for worker in workers)))
    return tuple(groups)


def make_equal(plan: Plan, stages: Sequence[Sequence[RemoteModule]]) -> None:
    """Gives all members of each sharing the values of the first."""
    for sharing in plan.shared:
        first, *others = sharing.members
        read = (plan.session, first.stage, first.names)
        values = rpc.rpc_sync(first.worker, sessions.read_parameters, read)
        for other in others:
            write = (plan.session, other.stage, other.names, values)
            rpc.rpc_sync(other.worker, sessions.set_parameters, write)
