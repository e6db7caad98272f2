"""The work of a pipeline's worker with its gradients, on behalf of the driver.

Steps optimizers, measures and clips norms, takes a loss scale out. The functions here are
called from afar.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn

from tensorwire.pipeline.backups.copies import restore_optimizer
from tensorwire.pipeline.plan import Plan
from tensorwire.pipeline.sessions import Sessions
from tensorwire.pipeline.worker import StageWorker

Options: TypeAlias = Mapping[str, Any]
"""Hyperparameters, such as ``{"lr": 0.1}``."""

GroupRule: TypeAlias = Callable[[str, nn.Parameter], Options]
"""Says which hyperparameters a parameter has apart from the defaults."""


@dataclass(frozen=True, slots=True)
class Made:
    """An optimizer that was made.

    Args:
        own: for each of its groups, what the rule said.
        groups: for each of its groups, all hyperparameters.
        defaults: the optimizer's.
    """

    own: list[Options]
    groups: list[Options]
    defaults: Options


def make_optimizer(
    session: str, key: str, cls: type[torch.optim.Optimizer], options: Options, rule: GroupRule
) -> Made:
    """Makes an optimizer of the parameters that are here, a group for each different answer."""
    part = Sessions.here().find(session)
    own: list[Options] = []
    groups: list[list[nn.Parameter]] = []
    for name, parameter in part.named_parameters().items():
        if parameter.requires_grad:
            said = dict(rule(name, parameter))
            if said not in own:
                own.append(said)
                groups.append([])
            groups[own.index(said)].append(parameter)
    if not groups:
        return Made([], [], {})
    optimizer = cls([{"params": g, **o} for g, o in zip(groups, own, strict=True)], **options)
    for index, copied in part.restored.items():
        restore_optimizer(copied, key, part.stages[index].module, optimizer)
    part.optimizers[key] = optimizer
    return Made(own, [_without_parameters(each) for each in optimizer.param_groups],
                optimizer.defaults)  # fmt: skip


def step_optimizer(session: str, key: str, groups: Sequence[Options] | None) -> None:
    """Steps an optimizer, with other hyperparameters if these are given."""
    part = Sessions.here().find(session)
    part.settle()
    optimizer = part.optimizers.get(key)
    if optimizer is None:
        return
    for group, options in zip(optimizer.param_groups, groups or (), strict=False):
        group.update(options)
    optimizer.step()


def zero_gradients(session: str, set_to_none: bool) -> None:
    """Clears all gradients."""
    part = Sessions.here().find(session)
    part.settle()
    for parameter in part.parameters():
        if set_to_none or parameter.grad is None:
            parameter.grad = None
        else:
            parameter.grad = torch.zeros_like(parameter.grad)


def optimizer_state(session: str, key: str) -> dict[str, dict[str, Any]]:
    """The state that an optimizer keeps for each parameter, by the parameter's name."""
    part = Sessions.here().find(session)
    optimizer = part.optimizers.get(key)
    if optimizer is None:
        return {}
    return {
        name: dict(optimizer.state[parameter])
        for name, parameter in part.named_parameters().items()
        if parameter in optimizer.state
    }


def load_optimizer_state(session: str, key: str, state: Mapping[str, Mapping[str, Any]]) -> None:
    """Takes over what an optimizer kept for parameters of these names; no more is kept."""
    part = Sessions.here().find(session)
    optimizer = part.optimizers.get(key)
    if optimizer is None:
        return
    document = optimizer.state_dict()
    ordered = [each for group in optimizer.param_groups for each in group["params"]]
    numbers = {id(parameter): number for number, parameter in enumerate(ordered)}
    document["state"] = {
        numbers[id(parameter)]: dict(state[name])
        for name, parameter in part.named_parameters().items()
        if name in state
    }
    optimizer.load_state_dict(document)


def gradient_norms(session: str, norm_type: float) -> dict[int, list[torch.Tensor]]:
    """The norms of each stage's gradients; of what is shared, only of its first member."""
    part = Sessions.here().find(session)
    part.settle()
    repeated = _repeated(part.plan, part)
    norms: dict[int, list[torch.Tensor]] = {index: [] for index in part.stages}
    for index, name, parameter in part.located_parameters():
        if parameter.grad is not None and name not in repeated:
            norms[index].append(torch.linalg.vector_norm(parameter.grad, norm_type).cpu())
    return norms


def scale_gradients(session: str, factor: float) -> None:
    """Multiplies all gradients."""
    for parameter in Sessions.here().find(session).named_parameters().values():
        if parameter.grad is not None:
            parameter.grad.mul_(factor)


def unscale_gradients(session: str, inverse: float) -> bool:
    """Multiplies all gradients; returns True if one is infinite or no number."""
    part = Sessions.here().find(session)
    part.settle()
    is_infinite = False
    for parameter in part.named_parameters().values():
        if parameter.grad is not None:
            parameter.grad.mul_(inverse)
            is_infinite = is_infinite or not bool(torch.isfinite(parameter.grad).all())
    return is_infinite


def _repeated(plan: Plan, part: StageWorker) -> set[str]:
    """The names of parameters here that other stages or replicas count already."""
    repeated: set[str] = set()
    for sharing in plan.shared:
        first = sharing.members[0]
        for member in sharing.members[1:]:
            if member.worker == part.outbox.name:
                repeated.update(plan.prefixes[member.stage] + name for name in member.names)
        if first.worker == part.outbox.name:
            repeated -= {plan.prefixes[first.stage] + name for name in first.names}
    return repeated


def _without_parameters(group: Options) -> Options:
    return {name: value for name, value in group.items() if name != "params"}
